"""The state store: Redis or Valkey behind a circuit, so that its absence costs nobody a wait.

Owns the connection, scripts, the birth id of the data set and the write-behind queue. The one rule: while the store is
away every call raises StateAway at once; what went through `write_behind` waits, in order, and is written once it is
back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.resources
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import hiredis
import redis.asyncio
from prometheus_client import Counter, Gauge
from redis import exceptions

from shared import keys
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.ids import SYSTEM_RNG, Rng, incarnation_text, new_incarnation

TIMEOUT_S: Final = 1.0
PROBE_S: Final = 0.5
MAX_CONNECTIONS: Final = 16
MAX_BEHIND: Final = 10_000
PIPELINE: Final = 64  # writes a batch: about 2 ms of the loop
CLOSE_S: Final = 3.0

# What means "not now": unreachable, silent, still loading, demoted to a replica, out of memory, closed to us, restarted
# (and so without a script that it was just given).
_AWAY: Final = (
    exceptions.ConnectionError,
    exceptions.NoScriptError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.NoPermissionError,
    OSError,
    TimeoutError,
)
# Refusals that are no fault of the command: another client's script runs too long, the disk or the replicas fail.
_AWAY_WORDS: Final = ("BUSY ", "MISCONF ", "NOREPLICAS ")
_T = TypeVar("_T")
_log = logging.getLogger("trunkline.state")
_dropped = Counter("trunkline_state_writes_dropped_total", "Writes given up because the queue was full.")
_refused = Counter("trunkline_state_writes_refused_total", "Writes that the state store refused for good.")
_available = Gauge("trunkline_state_available", "1 while the state store answers.")


class StateAway(TrunklineError):
    """The store does not answer now."""

    def __init__(self) -> None:
        super().__init__(Reason.STATE_AWAY, "The state store is away; try again.", retry_after_s=1.0)


class Script:
    """A Lua script and its name in the store."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


_BIRTH: Final = Script(importlib.resources.files("shared").joinpath("scripts/birth.lua").read_text())
Write = tuple[Script, Sequence[str], Sequence[str | int | float | bytes]]
"""A script with its keys and arguments."""


class _Connection(redis.asyncio.Connection):
    """Packs commands in C. redis-py's own way takes ten times as long, and a request makes eight commands."""

    def pack_command(self, *args: Any) -> list[bytes]:
        name, *rest = args
        return [hiredis.pack_command((*(name if isinstance(name, bytes) else name.encode()).split(), *rest))]


