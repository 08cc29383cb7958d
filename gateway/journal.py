"""Outputs of resumable requests on their way to the state store, and the leases of their owner.

Owns the one writer of a gateway: it sends what all requests have to append in one round trip after the other, so that
order is kept and a slow store makes batches, not queues. The one rule: what a `Log` shows has been acknowledged;
nothing else may be told to a client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from prometheus_client import Counter

from gateway.custody import Batch, Custody, Ending, News, OwnerMoved, Plan, Written
from gateway.transcript import Run
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.state import StateAway
from shared.wire import Stamp

_log = logging.getLogger(__name__)

RENEW_S: Final = 2.0
LOOK_S: Final = 0.1
RETRY_S: Final = 0.25
KEEP_S: Final = 20.0  # what is over
_KEPT: Final = 4096  # at most
_TOGETHER: Final = 64  # requests in one round trip
_FOLLOWED_MS: Final = 1500  # a follower says every half second that it reads

_appends = Counter(
    "trunkline_journal_appends_total", "Appends to outputs of resumable requests, by outcome.", ["outcome"]
)


class Log:
    """Runs in their order and what ended them. `breaks` counts the times that readers were told to go elsewhere."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.ending: Ending | None = None
        self.breaks = 0
        self._readers: dict[Callable[[], None], Callable[[], bool]] = {}

    def join(self, reader: Callable[[], None], movable: Callable[[], bool] = lambda: True) -> None:
        """Call `reader` whenever there is more. `movable`: its client could go on from a cursor, now."""
        self._readers[reader] = movable

    def leave(self, reader: Callable[[], None]) -> None:
        """No longer."""
        self._readers.pop(reader, None)

    def add(self, runs: list[Run], ending: Ending | None = None) -> None:
        """More is known."""
        self.runs.extend(runs)
        self.ending = ending or self.ending
        self._tell()

    def interrupt(self) -> None:
        """What follows cannot be told now."""
        self.breaks += 1
        self._tell()

    def movable(self, readers: int) -> bool:
        """So many read it, and all of them could go on elsewhere."""
        return len(self._readers) == readers and all(movable() for movable in self._readers.values())

    def _tell(self) -> None:
        for reader in list(self._readers):
            reader()


class Owner(Protocol):
    """A request, as its journal sees it."""

    @property
    def id(self) -> str:
        """32 hexadecimal digits."""
        ...

    def plan(self) -> tuple[Stamp, Plan, int, Mapping[str, str | int]]:
        """What a claim writes: (epoch, attempt) now, plan, ms left, fields of the record."""
        ...

    def claims(self) -> tuple[str, bytes] | None:
        """Its idempotency key and the hash of its body."""
        ...

    def cancel(self, reason: Reason) -> None:
        """End it: OWNER_MOVED says that another gateway owns it and that nothing of it may be settled here."""
        ...


