"""The gateway's Outputs streams: one per worker address and lane, opened at first use, closed when idle.

Owns the current attempt of every request in flight. The one rule: `enter` an attempt before it is submitted and `leave`
it in a finally: what is not entered is answered with Cancel, and what leaves unfinished is cancelled at its worker.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

from gateway.attempt import Attempt
from gateway.link import Link
from gateway.transport import Transport
from shared.clock import Clock
from shared.ids import Identity
from shared.wire import LoopLag
from trunkline.router.v1 import router_pb2


class Links:
    """All streams, and the current attempt of every request in flight. `stale` counts openings of others."""

    def __init__(self, transport: Transport, identity: Identity, lag: LoopLag, clock: Clock) -> None:
        self.transport = transport
        self.identity = identity
        self.lag = lag
        self.clock = clock
        self.stale = 0
        self.lost_attempts = 0
        self.attempts: dict[bytes, Attempt] = {}
        self._links: dict[tuple[str, int], Link] = {}
        self._generations = itertools.count(1)

    def enter(self, attempt: Attempt) -> None:
        """`attempt` is now the current one of its request."""
        self.attempts[attempt.request_id] = attempt

    def leave(self, attempt: Attempt) -> None:
        """`attempt` is over. If its worker may still hold it, it is cancelled there; never waits."""
        if self.attempts.get(attempt.request_id) is attempt:
            del self.attempts[attempt.request_id]
        attempt.leave()
        if isinstance(attempt.seat, Link):
            attempt.seat.leave(attempt)
        else:
            attempt.freed.set()  # no worker is known to have had it; one that opens it is answered with Cancel

    def expect(self, attempt: Attempt, response: router_pb2.SubmitResponse) -> None:
        """The router says who has it: its stream is opened if it is not, and must open the attempt in time."""
        if attempt.bound or attempt.ended.done():
            return
        key = (response.address, attempt.lane)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = Link(self, response.address, attempt.lane)
            link.start()
        link.expect(attempt, response.incarnation)

    def next_generation(self) -> int:
        """Number of the next stream; ascending over all of them."""
        return next(self._generations)

    def unbound(self, lane: int) -> Iterator[Attempt]:
        """Attempts that no worker has opened yet."""
        return (attempt for attempt in self.attempts.values() if attempt.lane == lane and not attempt.bound)

    def ended(self, link: Link) -> None:
        """A link is closed or lost; the next use opens a new one."""
        if self._links.get((link.address, link.lane)) is link:
            del self._links[link.address, link.lane]

    @property
    def open_streams(self) -> int:
        """Links there are."""
        return len(self._links)

    async def close(self) -> None:
        """End every link."""
        links = list(self._links.values())
        for link in links:
            link.cancel()
        await asyncio.gather(*(link.closed() for link in links))
