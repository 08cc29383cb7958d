"""A TCP link that can fail: it drops, goes half-open, stalls, is slow, or refuses.

Owns one listening address in front of one target. The one rule: a link that lost bytes resets its connections when it
is whole again, so that nobody reads a stream with a hole in it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Literal, cast

Mode = Literal["whole", "half_open", "stalled", "slow", "refusing"]
Address = tuple[str, int]

DELAY_S = 0.15  # of a slow link, each way
BYTES_PER_S = 64_000
MOST_WAITING = 256 * 1024  # bytes on a slow link before the sender is held up
LOOK_S = 0.05  # for a dead target to come back
CLOSE_S = 5.0  # until the last connection of a closed link is gone
_RESET = struct.pack("ii", 1, 0)


class Link:
    """One link; `start` before use. While nothing listens at its target it does not listen either."""

    def __init__(self, name: str, at: Address, target: Address) -> None:
        self.name = name
        self.mode: Mode = "whole"
        self.pairs: set[Pair] = set()
        self.open: set[End] = set()  # also of pairs that are over and still owe an end its bytes
        self.closed = False
        self._at, self._target = at, target
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen."""
        self._watch = asyncio.create_task(self._follow_target())

    async def close(self) -> None:
        """End it, with its connections, and wait until none is left."""
        self.closed = True
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self._deafen()
        self.drop()
        async with asyncio.timeout(CLOSE_S):
            await asyncio.sleep(0)  # whoever was just accepted
            while self.open:
                for end in list(self.open):
                    end.reset()
                await asyncio.sleep(0.001)

    def drop(self, share: float = 1.0, rng: random.Random | None = None) -> int:
        """Reset this share of the connections, one at least if there is one; how many."""
        pairs = sorted(self.pairs, key=lambda pair: pair.number)
        if rng is not None and pairs:
            pairs = rng.sample(pairs, max(1, round(share * len(pairs))))
        for pair in pairs:
            pair.reset()
        return len(pairs)

    async def turn(self, mode: Mode) -> None:
        """Fail in this way, or be whole again."""
        lost, self.mode = self.mode == "half_open", mode
        if lost or mode == "refusing":
            self.drop()
        for pair in list(self.pairs):
            pair.turned()
        if mode == "refusing":
            await self._deafen()

    async def connected(self, pair: Pair) -> None:
        """A client came: join it with the target."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: pair.there, *self._target)
        except OSError:
            pair.reset()
            await self._deafen()  # until the target is back: who connects now is refused, as without us

    async def _deafen(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def _follow_target(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._server is None and self.mode != "refusing" and await _listens(self._target):
                self._server = await loop.create_server(lambda: Pair(self).here, *self._at, reuse_address=True)
            await asyncio.sleep(LOOK_S)


class Pair:
    """The two connections of one client: `here` to the client, `there` to the target."""

    _numbers = iter(range(1 << 62))

    def __init__(self, link: Link) -> None:
        self.link = link
        self.number = next(self._numbers)
        self.here, self.there = End(self), End(self)
        self.here.other, self.there.other = self.there, self.here
        self.joining: asyncio.Task[None] | None = None

    def opened(self, end: End) -> None:
        """One of both is there."""
        if self.link.closed:
            end.reset()
        elif end is self.here:
            self.link.pairs.add(self)
            end.hold(True)
            self.joining = asyncio.create_task(self.link.connected(self))
        elif self in self.link.pairs:
            self.turned()
        else:  # the client went meanwhile
            end.reset()

    def turned(self) -> None:
        """The link's mode is another one."""
        for end in (self.here, self.there):
            end.hold(self.link.mode == "stalled" or end.other.transport is None)

    def reset(self) -> None:
        """Break both off, as a host does that knows nothing of them."""
        self.link.pairs.discard(self)
        for end in (self.here, self.there):
            end.reset()

    def ended(self) -> None:
        """One of both has ended: so does the other, after what it is still owed."""
        self.link.pairs.discard(self)
        for end in (self.here, self.there):
            end.finish()


class End(asyncio.Protocol):
    """One connection of a pair; what it receives, the other one sends."""

    other: End

    def __init__(self, pair: Pair) -> None:
        self.transport: asyncio.Transport | None = None
        self._pair = pair
        self._late: deque[tuple[float, bytes]] = deque()  # due, data: what a slow link has under way to this end
        self._early: list[bytes] = []  # for this end, from before it was connected
        self._waiting = 0
        self._free_at = 0.0
        self._full = False  # this end takes no more for now
        self._held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's."""
        self.transport = cast(asyncio.Transport, transport)
        self._pair.link.open.add(self)
        self._pair.opened(self)
        for data in self._early:
            self.send(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        """Asyncio's."""
        mode = self._pair.link.mode
        if mode == "half_open":
            return
        if mode == "slow" or self.other._late:
            self.other.send_late(data)
        else:
            self.other.send(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio's."""
        self._pair.link.open.discard(self)
        if self._pair.link.mode == "half_open":
            return  # the other side hears nothing of it before the link is whole
        if exc is not None:
            self._pair.reset()
        else:
            self._pair.ended()

    def pause_writing(self) -> None:
        """Asyncio's."""
        self._full = True
        self.other.hold(self.other._held)

    def resume_writing(self) -> None:
        """Asyncio's."""
        self._full = False
        self.other.hold(self.other._held)

    def send(self, data: bytes) -> None:
        """At once."""
        if self.transport is None:  # a client may write before it can be held
            self._early.append(data)
        elif not self.transport.is_closing():
            self.transport.write(data)

    def send_late(self, data: bytes) -> None:
        """After the link's delay, at its bandwidth; in order."""
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + len(data) / BYTES_PER_S
        due = self._free_at + DELAY_S
        self._late.append((due, data))
        self._waiting += len(data)
        self.other.hold(self.other._held)
        loop.call_at(due, self._send_due)

    def hold(self, held: bool) -> None:
        """Read nothing while `held`, or while the other end takes nothing."""
        self._held = held
        if self.transport is None or self.transport.is_closing():
            return
        if held or self.other._full or self.other._waiting > MOST_WAITING:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def reset(self) -> None:
        """Break it off."""
        if self.transport is not None and self in self._pair.link.open:
            sock = self.transport.get_extra_info("socket")
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()  # also what is closing and still has bytes to send

    def finish(self) -> None:
        """Close it once it has what it is owed."""
        if self.transport is not None and not self._late:
            self.transport.close()

    def _send_due(self) -> None:
        _, data = self._late.popleft()
        self._waiting -= len(data)
        self.send(data)
        self.other.hold(self.other._held)
        if self._pair not in self._pair.link.pairs:
            self.finish()


async def _listens(target: Address) -> bool:
    try:
        _, writer = await asyncio.open_connection(*target)
    except OSError:
        return False
    writer.close()
    return True
