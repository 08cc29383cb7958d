"""The state store in memory: the part of Redis that we use, on virtual time, behind the real `shared.state.Store`.

Owns the data. The one rule: scripts are the real ones (`tests.sim.lua`), so what they decide is decided here as there.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

from redis import exceptions

from shared.clock import Clock
from shared.ids import Rng
from shared.state import Store
from tests.sim.loop import SimLoop
from tests.sim.lua import compiled

Saved = tuple[dict[str, Any], dict[str, float]]


class SimRedis:
    """The server. `away`: it answers nobody."""

    def __init__(self, loop: SimLoop) -> None:
        self.away = False
        self.calls = 0
        self._loop = loop
        self._data: dict[str, Any] = {}
        self._ends: dict[str, float] = {}
        self._scripts: dict[str, str] = {}
        self._entries = 0

    def empty(self) -> None:
        """It lost everything."""
        self._data.clear()
        self._ends.clear()
        self.forget_scripts()

    def saved(self) -> Saved:
        """What it would come back with, had it saved just now."""
        return copy.deepcopy(self._data), dict(self._ends)

    def come_back_with(self, saved: Saved) -> None:
        """It died, and what it answered since then is gone."""
        data, ends = saved
        self._data, self._ends = copy.deepcopy(data), dict(ends)
        self.forget_scripts()

    def forget_scripts(self) -> None:
        """As by SCRIPT FLUSH."""
        self._scripts.clear()

    @property
    def now_ms(self) -> int:
        """Its own clock."""
        return 1_800_000_000_000 + round(self._loop.now * 1000)

    def script(self, sha: str, text: str | None, keys: list[str], args: list[str]) -> Any:
        """EVALSHA, or EVAL where the text is given."""
        if text is not None:
            self._scripts[sha] = text
        if sha not in self._scripts:
            raise exceptions.NoScriptError("No matching script.")
        return compiled(self._scripts[sha])(self.call, keys, args)

    def call(self, name: str, *args: str) -> Any:
        """One command."""
        self.calls += 1
        command: Callable[..., Any] = getattr(self, f"_{name.lower()}")
        return command(*args)

    def known(self, sha: str) -> bool:
        """SCRIPT EXISTS."""
        return sha in self._scripts

    def keys(self, prefix: str) -> list[str]:
        """For the checks."""
        return sorted(key for key in list(self._data) if key.startswith(prefix) and self._there(key))

    # Data.

    def _there(self, key: str) -> bool:
        ends = self._ends.get(key)
        if ends is not None and ends <= self._loop.now:
            self._drop(key)
        return key in self._data

    def _drop(self, key: str) -> int:
        self._ends.pop(key, None)
        return int(self._data.pop(key, None) is not None)

    def _of(self, key: str, kind: type) -> Any:
        if not self._there(key):
            return kind()
        return self._data[key]

    def _mine(self, key: str, kind: type) -> Any:
        self._there(key)
        return self._data.setdefault(key, kind())

    # Commands.

    def _time(self) -> list[str]:
        micros = round((1_800_000_000 + self._loop.now) * 1e6)
        return [str(micros // 1_000_000), str(micros % 1_000_000)]

    def _get(self, key: str) -> str | None:
        return self._data[key] if self._there(key) else None

    def _set(self, key: str, value: str, *options: str) -> str | None:
        if "NX" in options and self._there(key):
            return None
        self._drop(key)
        self._data[key] = value
        if "EX" in options:
            self._expire(key, options[options.index("EX") + 1])
        return "OK"

    def _del(self, *keys: str) -> int:
        return sum(self._drop(key) for key in keys)

    _unlink = _del

    def _expire(self, key: str, seconds: str) -> int:
        return self._pexpire(key, str(float(seconds) * 1000))

    def _pexpire(self, key: str, ms: str) -> int:
        if not self._there(key):
            return 0
        self._ends[key] = self._loop.now + float(ms) / 1000
        return 1

    def _pttl(self, key: str) -> int:
        if not self._there(key):
            return -2
        return round((self._ends[key] - self._loop.now) * 1000) if key in self._ends else -1

    def _hget(self, key: str, field: str) -> str | None:
        return self._of(key, dict).get(field)  # type: ignore[no-any-return]

    def _hmget(self, key: str, *fields: str) -> list[str | None]:
        held = self._of(key, dict)
        return [held.get(field) for field in fields]

    def _hexists(self, key: str, field: str) -> int:
        return int(field in self._of(key, dict))

    def _hset(self, key: str, *pairs: str) -> int:
        self._mine(key, dict).update(zip(pairs[::2], pairs[1::2], strict=True))
        return 1

    def _hdel(self, key: str, *fields: str) -> int:
        held = self._of(key, dict)
        gone = sum(held.pop(field, None) is not None for field in fields)
        if not held:
            self._drop(key)
        return gone

    def _hgetall(self, key: str) -> list[str]:
        return [item for pair in self._of(key, dict).items() for item in pair]

    def _sadd(self, key: str, *members: str) -> int:
        held = self._mine(key, dict)
        before = len(held)
        held.update(dict.fromkeys(members))
        return len(held) - before

    def _srem(self, key: str, *members: str) -> int:
        held = self._of(key, dict)
        gone = [held.pop(member) for member in members if member in held]
        if not held:
            self._drop(key)
        return len(gone)

    def _smembers(self, key: str) -> list[str]:
        return list(self._of(key, dict))

    def _zadd(self, key: str, score: str, member: str) -> int:
        self._mine(key, dict)[member] = float(score)
        return 1

    def _zrem(self, key: str, *members: str) -> int:
        held = self._of(key, dict)
        return sum(held.pop(member, None) is not None for member in members)

    def _sorted(self, key: str) -> list[tuple[str, float]]:
        return sorted(self._of(key, dict).items(), key=lambda pair: (pair[1], pair[0]))

    def _zrange(self, key: str, first: str, last: str) -> list[str]:
        members = [member for member, _ in self._sorted(key)]
        return members[int(first) : int(last) + 1 or None]

    def _zrangebyscore(self, key: str, low: str, high: str, *limit: str) -> list[str]:
        found = [member for member, score in self._sorted(key) if _bound(low) <= score <= _bound(high)]
        return found[int(limit[1]) : int(limit[1]) + int(limit[2])] if limit else found

    def _zremrangebyscore(self, key: str, low: str, high: str) -> int:
        return self._zrem(key, *self._zrangebyscore(key, low, high))

    def _xadd(self, key: str, name: str, *pairs: str) -> str:
        assert name == "*"
        self._entries += 1
        entry = f"{self.now_ms}-{self._entries}"
        self._mine(key, list).append((entry, list(pairs)))
        return entry

    def _xlen(self, key: str) -> int:
        return len(self._of(key, list))

    def _xrange(self, key: str, low: str, high: str, *count: str) -> list[list[Any]]:
        assert low.startswith("(")
        assert high == "+"
        after = _entry(low[1:])
        found = [[entry, pairs] for entry, pairs in self._of(key, list) if _entry(entry) > after]
        return found[: int(count[1])] if count else found


def _bound(text: str) -> float:
    return -math.inf if text == "-inf" else math.inf if text == "+inf" else float(text)


def _entry(name: str) -> tuple[int, int]:
    ms, _, number = name.partition("-")
    return int(ms), int(number)


class Link:
    """One process's way to the server: a round trip takes time, and may be cut off."""

    def __init__(self, server: SimRedis, rng: Rng) -> None:
        self.cut = False
        self.deaf = False  # what is asked is done, and the answer does not come
        self.slow_s = 0.0  # more, each way
        self._server = server
        self._rng = rng

    @property
    def server(self) -> SimRedis:
        """The server, if it answers."""
        return self._server

    async def trip(self) -> None:
        """Half of a round trip. Raises what the client raises when nobody answers."""
        await asyncio.sleep(self.slow_s + self._rng.uniform(0.0001, 0.0008))
        while self.cut:
            await asyncio.sleep(0.25)
        if self._server.away:
            raise exceptions.ConnectionError("the server is away")

    async def back(self) -> None:
        """The other half."""
        await self.trip()
        while self.deaf:
            await asyncio.sleep(0.25)


