"""How many prefill tokens a step may have beside streams that decode, so that their next tokens come in time.

Owns a small model of the machine, step_ms ≈ a + b·prefill + c·decodes + d·context, which follows the measured steps:
least squares of the relative errors over the last fifty or so, no number below zero, and a surprise counts less the
larger it is (Huber's weights). The one rule: arithmetic on what it was told and nothing else, so equal steps give equal
budgets.
"""

from __future__ import annotations

CHUNK = 16  # a step's least prefill, and what it is a multiple of: nobody starves, whatever was measured

_MEMORY = 0.98  # what a measured step counts when one more was measured
_SURPRISE = 3.0  # usual errors: a step that is further off pulls no harder than one that is this far off
_MARGIN = 2.0  # usual errors between the predicted step and the objective
_SWEEPS = 4
_FADED = 1e-9  # a number stays as it is while what is remembered says less of it than this


class Pacer:
    """Follows the steps of one engine. Times are milliseconds."""

    def __init__(self, objective_ms: float, most: int) -> None:
        """`objective_ms` between two tokens of a stream, 0 = none; `most` tokens in a step.

        Until something was measured, a step full of prefill is taken to need just the objective.
        """
        self._objective = objective_ms
        self._most = most
        self._numbers = [0.0, objective_ms / most, 0.0, 0.0]  # a, b, c, d
        self._squares = [[0.0] * 4 for _ in range(4)]  # XᵀX and Xᵀy of the remembered steps
        self._products = [0.0] * 4
        self._error = objective_ms / 8  # usual distance between prediction and step

    def allowance(self, decodes: int, context: int) -> int:
        """Prefill tokens beside `decodes` streams with `context` cached tokens in all: 16, 32, …, or no bound."""
        if not self._objective:
            return self._most
        room = self._objective - _MARGIN * self._error - self.predicted(0, decodes, context)
        tokens = room / max(self._numbers[1], self._objective / 1e6)
        return max(CHUNK, int(min(tokens, self._most)) // CHUNK * CHUNK)

    def predicted(self, prefill: int, decodes: int, context: int) -> float:
        """Milliseconds of such a step."""
        a, b, c, d = self._numbers
        return a + b * prefill + c * decodes + d * context

    def observe(self, prefill: int, decodes: int, context: int, took_ms: float) -> None:
        """A step of `prefill` tokens and `decodes` streams with `context` cached tokens in all took `took_ms`."""
        if not self._objective:
            return
        error = took_ms - self.predicted(prefill, decodes, context)
        limit = _SURPRISE * self._error
        share = self._objective / max(took_ms, 0.01 * self._objective)
        self._remember((1.0, prefill, decodes, context), took_ms, share**2 * limit / max(abs(error), limit))
        for _ in range(_SWEEPS):
            self._fit()
        self._error += 0.1 * (min(abs(error), 2 * limit) - self._error)
        self._error = max(self._error, 0.01 * self._objective)

    def _remember(self, features: tuple[float, ...], took_ms: float, weight: float) -> None:
        for i, x in enumerate(features):
            row = self._squares[i]
            self._products[i] = _MEMORY * self._products[i] + weight * x * took_ms
            self._squares[i] = [_MEMORY * old + weight * x * y for old, y in zip(row, features, strict=True)]

    def _fit(self) -> None:
        """One sweep of coordinate descent: each number is the best one, not below zero, beside the other three."""
        for i, row in enumerate(self._squares):
            if row[i] > _FADED:
                others = sum(row[j] * self._numbers[j] for j in range(4) if j != i)
                self._numbers[i] = max(0.0, (self._products[i] - others) / row[i])
