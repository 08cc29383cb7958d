"""What a runner needs of a device: memory that both sides reach, calls in order, and a way to know that they are done.

Owns the line between the runner's logic and CUDA, so that the logic is tested without a GPU. The one rule: everything
here happens on one stream, in the order of the calls, and only `Event.wait` waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from shared.clock import Clock
from trunkline_kernels.cuda.door import PDL
from trunkline_kernels.cuda.sampling import sample
from trunkline_kernels.cuda.step import StepBegin, step_begin
from trunkline_kernels.door import SampleArgs
from workers.engine.accelerator import DeviceError

STEP_LIMIT_S = 60.0  # a step takes milliseconds, the longest prefill seconds
LOOK_S = 20e-6  # between looks at a step in flight; the next one runs meanwhile

Outputs = tuple[torch.Tensor, ...]
Replay = Callable[[], None]


class Event(Protocol):
    """A point in the order of calls."""

    def wait(self) -> None:
        """Returns when everything before it has run."""
        ...


class Device(Protocol):
    """Where steps run."""

    place: torch.device

    def shared(self, size: int) -> torch.Tensor:
        """uint8 [size] of host memory that the device reads and writes too."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies host memory of `shared` to the device."""
        ...

    def step_begin(self, args: StepBegin) -> None:
        """See `trunkline_kernels.cuda.step`."""
        ...

    def sample(self, args: SampleArgs) -> None:
        """See `trunkline_kernels.cuda.sampling`."""
        ...

    def mark(self) -> Event:
        """The point after the last call."""
        ...

    def capture(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        """What repeats the calls of `run`, and where each replay leaves its outputs. Runs it before."""
        ...


class CudaEvent:
    """See `Event`. Looks again and again, so that a GPU that hangs is noticed: DeviceError after STEP_LIMIT_S."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        began = self._clock.monotonic()
        while not self._event.query():  # type: ignore[no-untyped-call]
            if self._clock.monotonic() - began > STEP_LIMIT_S:
                raise DeviceError(f"the GPU did not finish a step in {STEP_LIMIT_S:g} s")
            time.sleep(LOOK_S)


class CudaDevice:
    """One GPU, on a stream that becomes this thread's current one. Graphs share one memory pool: they take turns."""

    def __init__(self, place: torch.device, clock: Clock) -> None:
        self.place = place
        self._clock = clock
        torch.cuda.synchronize(place)
        torch.cuda.set_stream(torch.cuda.Stream(place))  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def shared(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def step_begin(self, args: StepBegin) -> None:
        args.flags = PDL
        step_begin(args, self._stream())

    def sample(self, args: SampleArgs) -> None:
        args.flags = PDL
        sample(args, self._stream())

    def mark(self) -> CudaEvent:
        return CudaEvent(self._clock)

    def capture(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        run()  # algorithms are chosen and kernels loaded outside of the capture
        torch.cuda.synchronize(self.place)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()
        return graph.replay, outputs

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.place).cuda_stream)
