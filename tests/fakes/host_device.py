"""A device that is the CPU: `workers.engine.device.Device` on plain memory and the CPU twins of the calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from trunkline_kernels.cuda.step import StepBegin
from trunkline_kernels.door import Context, SampleArgs
from workers.engine.batch import KVCache, RaggedBatch
from workers.engine.device import Outputs, Replay
from workers.engine.runner import Model


class HostEvent:
    """A step that had run before anybody could wait for it."""

    def wait(self) -> None:
        return


class HostDevice:
    """Calls are done when they return."""

    place = torch.device("cpu")

    def __init__(self) -> None:
        self._context = Context(1)
        self.captured = 0
        self.replayed = 0
        self.mixed = 0

    def shared(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)
        source.fill_(0xFF)  # the host never reads it again

    def step_begin(self, args: StepBegin) -> None:
        columns = _ints(args.columns, args.column_count, args.rows)
        picks = _ints(args.picks, args.picks_count)
        out = _ints(args.columns_out, args.column_count, args.column_stride)
        tokens = columns[0].copy()
        for row in np.flatnonzero(tokens < 0):
            tokens[row] = max(0, picks[-1 - tokens[row]])
        out[:, : args.rows] = columns
        out[0, : args.rows] = tokens
        if args.table_rows:
            wide = _ints(args.tables_out, args.table_rows, args.table_stride)
            wide[:, : args.width] = _ints(args.tables, args.table_rows, args.width)
        self.mixed += args.table_rows == 0

    def sample(self, args: SampleArgs) -> None:
        scores = np.empty(args.rows * args.stride, np.float32)
        args.scores = scores.ctypes.data
        self._context.sample(args)

    def mark(self) -> HostEvent:
        return HostEvent()

    def capture(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        outputs = run()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            for kept, new in zip(outputs, run(), strict=True):
                kept.copy_(new)

        return replay, outputs


class Trimmed:
    """A model that leaves a graph's empty rows alone, as the CUDA kernels do, and says nonsense for them."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def forward(self, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        used = int((batch.slots >= 0).sum())
        if used == 0:
            return torch.full((len(batch.tokens), 1), torch.nan, dtype=torch.float64)
        if used == len(batch.tokens):
            return self._model.forward(batch, kv)
        assert not bool(batch.context_lens[used:].any()), "an empty row has a context"
        rows = slice(used)
        inner = RaggedBatch(
            batch.tokens[rows], batch.positions[rows], batch.slots[rows], batch.query_starts[: used + 1],
            batch.context_lens[rows], batch.block_tables[rows], batch.logit_rows[rows],
        )  # fmt: skip
        hidden = self._model.forward(inner, kv)
        empty = hidden.new_full((len(batch.tokens) - used, *hidden.shape[1:]), torch.nan)
        return torch.cat([hidden, empty])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


def _ints(address: int | None, *shape: int) -> npt.NDArray[np.int32]:
    count = int(np.prod(shape))
    if not count:
        return np.zeros(shape, np.int32)
    assert address is not None
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)), (count,)).reshape(shape)
