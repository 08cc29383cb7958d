"""The processes' clock: the loop's time. It runs on while a process is stopped, as the real one does."""

from __future__ import annotations

from typing import Final

from tests.sim.loop import SimLoop

EPOCH_MS: Final = 1_800_000_000_000


class SimClock:
    """See the module."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        """Seconds."""
        return self._loop.now

    def wall_ms(self) -> int:
        """Milliseconds since the epoch, of a fixed day."""
        return EPOCH_MS + round(self._loop.now * 1000)
