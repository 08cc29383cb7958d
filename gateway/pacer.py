"""How long a stream may wait before it is told the next tokens: not at all while the loop keeps up, else longer.

A message costs the same whatever it holds, so a loop that is late sends fewer and larger ones. The one rule: first
tokens and ends are never held back.
"""

from __future__ import annotations

from typing import Final

# Tokens that wait this long for their turn show a loop that is full; measured: at 10 ms a core is at about 90 %.
_LATE_S: Final = 0.01
_LEAST_S: Final = 0.005
_MOST_S: Final = 0.25
_EVERY_S: Final = 0.02


class Pacer:
    """One per process: additive evidence of all streams, one answer for each."""

    def __init__(self) -> None:
        self.hold_s = 0.0
        self._next = 0.0

    def waited(self, late_s: float, now: float) -> None:
        """Tokens that were there waited `late_s` for the loop."""
        if now < self._next:
            return
        self._next = now + _EVERY_S
        if late_s > _LATE_S:
            self.hold_s = min(_MOST_S, max(_LEAST_S, self.hold_s * 1.5))
        else:
            self.hold_s = self.hold_s * 0.8 if self.hold_s > _LEAST_S else 0.0
