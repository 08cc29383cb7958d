"""The clock every part takes as an argument. The one rule: durations come from `monotonic`, never from `wall_ms`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What tells the time."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch; for records and display only, may jump."""
        ...


class SystemClock:
    """The machine's clocks. `monotonic` runs on while the process is stopped."""

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def wall_ms() -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()
