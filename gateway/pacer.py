"""How long a stream may wait before it is told the next tokens: not at all while the loop keeps up, else longer.

A message costs the same whatever it holds, so a loop that is late sends fewer and larger ones. The one rule: first
tokens and ends are never held back.
"""

from __future__ import annotations

from typing import Final

_LATE_S: Final = 0.01  # the longest that tokens may wait for their turn before streams are held back
_LEAST_S: Final = 0.005
_MOST_S: Final = 0.25
_MOST_PER_STREAM_S: Final = 0.001  # a message costs a tenth of that: fewer streams cannot fill the loop
_WINDOW_S: Final = 0.02


class Pacer:
    """One per process: the worst that any stream saw in a short while, and one answer for all."""

    def __init__(self) -> None:
        self.streams = 0  # that are open now
        self._hold_s = 0.0
        self._worst_s = 0.0
        self._ends = 0.0

    @property
    def hold_s(self) -> float:
        """Seconds between what a stream is told and the next."""
        return min(self._hold_s, self.streams * _MOST_PER_STREAM_S)

    def waited(self, late_s: float, now: float) -> None:
        """Tokens that were there waited `late_s` for the loop."""
        self._worst_s = max(self._worst_s, late_s)
        if now < self._ends:
            return
        if self._worst_s > _LATE_S:
            self._hold_s = min(_MOST_S, max(_LEAST_S, self._hold_s * 1.5))
        else:
            self._hold_s = self._hold_s * 0.9 if self._hold_s > _LEAST_S else 0.0
        self._worst_s, self._ends = 0.0, now + _WINDOW_S
