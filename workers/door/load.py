"""Absolute load: the engine's last word, together with what it has not read yet.

Owns the numbers routers reckon with. The one rule: an admission is in `current` from the moment it is answered, so
that a batch may be echoed at once (INV-3).
"""

from __future__ import annotations

from collections.abc import Callable

from shared.clock import Clock
from trunkline.common.v1 import common_pb2
from workers.door.holdings import Holdings
from workers.door.intake import Served
from workers.engine import messages as m

NOTHING = m.Load(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0)


class Loads:
    """See the module."""

    def __init__(self, holdings: Holdings, clock: Clock) -> None:
        self.engine = NOTHING
        self.served: Served | None = None  # now, or last
        self.listeners: dict[Callable[[], None], None] = {}  # called in order when a number may have changed
        self._holdings = holdings
        self._clock = clock

    def changed(self) -> None:
        """Say it after whatever may change a number."""
        for listener in self.listeners:
            listener()

    def current(self) -> common_pb2.Load:
        """The load now. What waits is at least what was admitted and is in no step yet: the engine may not know it."""
        ledger = self._holdings.ledger
        fresh = [each.execution for each in self._holdings.live if each.execution.waiting]
        engine = self.engine
        block = self.served.block_size if self.served is not None else 0
        return common_pb2.Load(
            artefact_hash=self.served.artefact_hash if self.served is not None else "",
            running=engine.running,
            waiting=max(engine.waiting, sum(each.need.sequences for each in fresh)),
            queued_prefill_tokens=max(engine.queued_prefill_tokens, sum(each.need.prefill_tokens for each in fresh)),
            kv_tokens_free=engine.kv_blocks_free * block,
            kv_tokens_cached=engine.kv_blocks_cached * block,
            kv_tokens_total=(engine.kv_blocks_free + engine.kv_blocks_cached + engine.kv_blocks_used) * block,
            kv_tokens_reserved=ledger.kv_tokens,
            requests=ledger.requests,
            max_requests=ledger.capacity.requests,
        )

    @property
    def oldest_waiting_ms(self) -> float:
        """Age of the oldest admission that is in no step yet."""
        now = self._clock.monotonic()
        waiting = (each.execution for each in self._holdings.live if each.execution.waiting)
        return max(((now - each.times.admitted) * 1e3 for each in waiting if each.paused_at is None), default=0.0)
