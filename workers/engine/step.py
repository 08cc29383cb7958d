"""What the engine and a runner say to each other about one step.

Owns the interface only. The one rule: steps run on the device in the order in which they were launched. So a block that
was freed after a launch may be written by the next step, a block that an earlier step fills may be read by it, and a
token that an earlier step draws may be its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.sampler import Draw, Pick
from workers.engine.scheduler import Plan


@dataclass(frozen=True, slots=True)
class Result:
    """What a step computed."""

    picks: Sequence[Pick | None]  # one for each span that samples, in span order; None where scores are not finite
    hidden: Sequence[torch.Tensor]  # [count, d], final-normed, for each span of an encode, in span order


class Launched(Protocol):
    """A step that was given to the device."""

    def result(self) -> Result:
        """What it computed; blocks until that is known. Asked once, in the order of the launches."""
        ...


class StepRunner(Protocol):
    """Computes plans (`runner.Runner`, or something that pretends to)."""

    @property
    def overlaps(self) -> bool:
        """True if `launch` returns before the step has run, and takes a next step before this one's result is asked."""
        ...

    def launch(self, plan: Plan, draws: Sequence[Draw]) -> Launched:
        """Starts a non-empty plan; `draws` has one entry per span that samples, in span order.

        All that is read of the plan's sequences is read before it returns. The token of a span that is `pending` is
        known to nobody here: it is the pick that the step launched just before draws for it (`Plan.carried`).
        """
        ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A step that had run before `launch` returned."""

    outcome: Result

    def result(self) -> Result:
        """See `Launched`."""
        return self.outcome
