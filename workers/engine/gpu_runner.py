"""The runner of a GPU: steps are launched and read later, so that the device never waits for the host.

A step that only decodes is one graph, captured for a few numbers of rows (`BUCKETS`); any other is launched call by
call, which the step in flight hides. The one rule: between `launch` and `result` nothing is waited for, and a step's
inputs are in an arena of its own until it is done.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trunkline_kernels.cuda.door import arguments
from trunkline_kernels.cuda.step import StepBegin
from trunkline_kernels.door import sample_struct
from workers.engine.arena import Arena
from workers.engine.arrays import Ints, StepArrays, step_arrays
from workers.engine.batch import KVCache, RaggedBatch
from workers.engine.blocks import blocks_for
from workers.engine.device import Device, Event, Replay
from workers.engine.draws import DrawArrays, draw_arrays
from workers.engine.messages import Logprob
from workers.engine.runner import Model, encoded_rows
from workers.engine.sampler import Draw, Pick
from workers.engine.scheduler import Limits, Plan
from workers.engine.step import Result

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
ARENAS = 3  # the step in flight, the one that is launched, and one to spare
MOST_TOPS = 20  # log-probabilities beside the drawn token's, as the API allows


@dataclass(frozen=True, slots=True)
class Recorded:
    """A captured decode of `rows` rows."""

    rows: int
    replay: Replay
    hidden: torch.Tensor  # [rows, d], of the last replay
    logits: torch.Tensor  # fp32 [rows, V], likewise


@dataclass(frozen=True, slots=True)
class Drawn:
    """What sampling writes for the host, in memory that both sides reach."""

    tokens: torch.Tensor  # int32 [rows]
    logprobs: torch.Tensor  # fp32 [rows]
    top_ids: torch.Tensor  # int32 [rows, MOST_TOPS]
    top_logprobs: torch.Tensor  # fp32 [rows, MOST_TOPS]


class Flying:
    """A launched step: see `step.Launched`."""

    def __init__(self, done: Event, drawn: Drawn, draws: Sequence[Draw], hidden: list[torch.Tensor]) -> None:
        self._done, self._drawn, self._draws, self._hidden = done, drawn, draws, hidden

    def result(self) -> Result:
        """Waits for the step."""
        self._done.wait()
        tokens = self._drawn.tokens[: len(self._draws)].tolist()
        drawn = zip(range(len(tokens)), tokens, self._draws, strict=True)
        return Result([self._pick(*each) for each in drawn], [rows.cpu() for rows in self._hidden])

    def _pick(self, row: int, token: int, draw: Draw) -> Pick | None:
        wanted = draw.sampling.logprobs
        if token < 0:
            return None
        if wanted < 0:
            return Pick(token)
        best = self._drawn.top_ids[row, :wanted].tolist(), self._drawn.top_logprobs[row, :wanted].tolist()
        return Pick(token, Logprob(float(self._drawn.logprobs[row]), *best))


class GpuRunner:
    """One model on one GPU. Not thread-safe."""

    overlaps = True

    def __init__(self, model: Model, cache: KVCache, limits: Limits, vocabulary: int, device: Device) -> None:
        self._model, self._cache, self._device = model, cache, device
        self._vocabulary = vocabulary
        self._arenas = itertools.cycle([(Arena(device), _drawn(device, limits.max_seqs)) for _ in range(ARENAS)])
        self._picks = _ints(device, limits.max_seqs)  # what the last step drew, by its row among those that drew
        self._before = Plan(())
        self._columns = _ints(device, 4, limits.max_seqs)  # tokens, positions, slots, context lengths of a graph
        self._tables = _ints(device, limits.max_seqs, blocks_for(limits.max_context))
        self._starts = torch.arange(limits.max_seqs + 1, dtype=torch.int32, device=device.place)
        self._graphs: list[Recorded] = []

    def launch(self, plan: Plan, draws: Sequence[Draw]) -> Flying:
        """See `step.StepRunner`."""
        arena, drawn = next(self._arenas)
        arrays = step_arrays(plan)
        for row, pick in plan.carried(self._before):
            arrays.tokens[row] = -1 - pick
        self._before = plan
        sampling = draw_arrays(draws)
        graph = self._graph(arrays)
        inputs = _padded(arrays, graph.rows) if graph else arrays
        sent = arena.put_all([*inputs, *sampling])
        if graph:
            hidden, logits = self._decode(graph, *sent[: len(inputs)])
        else:
            hidden, logits = self._mixed(arrays, *(part.view(torch.int32) for part in sent[: len(inputs)]))
        if draws:
            self._sample(logits, sampling, sent[len(inputs) :], drawn)
        arena.done = self._device.mark()
        return Flying(arena.done, drawn, draws, encoded_rows(plan, hidden))

    def record(self) -> None:
        """Captures the decodes; not while it serves."""
        most = len(self._starts) - 1
        for rows in [*itertools.takewhile(lambda size: size < most, BUCKETS), min(most, BUCKETS[-1])]:
            self._graphs.append(self._recorded(rows))

    def _recorded(self, rows: int) -> Recorded:
        """A decode of `rows` empty rows: no context is read and no slot written."""
        self._columns.zero_()
        self._columns[2].fill_(-1)
        tokens, positions, slots, context_lens = (column[:rows] for column in self._columns)
        batch = RaggedBatch(
            tokens, positions, slots, self._starts[: rows + 1], context_lens, self._tables[:rows], self._starts[:rows]
        )

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self._model.forward(batch, self._cache)
            return hidden, self._model.logits(hidden)

        replay, (hidden, logits) = self._device.capture(run)
        return Recorded(rows, replay, hidden, logits)

    def _graph(self, arrays: StepArrays) -> Recorded | None:
        """The smallest graph that holds the step; None if it does more than decode, or is larger than any."""
        rows, spans = len(arrays.tokens), len(arrays.context_lens)
        if not rows == spans == len(arrays.logit_rows):
            return None
        return next((graph for graph in self._graphs if graph.rows >= rows), None)

    def _decode(
        self, graph: Recorded, columns: torch.Tensor, tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stride = self._columns.shape[1]
        table_stride = self._tables.shape[1]
        args = arguments(
            StepBegin, columns=columns.data_ptr(), picks=self._picks.data_ptr(), picks_count=len(self._picks),
            columns_out=self._columns.data_ptr(), column_count=4, rows=graph.rows, column_stride=stride,
            tables=tables.data_ptr(), tables_out=self._tables.data_ptr(), table_rows=graph.rows,
            width=tables.nbytes // 4 // graph.rows, table_stride=table_stride,
        )  # fmt: skip
        self._device.step_begin(args)
        graph.replay()
        return graph.hidden, graph.logits

    def _mixed(
        self, arrays: StepArrays, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor,
        query_starts: torch.Tensor, context_lens: torch.Tensor, tables: torch.Tensor, logit_rows: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        known = torch.empty_like(tokens)
        args = arguments(
            StepBegin, columns=tokens.data_ptr(), picks=self._picks.data_ptr(), picks_count=len(self._picks),
            columns_out=known.data_ptr(), column_count=1, rows=len(tokens), column_stride=len(tokens),
        )  # fmt: skip
        self._device.step_begin(args)
        tables = tables.view(arrays.block_tables.shape)
        batch = RaggedBatch(known, positions, slots, query_starts, context_lens, tables, logit_rows)
        hidden = self._model.forward(batch, self._cache)
        return hidden, self._model.logits(hidden[logit_rows])

    def _sample(self, logits: torch.Tensor, sampling: DrawArrays, sent: Sequence[torch.Tensor], drawn: Drawn) -> None:
        rows, biases, histories, lengths = (part.data_ptr() for part in sent)
        args = sample_struct(
            logits=logits.data_ptr(), params=rows, biases=biases, histories=histories, history_lengths=lengths,
            tokens=drawn.tokens.data_ptr(), next_tokens=self._picks.data_ptr(), logprobs=drawn.logprobs.data_ptr(),
            top_ids=drawn.top_ids.data_ptr(), top_logprobs=drawn.top_logprobs.data_ptr(), rows=len(sampling.rows),
            vocabulary=self._vocabulary, stride=logits.shape[1], bias_total=len(sampling.biases),
            history_total=len(sampling.histories), history_capacity=sampling.histories.shape[1],
            next_total=len(self._picks), tops=MOST_TOPS,
        )  # fmt: skip
        self._device.sample(args)


def _padded(arrays: StepArrays, rows: int) -> tuple[Ints, Ints]:
    """Columns [4, rows] and tables [rows, width] of a decode, filled up with rows that read and write nothing."""
    count = len(arrays.tokens)
    columns = np.zeros((4, rows), np.int32)
    columns[2] = -1
    columns[:, :count] = arrays.tokens, arrays.positions, arrays.slots, arrays.context_lens
    tables = np.zeros((rows, arrays.block_tables.shape[1]), np.int32)
    tables[:count] = arrays.block_tables
    return columns, tables


def _ints(device: Device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device.place)


def _drawn(device: Device, rows: int) -> Drawn:
    def ints(*shape: int) -> torch.Tensor:
        return device.shared(4 * math.prod(shape)).view(torch.int32).view(shape)

    best = ints(rows, MOST_TOPS), ints(rows, MOST_TOPS)
    return Drawn(ints(rows), ints(rows).view(torch.float32), best[0], best[1].view(torch.float32))
