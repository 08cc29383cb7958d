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
# A successor under the same id stays: only the entry of this incarnation goes.
_REMOVE: Final = Script("""
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
""")


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
        self._due = asyncio.Event()
        store.on_birth_change(self._due.set)

    async def run(self) -> None:
        """Refresh until cancelled; at once where the store came back empty."""
        while True:
            self._due.clear()
            await self.refresh()
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._due.wait()

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
            await self._store.run(_REMOVE, self._keys, [self._id, self._fields["incarnation"]])

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
        self._doubt = 0  # looks for which entries that are missing may only not have registered again yet
        self.version = 0  # counts the changes
        self._change = asyncio.Event()
        if store is not None:
            store.on_birth_change(self._begin_doubt)

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
            self._begin_doubt()  # the last known ones stay
            return
        found = {info.id: info for info in map(_info, rows) if info is not None}
        if not self._doubt and self._found.keys() - found.keys():
            await self._store.look()  # it may have come back empty a moment ago
        if self._doubt:
            self._doubt -= 1
            found = self._found | found
        if found != self._found:
            self._found = found
            self.version += 1
            change, self._change = self._change, asyncio.Event()
            change.set()

    def _begin_doubt(self) -> None:
        """The store was away or came back empty: for the life of an entry, absence in it says nothing."""
        self._doubt = round(TTL_MS / 1000 / LOOK_S)

    async def changed(self, since: int | None = None) -> None:
        """Return at the next change, or at once if `version` is no longer `since` (read before acting)."""
        if since is None or since == self.version:
            await self._change.wait()

    def snapshot(self) -> dict[str, PeerInfo]:
        """Peers by id; a configured address that has also registered appears once, under its id."""
        registered = {info.address for info in self._found.values()}
        named = {id_: info for id_, info in self._static.items() if info.address not in registered}
        return named | self._found


def _info(row: Sequence[str]) -> PeerInfo | None:
    """None for what is no registration: an entry that lapsed under its list, or one that something else wrote."""
    fields = dict(zip(row[::2], row[1::2], strict=True))
    try:
        return PeerInfo(fields["id"], fields["address"], int(fields["incarnation"], 16), fields)
    except (KeyError, ValueError):
        return None