class Store:
    """One process's way to the store. Answers are str and int (`decode_responses`)."""

    def __init__(self, url: str, clock: Clock, *, name: str, rng: Rng = SYSTEM_RNG) -> None:
        self.available = False
        self.birth = ""
        self._clock = clock
        self._rng = rng
        self._redis: Any = redis.asyncio.Redis.from_url(
            url,
            client_name=name,
            decode_responses=True,
            connection_class=_Connection,
            # With RESP3 it hears of a server's maintenance, and to that end no longer looks whether an idle connection
            # has ended: each of them would then be found dead by a call of ours.
            protocol=2,
            # Its own time limit on sending goes by asyncio.wait_for, which swallows cancellation on Python 3.11; every
            # call here has one of ours instead.
            socket_timeout=None,
            socket_connect_timeout=TIMEOUT_S,
            max_connections=MAX_CONNECTIONS + 3,  # beside the gate: the probe, and the writer with its pipeline
            retry=None,
        )
        self._gate = asyncio.Semaphore(MAX_CONNECTIONS)
        self._absences = 0
        self._behind: deque[Write] = deque()
        self._loaded: set[str] = set()  # scripts that the store has, unless it was restarted since
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._probing = asyncio.Lock()
        self._looked_at = -math.inf
        self._lost_at: float | None = None
        self._on_birth: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look for the store once, then keep probing and writing in the background. Its absence is no error."""
        await self._probe()
        if not self.available:
            _log.warning("the state store is away; going on without it")
        self._tasks = [asyncio.create_task(self._keep_probing()), asyncio.create_task(self._keep_writing())]

    async def close(self) -> None:
        """Write what waits, for at most CLOSE_S and while the store is there; then close."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S if self.available else 0):
                await self._idle.wait()
        if self._behind:
            _log.warning("%d writes to the state store were not made", len(self._behind))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._redis.aclose()

    def lost_within(self, seconds: float) -> bool:
        """It lost its data so lately, whether this process was there or not."""
        return self._lost_at is not None and self._clock.monotonic() - self._lost_at < seconds

    def on_birth_change(self, callback: Callable[[], None]) -> None:
        """Call back when the store came back with another data set: everything in it is gone."""
        self._on_birth.append(callback)

    async def run(self, script: Script, keys_: Sequence[str], args: Sequence[str | int | float | bytes]) -> Any:
        """The script's answer. Raises StateAway."""
        return await self._guarded(lambda: self._evaluate(script, keys_, args))

    async def run_all(self, writes: Sequence[Write]) -> list[Any]:
        """The scripts' answers: run in this order, in one round trip. Raises StateAway, and then it is unknown which
        of them ran: the scripts must allow to be run again."""
        return await self._guarded(lambda: self._in_one_trip(writes))

    async def smembers(self, key: str) -> set[str]:
        """A set, empty if absent. Raises StateAway."""
        return await self._guarded(lambda: self._redis.smembers(key))

    async def get(self, key: str) -> str | None:
        """A string, None if absent. Raises StateAway."""
        return await self._guarded(lambda: self._redis.get(key))

    async def hgetall(self, key: str) -> dict[str, str]:
        """A hash, empty if absent. Raises StateAway."""
        return await self._guarded(lambda: self._redis.hgetall(key))

    async def lrange(self, key: str, start: int, end: int) -> list[str]:
        """Part of a list. Raises StateAway."""
        return await self._guarded(lambda: self._redis.lrange(key, start, end))

    def write_behind(self, script: Script, keys_: Sequence[str], args: Sequence[str | int | float | bytes]) -> None:
        """Run the script soon, after everything written behind before it. Past the bound the oldest is dropped."""
        if len(self._behind) >= MAX_BEHIND:
            self._behind.popleft()
            _dropped.inc()
        self._behind.append((script, keys_, args))
        self._idle.clear()
        self._wake.set()

    async def _guarded(self, call: Callable[[], Awaitable[_T]]) -> _T:
        if not self.available:
            raise StateAway
        absences = self._absences
        try:
            async with self._gate:
                if not self.available:  # it went while this call waited for its turn
                    raise StateAway
                async with asyncio.timeout(TIMEOUT_S):
                    return await call()
        except (*_AWAY, exceptions.ResponseError, RuntimeError) as exc:
            if not _means_away(exc):
                raise
            if absences == self._absences:  # else it is back since, and only this call's connection is not
                self._mark(False, exc)
            raise StateAway from exc

    async def _evaluate(self, script: Script, keys_: Sequence[str], args: Sequence[str | int | float | bytes]) -> Any:
        try:
            return await self._redis.evalsha(script.sha, len(keys_), *keys_, *args)
        except exceptions.NoScriptError:
            return await self._redis.eval(script.text, len(keys_), *keys_, *args)

    async def _in_one_trip(self, writes: Sequence[Write]) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipe:
            answers = await self._answers(pipe, writes)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def _answers(self, pipe: Any, writes: Sequence[Write]) -> list[Any]:
        """Scripts vanish with a restart: then all run again, which they must allow."""
        answers = await self._send(pipe, writes)
        if any(isinstance(answer, exceptions.NoScriptError) for answer in answers):
            self._loaded.clear()
            await self._load(writes)
            answers = await self._send(pipe, writes)
        return answers

    @staticmethod
    async def _send(pipe: Any, writes: Sequence[Write]) -> list[Any]:
        for script, keys_, args in writes:
            pipe.evalsha(script.sha, len(keys_), *keys_, *args)
        return list(await pipe.execute(raise_on_error=False))

    async def _keep_probing(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            await self._probe()

    async def look(self) -> None:
        """Whoever misses something in the store asks whether it is still the same before believing it."""
        await self._probe(self._clock.monotonic())

    async def _probe(self, after: float = math.inf) -> None:
        """Is it there, and is it the data set we know? One at a time, so that a change is told once; of those who wait,
        one looks for all that asked before (`after`)."""
        async with self._probing:
            if self._looked_at >= after:
                return
            self._looked_at = self._clock.monotonic()
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    birth, ago_ms = await self._read_birth()
            except (*_AWAY, exceptions.RedisError, RuntimeError) as exc:  # whatever it gets is no answer to rely on
                self._mark(False, exc)
                return
            changed, self.birth = bool(self.birth) and birth != self.birth, birth
            self._lost_at = self._clock.monotonic() - ago_ms / 1000 if ago_ms >= 0 else None
            if changed:
                self._tell_birth_change()
            self._mark(True, None)

    async def _read_birth(self) -> tuple[str, int]:
        """The data set's name, and how long ago it took another's place: who saw that leaves word for all others."""
        mine = incarnation_text(new_incarnation(self._rng))
        birth, ago_ms = await self._evaluate(_BIRTH, [keys.birth(), keys.lost()], [mine, self.birth])
        return str(birth), int(ago_ms)

    def _tell_birth_change(self) -> None:
        _log.warning("the state store came back empty")
        for callback in self._on_birth:
            try:
                callback()
            except Exception:
                # One part's fault must not end the probing that all parts live on.
                _log.exception("a part failed to take up the empty state store")

    def _mark(self, available: bool, why: BaseException | None) -> None:
        if available != self.available:
            self.available = available
            self._absences += not available
            _available.set(available)
            _log.warning("the state store %s", "answers" if available else f"is away ({type(why).__name__})")
            self._wake.set()

    async def _keep_writing(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._behind and self.available:
                await self._write_some()
            if not self._behind:
                self._idle.set()

    async def _write_some(self) -> None:
        """Make the oldest writes. Unanswered ones go back to the front and run again, which scripts must allow."""
        writes = [self._behind.popleft() for _ in range(min(PIPELINE, len(self._behind)))]
        try:
            answers = await self._pipelined(writes)
        except BaseException as exc:
            self._behind.extendleft(reversed(writes))
            if not (isinstance(exc, exceptions.RedisError) or _means_away(exc)):
                raise
            self._mark(False, exc)
            return
        for answer in answers:
            if isinstance(answer, Exception):
                _refused.inc()
                _log.error("the state store refused a write: %s", answer)

    async def _pipelined(self, writes: Sequence[Write]) -> list[Any]:
        async with asyncio.timeout(2 * TIMEOUT_S), self._redis.pipeline(transaction=False) as pipe:
            await self._load(writes)  # before any of them runs: they are to run in order
            answers = await self._answers(pipe, writes)
        for answer in answers:
            if isinstance(answer, BaseException) and _means_away(answer):
                raise answer
        return answers

    async def _load(self, writes: Sequence[Write]) -> None:
        """Give the store the scripts that it is not known to have; they are long, so it is asked first."""
        fresh = {script.sha: script for script, _, _ in writes if script.sha not in self._loaded}
        if not fresh:
            return
        known = await self._redis.script_exists(*fresh)
        for script, there in zip(fresh.values(), known, strict=True):
            if not there:
                await self._redis.script_load(script.text)
        self._loaded |= fresh.keys()


def _means_away(exc: BaseException) -> bool:
    """Whether the store does not answer now, whatever it was asked."""
    refused = isinstance(exc, exceptions.ResponseError) and str(exc).startswith(_AWAY_WORDS)
    # uvloop, of a write to a connection that broke while nobody has been told yet.
    broken = isinstance(exc, RuntimeError) and "the handler is closed" in str(exc)
    return refused or broken or isinstance(exc, _AWAY)