class Journal:
    """One resumable request's. Made by `Journals.open`."""

    def __init__(
        self, hub: Journals, owner: Owner, tenant: str, window_s: float, epoch: int = 1, news: News | None = None
    ) -> None:
        """`news`: what its outputs hold already."""
        self.log = Log()
        self.log.add(list(news.runs) if news else [])
        self.tenant = tenant
        self.epoch = epoch
        self.window_s = window_s
        self.full = False  # at its bound: an ordinary request from now on
        self.owner = owner
        self.attempt = 1  # the highest that was raised
        self._hub = hub
        self._entries = news.entries if news else 0  # of its outputs, acknowledged
        self._unsent: list[Run] = []
        self._again = 0  # of these, that were shown before the store forgot them
        self._ending: Ending | None = None
        self._record: Mapping[str, str | int] = {}
        self._viewers = 0
        self._alone_since = hub.clock.monotonic()
        self._followed_at = -math.inf

    # The owner's.

    async def claim(self, again: bool = False) -> None:
        """Write the record and its plan; `again`, since the store forgot them, with its key. Raises StateAway,
        OwnerMoved."""
        stamp, plan, budget_ms, record = self.owner.plan()
        window_ms = round(self.window_s * 1000)
        key = self.owner.claims() if again else None
        claim = self._hub.custody.claim
        if not await claim(self.owner.id, self.tenant, stamp, plan, budget_ms, window_ms, record, key):
            raise OwnerMoved
        self.open()

    def open(self) -> None:
        """It is claimed: its lease is kept from now on."""
        self._hub.open(self)

    async def raise_attempt(self, stamp: Stamp) -> None:
        """Note that this attempt begins, before it is submitted. Waits while the store is away. Raises OwnerMoved."""
        if self.full or stamp[1] <= self.attempt:
            return
        while True:
            try:
                async with self._hub.turn:
                    ((written, _),) = await self._hub.custody.hold([(self.owner.id, *stamp)])
            except StateAway:
                await asyncio.sleep(RETRY_S)
                continue
            if written is Written.FENCED:
                raise OwnerMoved
            if written is Written.LOST:
                self._hub.restore(self)
                await asyncio.sleep(RETRY_S)
                continue
            self.attempt = stamp[1]
            return

    def put(self, run: Run) -> None:
        """A run was taken into the transcript: append it, then show it."""
        if self.full:
            self.log.add([run])
        else:
            self._unsent.append(run)
            self._hub.due(self)

    def end(self, ending: Ending, record: Mapping[str, str | int]) -> None:
        """It is over: after the last run."""
        self._ending, self._record = ending, record
        if self.full:
            self.log.add([], ending)
            self._hub.close(self)
        else:
            self._hub.due(self)

    def abandon(self) -> None:
        """Another gateway owns it, or it was never admitted. Readers go on elsewhere."""
        self._hub.close(self)
        self.log.interrupt()

    # Readers'.

    def attach(self) -> None:
        """Somebody reads here."""
        self._viewers += 1

    def detach(self) -> None:
        """Nobody does any more, perhaps."""
        self._viewers -= 1
        self._alone_since = self._hub.clock.monotonic()

    @property
    def deserted(self) -> bool:
        """Nobody has read for the whole window, or none may, as it cannot be resumed."""
        window_s = 0.0 if self.full else self.window_s
        return not (self._viewers or self.ending) and self._hub.clock.monotonic() - self._alone_since >= window_s

    @property
    def ending(self) -> bool:
        """It is over; its end may still have to be written."""
        return self._ending is not None

    def followed(self, ago_ms: int) -> None:
        """A reader at another gateway was seen so long ago (-1: never); a moment ago means that it is there."""
        if 0 <= ago_ms < _FOLLOWED_MS:
            self._followed_at = self._alone_since = self._hub.clock.monotonic()

    @property
    def movable(self) -> bool:
        """Somebody would go on with it elsewhere at once, and nobody here would lose anything by that."""
        if self._viewers:
            return self.log.movable(self._viewers)
        return self._hub.clock.monotonic() - self._followed_at < RENEW_S + _FOLLOWED_MS / 1000

    # The writer's.

    def batch(self) -> Batch:
        """What is to be appended now."""
        return Batch(self.owner.id, self.epoch, self._entries, tuple(self._unsent), self._ending, self._record)

    def written(self, batch: Batch, what: Written, entries: int = 0) -> None:
        """What became of it; how many entries its outputs have now, if it was made."""
        _appends.labels(what.name.lower()).inc()
        match what:
            case Written.MADE:
                self._entries = entries
                self._show(batch)
            case Written.FULL:
                self.full = True
                self._show(batch)
            case Written.FENCED:
                self._hub.close(self)
                self.log.interrupt()
                self.owner.cancel(Reason.OWNER_MOVED)
            case Written.LOST:
                self._hub.restore(self)

    def _show(self, batch: Batch) -> None:
        """At the bound nothing waits for the store any more."""
        count = len(self._unsent) if self.full else len(batch.runs)
        ending = self._ending if self.full else batch.ending
        new = self._unsent[self._again : count]
        del self._unsent[:count]
        self._again = 0
        if ending is not None:
            self._hub.close(self, keep=not self.full)
        self.log.add(new, ending)
        if self._unsent or (self.ending and ending is None):
            self._hub.due(self)

    def rewrite(self) -> None:
        """The store forgot it, or a part: everything is to be appended again; who reads skips what is known."""
        self._again += len(self.log.runs)
        self._unsent = [*self.log.runs, *self._unsent]
        self._entries = 0


