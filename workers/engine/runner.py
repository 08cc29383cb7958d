"""The model and its KV pool: turns a plan into the arrays of one ragged step and runs it.

Owns tensors, nothing else does. The one rule: `arrays` only reads the plan, `forward` only reads the arrays, so that a
step is fully described by one `RaggedBatch`, and `launch` is arrays → forward → sample, done when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.arrays import StepArrays, rehearsal, step_arrays
from workers.engine.batch import KVCache, RaggedBatch
from workers.engine.sampler import Draw, sample
from workers.engine.scheduler import Plan
from workers.engine.step import Computed, Result


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
        """The ragged batch of a non-empty plan, on the cache's device."""
        return self._place(step_arrays(plan))

    def forward(self, batch: RaggedBatch) -> Output:
        """Runs the step."""
        hidden = self._model.forward(batch, self._cache)
        return Output(hidden, self._model.logits(hidden[batch.logit_rows.long()]))

    def warm_up(self, tokens: int) -> None:
        """Runs a prefill of `tokens` tokens and one decode over blocks that hold nothing yet.

        Raises ArithmeticError when the scores are not finite: then nothing this model says can be used.
        """
        for start, count in ((0, tokens), (tokens - 1, 1)):
            if not bool(self.forward(self._place(rehearsal(start, count, tokens))).logits.isfinite().all()):
                raise ArithmeticError("the model's scores are not finite at start-up")

    def _place(self, arrays: StepArrays) -> RaggedBatch:
        device = self._cache.keys.device
        return RaggedBatch(*(torch.from_numpy(array).to(device) for array in arrays))


def encoded_rows(plan: Plan, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Of the step's hidden states [T, d], those of each span of an encode, [count, d], in span order."""
    if not plan.encoded:
        return []
    parts = torch.split(hidden, [span.count for span in plan.spans])
    return [part for part, span in zip(parts, plan.spans, strict=True) if span.encodes]
