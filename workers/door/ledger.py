"""What admitted requests may come to need: the door's own reservation table.

Owns capacity. The one rule: an admission is `take` after `fits` said None, without anything awaited between; from then
on the request is never rejected for capacity.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """What one request may come to need."""

    sequences: int  # choices that run, or inputs to encode
    kv_tokens: int  # prompt + choices × max_tokens
    prefill_tokens: int  # tokens to compute before the first one comes out
    longest: int = 0  # most tokens of cache that one of its sequences needs


NOTHING = Need(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a worker takes on."""

    requests: int
    sequences: int
    kv_tokens: int  # may exceed the pool: most requests end before their max_tokens, and the engine preempts


class Ledger:
    """Reservations by engine key."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.sequences = 0
        self.kv_tokens = 0
        self._needs: dict[int, Need] = {}

    @property
    def requests(self) -> int:
        """Reservations there are."""
        return len(self._needs)

    def fits(self, need: Need) -> str | None:
        """None, or the sentence that says what is full. What exceeds the KV budget by itself fits when alone."""
        most = self.capacity
        if self.requests >= most.requests:
            return f"{self.requests} requests are held, the limit is {most.requests}"
        if self.sequences + need.sequences > most.sequences:
            return f"{self.sequences} sequences are held, {need.sequences} more exceed the limit of {most.sequences}"
        if self._needs and self.kv_tokens + need.kv_tokens > most.kv_tokens:
            return f"{self.kv_tokens} KV tokens are spoken for, {need.kv_tokens} more exceed {most.kv_tokens}"
        return None

    def take(self, key: int, need: Need) -> None:
        """Reserves. The key is new."""
        assert key not in self._needs, "a key was used twice"
        self._needs[key] = need
        self.sequences += need.sequences
        self.kv_tokens += need.kv_tokens

    def give(self, key: int) -> None:
        """Ends a reservation; unknown keys are ignored, so that every way of ending may say so."""
        need = self._needs.pop(key, NOTHING)
        self.sequences -= need.sequences
        self.kv_tokens -= need.kv_tokens

    def clear(self) -> None:
        """Ends all reservations: the engine is gone."""
        for key in list(self._needs):
            self.give(key)