class SimClient:
    """`redis.asyncio.Redis`, as far as `Store` uses it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def get(self, key: str) -> Any:
        return (await self._all([("GET", key)]))[0]

    async def set(self, key: str, value: str, *, nx: bool = False) -> Any:
        return (await self._all([("SET", key, value, *(["NX"] if nx else []))]))[0]

    async def hgetall(self, key: str) -> dict[str, str]:
        flat = (await self._all([("HGETALL", key)]))[0]
        return dict(zip(flat[::2], flat[1::2], strict=True))

    async def smembers(self, key: str) -> list[str]:
        return list((await self._all([("SMEMBERS", key)]))[0])

    async def lrange(self, key: str, start: int, end: int) -> list[str]:
        return []

    async def evalsha(self, sha: str, count: int, *rest: Any) -> Any:
        return await self._script(sha, None, count, rest)

    async def eval(self, text: str, count: int, *rest: Any) -> Any:
        return await self._script(hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), text, count, rest)

    async def script_exists(self, *shas: str) -> list[bool]:
        await self._link.trip()
        return [self._link.server.known(sha) for sha in shas]

    async def script_load(self, text: str) -> None:
        await self._link.trip()
        self._link.server._scripts[hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()] = text

    def pipeline(self, *, transaction: bool) -> _Pipeline:
        return _Pipeline(self._link)

    async def aclose(self) -> None:
        """Nothing is open."""

    async def _script(self, sha: str, text: str | None, count: int, rest: Sequence[Any]) -> Any:
        await self._link.trip()
        found = self._link.server.script(sha, text, list(rest[:count]), [*map(str, rest[count:])])
        await self._link.back()
        return found

    async def _all(self, commands: Sequence[Sequence[str]]) -> list[Any]:
        await self._link.trip()
        found = [self._link.server.call(*command) for command in commands]
        await self._link.back()
        return found


class _Pipeline:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._writes: list[tuple[str, list[str], list[str]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._writes.clear()

    def evalsha(self, sha: str, count: int, *rest: Any) -> None:
        self._writes.append((sha, list(rest[:count]), [*map(str, rest[count:])]))

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error
        await self._link.trip()
        writes, self._writes = self._writes, []
        found = [self._one(*write) for write in writes]
        await self._link.back()
        return found

    def _one(self, sha: str, keys: list[str], args: list[str]) -> Any:
        try:
            return self._link.server.script(sha, None, keys, args)
        except exceptions.NoScriptError as error:
            return error


class SimStore(Store):
    """The real one, with the server in memory behind it."""

    def __init__(self, link: Link, clock: Clock, *, name: str, rng: Rng) -> None:
        super().__init__("redis://store:6379/0", clock, name=name, rng=rng)
        self._redis = SimClient(link)
