"""Device buffers with guard bytes around them, poisoned with NaN: what a kernel leaves out or overruns shows.

The one rule: a test reads what a kernel wrote from `Buffer.tensor`, and ends with `assert_intact` on every buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GUARD = 256  # bytes before and after: a multiple of every alignment asked for
PATTERN = 0xA5
POISON = 0xFF  # all bits set: NaN in fp32 and bf16, -1 in integers


@dataclass(frozen=True)
class Buffer:
    """`tensor` lies inside `memory`, GUARD bytes from either end."""

    memory: torch.Tensor
    tensor: torch.Tensor

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    @property
    def bits(self) -> bytes:
        """What the tensor holds, bit for bit."""
        return self._inner().cpu().numpy().tobytes()

    @property
    def intact(self) -> bool:
        """Whether nothing was written around the tensor."""
        size = self.tensor.numel() * self.tensor.element_size()
        return bool((self.memory[:GUARD] == PATTERN).all() and (self.memory[GUARD + size :] == PATTERN).all())

    def poison(self) -> None:
        """Make every element NaN (-1 in integers) again."""
        self._inner().fill_(POISON)

    def _inner(self) -> torch.Tensor:
        size = self.tensor.numel() * self.tensor.element_size()
        return self.memory[GUARD : GUARD + size]


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Buffer:
    """A buffer of NaN (-1 in integers), aligned to 256 bytes."""
    count = 1
    for extent in shape:
        count *= extent
    size = count * dtype.itemsize
    memory = torch.full((size + 2 * GUARD,), PATTERN, dtype=torch.uint8, device="cuda")
    buffer = Buffer(memory, memory[GUARD : GUARD + size].view(dtype).view(shape))
    buffer.poison()
    return buffer


def guarded(values: torch.Tensor) -> Buffer:
    """A copy of `values` (from any device, in their dtype), finished: kernels read weights ahead of the stream."""
    buffer = poisoned(*values.shape, dtype=values.dtype)
    buffer.tensor.copy_(values)
    torch.cuda.synchronize()
    return buffer


def ints(values: list[int] | torch.Tensor) -> Buffer:
    """A copy of `values` as int32."""
    return guarded(torch.as_tensor(values, dtype=torch.int32))


def assert_intact(*buffers: Buffer) -> None:
    """Nothing was written around any of them."""
    torch.cuda.synchronize()
    assert all(buffer.intact for buffer in buffers), "a kernel wrote outside its buffer"


def stream() -> int:
    """The current stream, as the kernels take it."""
    return int(torch.cuda.current_stream().cuda_stream)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The calls of `run` (on the current stream) as a graph; they ran once before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
