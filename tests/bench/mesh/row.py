"""A row of the result: what was measured, what it should be, what it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trunkctl.bench.measures import quantile as quantile


@dataclass(frozen=True)
class Row:
    """One measure. `most`: the target is an upper bound; None of a target: it is told beside the others."""

    measure: str
    unit: str
    value: float
    target: float | None = None
    bound: Literal["most", "least"] = "most"
    remark: str = ""
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))

    @property
    def met(self) -> bool | None:
        """Whether the value keeps the target; None where there is none."""
        if self.target is None:
            return None
        return self.value <= self.target if self.bound == "most" else self.value >= self.target

    def line(self) -> tuple[str, ...]:
        """As cells of a table."""
        sign = "≤" if self.bound == "most" else "≥"
        target = "" if self.target is None else f"{sign} {self.target:g}"
        met = {True: "yes", False: "NO", None: ""}[self.met]
        return self.measure, target, f"{self.value:,.4g} {self.unit}".strip(), met, f"{self.load:.2f}", self.remark


def milliseconds(seconds: Sequence[float], share: float) -> float:
    """A quantile, in milliseconds."""
    return round(1e3 * quantile(seconds, share), 3)
