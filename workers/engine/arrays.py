"""From a plan to the numbers of its step, on the host.

The one rule: a step is fully described by these arrays; whoever runs it looks at nothing else of the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workers.engine.batch import BLOCK_SIZE
from workers.engine.blocks import blocks_for
from workers.engine.scheduler import Plan, Span

Ints = npt.NDArray[np.int32]


class StepArrays(NamedTuple):
    """The fields of `batch.RaggedBatch`, in its order, before they are placed anywhere."""

    tokens: Ints
    positions: Ints
    slots: Ints
    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    logit_rows: Ints


def step_arrays(plan: Plan) -> StepArrays:
    """The arrays of a non-empty plan. Pending tokens are 0 in it."""
    spans = plan.spans
    starts = np.array([span.start for span in spans], np.int32)
    counts = np.array([span.count for span in spans], np.int32)
    query_starts = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(counts, out=query_starts[1:])
    owner = np.repeat(np.arange(len(spans)), counts)
    positions = (np.arange(len(owner)) + (starts - query_starts[:-1])[owner]).astype(np.int32)
    tables = _tables(spans)
    return StepArrays(
        tokens=np.concatenate([_tokens(span) for span in spans]),
        positions=positions,
        slots=tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=query_starts,
        context_lens=starts + counts,
        block_tables=tables,
        logit_rows=query_starts[1:][[span.samples for span in spans]] - 1,
    )


def rehearsal(start: int, count: int, length: int) -> StepArrays:
    """`count` tokens from `start` on of a sequence of `length` in the pool's first blocks, for warming up."""
    where = np.arange(start, start + count, dtype=np.int32)
    return StepArrays(
        tokens=np.zeros(count, np.int32),
        positions=where,
        slots=where,
        query_starts=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        block_tables=np.arange(blocks_for(length), dtype=np.int32)[None],
        logit_rows=np.array([count - 1], np.int32),
    )


def _tokens(span: Span) -> Ints:
    if span.pending:
        return np.zeros(1, np.int32)
    return span.sequence.tokens[span.start : span.start + span.count]


def _tables(spans: tuple[Span, ...]) -> Ints:
    """Block ids of the spans' contexts, int32 [S, B], padded with 0."""
    used = [blocks_for(span.start + span.count) for span in spans]
    tables = np.zeros((len(spans), max(used)), np.int32)
    for row, span, count in zip(tables, spans, used, strict=True):
        row[:count] = span.sequence.blocks[:count]
    return tables