class Journals:
    """All of a gateway. Run `run` as a task."""

    def __init__(self, custody: Custody, clock: Clock) -> None:
        self.custody = custody
        self.clock = clock
        self._open: dict[str, Journal] = {}
        self._kept: dict[str, tuple[Journal, float]] = {}  # over and written; until when
        self._due: dict[Journal, None] = {}
        self._lost: dict[Journal, None] = {}
        self.turn = asyncio.Lock()  # to write leases: one that is let go must not be renewed by a write on its way
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        custody.on_forgotten(self._restore_kept)

    def open(self, journal: Journal) -> None:
        """Its lease is kept from now on."""
        self._open[journal.owner.id] = journal
        self._idle.clear()

    def close(self, journal: Journal, keep: bool = False) -> None:
        """Nothing more is written of it. `keep`: it is over, and stays for a while, for readers and for a store that
        comes back empty before they have read its end."""
        self._due.pop(journal, None)
        self._lost.pop(journal, None)
        if self._open.get(journal.owner.id) is journal:
            del self._open[journal.owner.id]
        if keep:
            if self._kept.pop(journal.owner.id, None):  # it was written again
                self.custody.disown(journal.owner.id, journal.tenant)
            self._kept[journal.owner.id] = journal, self.clock.monotonic() + KEEP_S
            if len(self._kept) > _KEPT:
                del self._kept[next(iter(self._kept))]
        if not self._open:
            self._idle.set()

    def find(self, request_id: str) -> Journal | None:
        """The journal of a request that is owned here, or was until it ended a moment ago."""
        kept = self._kept.get(request_id)
        return kept[0] if kept else self._open.get(request_id)

    def _restore_kept(self) -> None:
        """The store came back empty: what is over is told again too."""
        for journal, _ in self._kept.values():
            self.restore(journal)

    def _drop_kept(self) -> None:
        now = self.clock.monotonic()
        for request_id, (journal, until) in list(self._kept.items()):
            if until <= now and journal not in self._lost and request_id not in self._open:
                del self._kept[request_id]

    def due(self, journal: Journal) -> None:
        """It has something to write."""
        self._due[journal] = None
        self._wake.set()

    def restore(self, journal: Journal) -> None:
        """The store does not know it any more."""
        self._lost[journal] = None
        self.due(journal)

    async def let_go(self, every: bool = True) -> None:
        """Leave requests to other gateways, which may take them over at once: those that are movable, or `every` one.
        Their readers are sent after them. Raises StateAway."""
        leaving = [journal for journal in self._open.values() if every or journal.movable]
        for start in range(0, len(leaving), _TOGETHER):
            async with self.turn:
                part = self._writable(leaving[start : start + _TOGETHER])
                answers = await self.custody.hold([(each.owner.id, each.epoch, 0) for each in part], lease_ms=0)
            for journal, (written, _) in zip(part, answers, strict=True):
                if written is Written.LOST:
                    self.restore(journal)
                if written is Written.LOST or journal.ending:
                    continue  # what ended meanwhile has its end still to write, here
                _log.info("request %s is left to another gateway", journal.owner.id)
                journal.abandon()
                journal.owner.cancel(Reason.OWNER_MOVED)

    def _writable(self, journals: list[Journal]) -> list[Journal]:
        """Those that are still owned here, and have a lease."""
        return [
            journal
            for journal in journals
            if self._open.get(journal.owner.id) is journal and not (journal.full or journal.ending)
        ]

    async def idle(self) -> None:
        """Return when nothing is left to write."""
        await self._idle.wait()

    def __len__(self) -> int:
        return len(self._open)

    async def run(self) -> None:
        """Write and renew until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write())
            tasks.create_task(self._keep())

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._due:
                    await self._claim_lost()
                    await self._append(list(itertools.islice(self._due, _TOGETHER)))
            except StateAway:
                self._away()
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _append(self, journals: list[Journal]) -> None:
        try:
            async with self.turn:
                for journal in journals:
                    self._due.pop(journal, None)
                journals = [journal for journal in journals if self._open.get(journal.owner.id) is journal]
                batches = [journal.batch() for journal in journals]
                answers = await self.custody.append(batches)
        except StateAway:
            self._due |= dict.fromkeys(journal for journal in journals if journal.owner.id in self._open)
            raise
        for journal, batch, (written, entries) in zip(journals, batches, answers, strict=True):
            if self._open.get(journal.owner.id) is journal:
                journal.written(batch, written, entries)

    async def _claim_lost(self) -> None:
        for journal in list(self._lost):
            try:
                async with self.turn:
                    if journal not in self._lost:
                        continue  # it was closed meanwhile, and must not be opened again
                    await journal.claim(again=True)
            except StateAway:
                raise
            except TrunklineError:
                journal.abandon()
                journal.owner.cancel(Reason.OWNER_MOVED)
            else:
                journal.rewrite()
                self._lost.pop(journal, None)
                self.due(journal)

    def _away(self) -> None:
        """Nothing can be acknowledged: readers are sent away with their cursors; the requests go on."""
        for journal in list(self._open.values()):
            journal.log.interrupt()

    async def _keep(self) -> None:
        renewed = self.clock.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            self._drop_kept()
            held = list(self._open.values())
            try:
                if self.clock.monotonic() - renewed >= RENEW_S:
                    renewed = self.clock.monotonic()
                    await self._renew(held)
                await self._renew([journal for journal in held if journal.deserted])
            except StateAway:
                self._away()
            for journal in held:
                if journal.deserted:
                    journal.owner.cancel(Reason.CLIENT_GONE)

    async def _renew(self, journals: list[Journal]) -> None:
        """Renew leases and hear of followers."""
        for start in range(0, len(journals), _TOGETHER):
            async with self.turn:
                part = self._writable(journals[start : start + _TOGETHER])
                answers = await self.custody.hold([(journal.owner.id, journal.epoch, 0) for journal in part])
            for journal, (written, ago_ms) in zip(part, answers, strict=True):
                if self._open.get(journal.owner.id) is not journal or journal.ending:
                    continue  # its end may be there already, and owns nothing
                journal.followed(ago_ms)
                if written is not Written.MADE:
                    journal.written(journal.batch(), written)
