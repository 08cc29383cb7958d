"""Who is there: processes register in the store and are found by role, or are named in the configuration.

The one rule: a registration is a hint where to connect; whether a peer lives is judged on its own streams. While the
store is away the last known peers stay.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from shared import keys
from shared.ids import Identity, incarnation_text
from shared.state import Script, StateAway, Store

TTL_MS: Final = 6000
REFRESH_S: Final = 2.0
LOOK_S: Final = 1.0
MAX_PEERS: Final = 10_000


def _script(name: str) -> Script:
    return Script(importlib.resources.files("shared").joinpath(f"scripts/{name}.lua").read_text())


_REGISTER: Final = _script("register")
_LIST: Final = _script("peers")
_REMOVE: Final = Script("redis.call('DEL', KEYS[1]) redis.call('ZREM', KEYS[2], ARGV[1]) return 1")


@dataclass(frozen=True)
class PeerInfo:
    """One peer. `incarnation` is 0 where it is not known (named in the configuration)."""

    id: str
    address: str
    incarnation: int = 0
    fields: Mapping[str, str] = field(default_factory=dict)


class Registration:
    """Keeps this process in the list of its role: run `run` as a task, `close` at drain."""

    def __init__(self, store: Store, identity: Identity, fields: Mapping[str, str]) -> None:
        """`fields`: at least `address`, host:port; more as the role needs."""
        self._store = store
        self._role, self._id = identity.role, identity.id
        self._fields = {"id": identity.id, "incarnation": incarnation_text(identity.incarnation), **fields}

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Write the entry now; without a store it is written when it is back."""
        try:
            pairs = [item for pair in self._fields.items() for item in pair]
            await self._store.run(_REGISTER, self._keys, [TTL_MS, self._id, *pairs])
        except StateAway:
            pass  # counted by the store; the next turn tries again

    async def update(self, fields: Mapping[str, str]) -> None:
        """Change fields, and write them now."""
        self._fields |= fields
        await self.refresh()

    async def close(self) -> None:
        """Leave the list."""
        with suppress(StateAway):  # the entry ends by itself
            await self._store.run(_REMOVE, self._keys, [self._id])

    @property
    def _keys(self) -> list[str]:
        return [keys.peer(self._role, self._id), keys.peers(self._role)]


class Peers:
    """The peers of one role. Run `run` as a task; `snapshot` never waits; `changed` wakes at each change."""

    def __init__(self, store: Store | None, role: str, static: Sequence[str] = ()) -> None:
        self._store = store
        self._role = role
        self._static = {address: PeerInfo(address, address) for address in static}
        self._found: dict[str, PeerInfo] = {}
        self._change = asyncio.Event()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once."""
        if self._store is None:
            return
        try:
            rows = await self._store.run(_LIST, [keys.peers(self._role)], [MAX_PEERS, keys.peer(self._role, "")])
        except StateAway:
            return  # the last known ones stay
        found = {info.id: info for info in map(_info, rows) if info is not None}
        if found != self._found:
            self._found = found
            change, self._change = self._change, asyncio.Event()
            change.set()

    async def changed(self) -> None:
        """Return at the next change."""
        await self._change.wait()

    def snapshot(self) -> dict[str, PeerInfo]:
        """Peers by id; a configured address that has also registered appears once, under its id."""
        registered = {info.address for info in self._found.values()}
        named = {id_: info for id_, info in self._static.items() if info.address not in registered}
        return named | self._found


def _info(row: Sequence[str]) -> PeerInfo | None:
    fields = dict(zip(row[::2], row[1::2], strict=True))
    if not fields.get("address"):
        return None
    return PeerInfo(fields["id"], fields["address"], int(fields.get("incarnation", "0"), 16), fields)
