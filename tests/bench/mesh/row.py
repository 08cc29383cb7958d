"""A row of the result: what was measured, what it should be, what it is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trunkctl.bench.measures import quantile as quantile


@dataclass(frozen=True)
class Row:
    """One measure. `most`: the target is an upper bound. No value: it could not be measured."""

    measure: str
    unit: str
    value: float | None
    target: float | None = None
    bound: Literal["most", "least"] = "most"
    remark: str = ""
    load: float = field(default_factory=lambda: round(os.getloadavg()[0], 2))

    @property
    def met(self) -> bool | None:
        """Whether the value keeps the target; None where there is none."""
        if self.target is None or self.value is None:
            return None
        return self.value <= self.target if self.bound == "most" else self.value >= self.target

    def line(self) -> tuple[str, ...]:
        """As cells of a table."""
        sign = "≤" if self.bound == "most" else "≥"
        target = "" if self.target is None else f"{sign} {self.target:g}"
        met = {True: "yes", False: "NO", None: ""}[self.met]
        value = "-" if self.value is None else f"{_rounded(self.value)} {self.unit}"
        return self.measure, target, value, met, f"{self.load:.2f}", self.remark


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def milliseconds(seconds: Sequence[float], share: float) -> float:
    """A quantile, in milliseconds."""
    return round(1e3 * quantile(seconds, share), 3)
