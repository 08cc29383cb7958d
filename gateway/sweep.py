"""Looks after what gateways that are gone have left behind.

The one rule: every request that a gateway owned ends exactly once: by its owner, by the gateway that took it over, or
here; and whoever ends it gives its limits back. Sweeping twice, or by two gateways at once, changes nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from prometheus_client import Counter

from gateway.admission import Admission
from gateway.custody import GONE_MS, Custody, Ending
from shared.errors import Reason, TrunklineError, to_status
from shared.state import StateAway

EVERY_S: Final = 2.0
_LOST: Final = TrunklineError(Reason.OWNER_LOST, "the gateway that owned the request is gone")
_ENDING: Final = Ending(status=to_status(_LOST).SerializeToString())

_swept = Counter(
    "trunkline_swept_requests_total", "Requests of gateways that are gone, by what became of them.", ["outcome"]
)


class Sweeper:
    """Run `run` as a task: it also says that this gateway lives."""

    def __init__(
        self, custody: Custody, admission: Admission, gone_ms: int = GONE_MS, every_s: float = EVERY_S
    ) -> None:
        self._custody = custody
        self._admission = admission
        self._gone_ms = gone_ms
        self._every_s = every_s

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            with suppress(StateAway):  # counted by the store; the next turn tries again
                await self.sweep()
            await asyncio.sleep(self._every_s)

    async def sweep(self) -> None:
        """Sweep once. Raises StateAway."""
        for incarnation in await self._custody.gone(self._gone_ms):
            owned = await self._custody.owned_by(incarnation)
            left = [await self._end(incarnation, request_id, tenant) for request_id, tenant in owned]
            if not any(left):
                self._custody.forget_owner(incarnation)

    async def _end(self, incarnation: str, request_id: str, tenant: str) -> bool:
        """End one request. True if it is to be looked at again."""
        swept = await self._custody.sweep(incarnation, request_id, _ENDING)
        if swept.outcome == "parked":
            return True
        _swept.labels(swept.outcome).inc()
        if swept.outcome in ("failed", "none"):
            self._admission.settle(tenant, request_id, None)
        if swept.idempotency_key and not swept.worked:
            self._custody.release(tenant, swept.idempotency_key, request_id)
        self._custody.swept(incarnation, request_id, tenant)
        return False
