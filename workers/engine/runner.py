"""The model and its KV pool: turns a plan into the arrays of one ragged step and runs it.

Owns tensors, nothing else does. The one rule: `arrays` only reads the plan, `forward` only reads the arrays, so that a
step is fully described by one `RaggedBatch`, and `launch` is arrays → forward → sample, done when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.batch import BLOCK_SIZE, KVCache, RaggedBatch
from workers.engine.blocks import blocks_for
from workers.engine.sampler import Draw, sample
from workers.engine.scheduler import Plan, Span
from workers.engine.step import Computed, Result

Ints = npt.NDArray[np.int32]


class Model(Protocol):
    """A decoder over a ragged batch and a paged cache."""

    def forward(self, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """Final hidden states [T, d]; writes keys and values."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [R, V] of hidden rows [R, d]."""
        ...


@dataclass(frozen=True, slots=True)
class Output:
    """What a step computed."""

    hidden: torch.Tensor  # [T, d], final-normed
    logits: torch.Tensor  # fp32 [R, V], one row per span that samples, in span order


class Runner:
    """One model on one device. Not thread-safe: one step at a time."""

    overlaps = False

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def launch(self, plan: Plan, draws: Sequence[Draw]) -> Computed:
        """See `step.StepRunner`; the step has run when this returns."""
        output = self.forward(self.arrays(plan))
        return Computed(Result(sample(output.logits, draws), encoded_rows(plan, output.hidden)))

    def arrays(self, plan: Plan) -> RaggedBatch:
        """The ragged batch of a non-empty plan, on the cache's device. Pending tokens are 0 in it."""
        spans = plan.spans
        starts = np.array([span.start for span in spans], np.int32)
        counts = np.array([span.count for span in spans], np.int32)
        query_starts = np.zeros(len(spans) + 1, np.int32)
        np.cumsum(counts, out=query_starts[1:])
        owner = np.repeat(np.arange(len(spans)), counts)
        positions = (np.arange(len(owner)) + (starts - query_starts[:-1])[owner]).astype(np.int32)
        tables = _tables(spans)
        return RaggedBatch(
            tokens=self._place(np.concatenate([_tokens(span) for span in spans])),
            positions=self._place(positions),
            slots=self._place(tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE),
            query_starts=self._place(query_starts),
            context_lens=self._place(starts + counts),
            block_tables=self._place(tables),
            logit_rows=self._place(query_starts[1:][[span.samples for span in spans]] - 1),
        )

    def forward(self, batch: RaggedBatch) -> Output:
        """Runs the step."""
        hidden = self._model.forward(batch, self._cache)
        return Output(hidden, self._model.logits(hidden[batch.logit_rows.long()]))

    def warm_up(self, tokens: int) -> None:
        """Runs a prefill of `tokens` tokens and one decode over blocks that hold nothing yet.

        Raises ArithmeticError when the scores are not finite: then nothing this model says can be used.
        """
        for start, count in ((0, tokens), (tokens - 1, 1)):
            where = np.arange(start, start + count, dtype=np.int32)
            batch = RaggedBatch(
                tokens=self._place(np.zeros(count, np.int32)),
                positions=self._place(where),
                slots=self._place(where),
                query_starts=self._place(np.array([0, count], np.int32)),
                context_lens=self._place(np.array([start + count], np.int32)),
                block_tables=self._place(np.arange(blocks_for(tokens), dtype=np.int32)[None]),
                logit_rows=self._place(np.array([count - 1], np.int32)),
            )
            if not bool(self.forward(batch).logits.isfinite().all()):
                raise ArithmeticError("the model's scores are not finite at start-up")

    def _place(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._cache.keys.device)


def encoded_rows(plan: Plan, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Of the step's hidden states [T, d], those of each span of an encode, [count, d], in span order."""
    if not plan.encoded:
        return []
    parts = torch.split(hidden, [span.count for span in plan.spans])
    return [part for part, span in zip(parts, plan.spans, strict=True) if span.encodes]


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
