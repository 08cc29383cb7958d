"""Who may still come: the highest (epoch, attempt) seen of each request id, and whether it has ended.

Owns the marks of ids that the door does not hold (rule 5 of the wire), tombstones among them. The one rule: whoever
ends a request says `ended` here before it forgets it, else a delayed submission starts it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.clock import Clock
from shared.wire import TOMBSTONE_S, Stamp

CAPACITY = 65_536


@dataclass(frozen=True, slots=True, order=True)
class _Mark:
    stamp: Stamp
    ended: bool


class Fences:
    """Marks live `ttl_s` after they were last raised.

    Past `capacity` the oldest mark goes first and is counted in `evicted`: at 1,000 endings a second 60 s of them fit,
    and a mark guards only against messages that were delayed that long.
    """

    def __init__(self, clock: Clock, *, ttl_s: float = TOMBSTONE_S, capacity: int = CAPACITY) -> None:
        self.evicted = 0
        self._clock = clock
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._marks: dict[bytes, tuple[_Mark, float]] = {}  # in order of expiry

    def __len__(self) -> int:
        return len(self._marks)

    def refuses(self, request_id: bytes, stamp: Stamp) -> Stamp | None:
        """The highest stamp seen if it forbids `stamp`: a higher one was seen, or this one has ended."""
        mark, expires = self._marks.get(request_id, (None, 0.0))
        if mark is None or expires <= self._clock.monotonic() or _Mark(stamp, False) >= mark:
            return None
        return mark.stamp

    def saw(self, request_id: bytes, stamp: Stamp) -> None:
        """A message carried `stamp`: lower ones are refused from now on."""
        self._raise(request_id, _Mark(stamp, False))

    def ended(self, request_id: bytes, stamp: Stamp) -> None:
        """`stamp` ended or was cancelled: it and lower ones are refused from now on."""
        self._raise(request_id, _Mark(stamp, True))

    def sweep(self) -> None:
        """Forgets what has expired."""
        now = self._clock.monotonic()
        while self._marks and (oldest := next(iter(self._marks))) and self._marks[oldest][1] <= now:
            del self._marks[oldest]

    def _raise(self, request_id: bytes, mark: _Mark) -> None:
        now = self._clock.monotonic()
        known, expires = self._marks.pop(request_id, (mark, now))
        if expires > now:
            mark = max(mark, known)
        elif len(self._marks) >= self._capacity:
            del self._marks[next(iter(self._marks))]
            self.evicted += 1
        self._marks[request_id] = (mark, now + self._ttl_s)
