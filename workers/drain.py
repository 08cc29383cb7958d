"""How a worker leaves: it says so, refuses new work, lets what runs finish or hands it back, and only then ends.

Owns that order. The one rule: the last replica of an artefact hands nothing back while there is time, since nobody
could go on with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.clock import Clock
from shared.lifecycle import Lifecycle
from shared.peers import Peers
from trunkline.worker.v1 import worker_pb2
from workers.door.door import Door

LOOK_S = 0.05
HAND_BACK_S = 5.0  # for owners to take what is handed back


class Drain:
    """See the module."""

    def __init__(
        self,
        door: Door,
        lifecycle: Lifecycle,
        peers: Peers,
        clock: Clock,
        *,
        artefact_hash: str,
        grace_s: float,
        release: bool = True,
    ) -> None:
        """`grace_s`: how long what runs may take, and `release`: whether it is handed back, where the drain does not
        say."""
        self._door = door
        self._lifecycle = lifecycle
        self._peers = peers
        self._clock = clock
        self._artefact_hash = artefact_hash
        self._grace_s = grace_s
        self._release = release
        self._asked = False

    def ask(self, request: worker_pb2.DrainRequest) -> None:
        """Begins it; `run` does it. Asking again may still ask for release."""
        self._release = (self._asked and self._release) or request.release
        self._asked = True
        self._lifecycle.drain(request.grace_ms)

    async def run(self) -> None:
        """Returns when nothing is held, or the grace is over and what ran is handed back."""
        self._lifecycle.drain()
        self._door.leave()
        await self._lifecycle.settled()
        self._door.drain()
        alone = await self._alone()
        grace_s = self._lifecycle.grace_ms / 1e3 or self._grace_s
        await self._settled(grace_s, lambda: self._release and not alone)
        self._door.release()
        await self._settled(HAND_BACK_S, lambda: False)
        self._door.close()

    async def _settled(self, most_s: float, enough: Callable[[], bool]) -> None:
        """Returns when nothing is held, after `most_s` seconds, or when it is `enough`."""
        until = self._clock.monotonic() + most_s
        while True:
            if not self._door.held or enough() or self._clock.monotonic() >= until:
                return
            await asyncio.sleep(LOOK_S)

    async def _alone(self) -> bool:
        """No other worker is known to take requests for the artefact."""
        await self._peers.look()
        me = self._lifecycle.identity.id
        return not any(
            info.id != me and info.fields.get("artefact") == self._artefact_hash and info.fields.get("taking") == "1"
            for info in self._peers.snapshot().values()
        )
