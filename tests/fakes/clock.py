"""A clock that moves when told to, and one that runs and can be put forward."""

from __future__ import annotations

from shared.clock import SystemClock


class FakeClock:
    """Starts at 1,000 s of monotonic time and at a fixed date."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._epoch_ms = 1_800_000_000_000 - 1_000_000

    def monotonic(self) -> float:
        return self._now

    def wall_ms(self) -> int:
        return self._epoch_ms + round(self._now * 1000)

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now += seconds


class ShiftedClock(SystemClock):
    """The system's clock, ahead of it by what it was put forward."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds
