"""One Outputs stream to one worker address on one lane: handles, replays, and the judgement that the worker is lost.

Owns what is bound there. The one rule: a broken stream is not a lost worker. It is opened anew at once, and only when
that fails, or another incarnation answers, everything bound here is lost.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import TYPE_CHECKING, Final

from gateway.attempt import Attempt
from gateway.outbox import Outbox
from gateway.transcript import Run, Stop
from gateway.transport import OutputsStream, PeerLost
from shared.ids import BUILD
from shared.rpc import INTERNAL_MESSAGE_BYTES
from shared.wire import HEARTBEAT_S, LOST_AFTER_S, Liveness, PeerState, engine_stalled
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from gateway.links import Links

_log = logging.getLogger(__name__)

IDLE_S: Final = 60.0
OPEN_WITHIN_S: Final = LOST_AFTER_S  # a worker that was said to have a request must open it
FREE_WITHIN_S: Final = 5.0  # for how long a cancelled request's Freed is listened for
_WATCH_S: Final = 0.1
_REOPEN_PAUSE_S: Final = 0.02
_MAX_HANDLES: Final = 65_536
_MAX_FRUITLESS: Final = 64  # sessions that may break before their first batch: a second of them, no more
_LONGEST_STEP_S: Final = 10.0  # of an engine whose steps are not known here: the rule's cap holds
_NO_LOGPROBS: Final[tuple[common_pb2.TokenLogprob, ...]] = ()
_BULK_WEIGHT: Final = 8  # pieces are large: the worker's window holds four


class Link:
    """One worker address on one lane. It outlives its stream, which is opened anew when it breaks; when that does not
    succeed in time, or another incarnation answers, everything bound here is lost."""

    def __init__(self, hub: Links, address: str, lane: worker_pb2.Lane) -> None:
        self.address = address
        self.lane = lane
        self.incarnation = 0
        self.worker_id = ""
        self._hub = hub
        self._clock = hub.clock
        self._liveness = Liveness(hub.clock)
        self._outbox = Outbox(hub.clock)
        self._members: dict[Attempt, float] = {}  # bound or promised, until freed: since when it waits to be opened
        self._promised: dict[Attempt, int] = {}  # the incarnation the router named
        self._leaving: dict[Attempt, float] = {}  # members that were cancelled, and when
        self._handles: dict[int, Attempt | None] = {}  # None: not current, answered with Cancel
        self._seq = 0
        self._used_at = hub.clock.monotonic()
        self._stream: OutputsStream | None = None
        self._connected = False
        self._fruitless = 0  # sessions in a row without a good batch
        self._task: asyncio.Task[None] | None = None

    # What requests tell it.

    def start(self) -> None:
        """Begin. In a context of its own: a link outlives the call that needed it first."""
        self._task = asyncio.get_running_loop().create_task(self._run(), context=contextvars.Context())

    def expect(self, attempt: Attempt, incarnation: int) -> None:
        """The worker here is said to have `attempt`. If another incarnation answered here, ask who lives here now."""
        attempt.seat = self
        self._members[attempt] = self._clock.monotonic()
        self._promised[attempt] = incarnation
        if self.incarnation not in (0, incarnation):
            self.resync("the router names another incarnation")

    def leave(self, attempt: Attempt) -> None:
        """`attempt` is over; see `Links.leave`."""
        if attempt not in self._members:
            attempt.freed.set()
            return
        self._leaving[attempt] = self._clock.monotonic()
        self._outbox.cancel(attempt.request_id, attempt.stamp)
        self._relieve()

    def stop(self, attempt: Attempt, stop: Stop) -> None:
        """A choice ended here."""
        self._outbox.stop(attempt.request_id, attempt.stamp, stop.choice, stop.at_index)
        self._relieve()

    def resync(self, why: str) -> None:
        """Break the stream off: it is opened anew and the worker replays from what is held."""
        if self._stream is not None and self._connected:
            _log.warning("outputs of %s are opened anew: %s", self.worker_id or self.address, why)
            self._stream.cancel()

    def cancel(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.cancel()

    async def closed(self) -> None:
        """Return when it has ended."""
        if self._task is not None:
            await asyncio.wait([self._task])

    # Its life.

    async def _run(self) -> None:
        try:
            while self._wanted() and self._liveness.judge(self._hub.lag.lag_s()) is not PeerState.LOST:
                try:
                    await self._session()
                except PeerLost as lost:
                    await self._broke(lost)
        except Exception:
            _log.exception("the outputs of %s ended", self.worker_id or self.address)
        finally:
            self._lose_all("the worker cannot be reached")
            self._hub.ended(self)
        # Afresh the next time, without back-off: the address may be a new process by then.
        await self._hub.transport.forget(self.address)

    async def _broke(self, lost: PeerLost) -> None:
        """A broken stream is first opened again: it is not a lost worker, unless nothing listens there."""
        self._fruitless += 1
        if lost.refused or self._fruitless > _MAX_FRUITLESS:
            self._liveness.refused()
        else:
            self._liveness.broke()
            await asyncio.sleep(_REOPEN_PAUSE_S)

    async def _session(self) -> None:
        """One stream, from Hello to its end. Raises PeerLost."""
        self._outbox = Outbox(self._clock)
        self._handles.clear()
        self._seq = 0
        self._stream = stream = self._hub.transport.outputs(self.address, self.lane)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._talk(stream))
                tasks.create_task(self._listen(stream))
        except BaseExceptionGroup as group:
            raise _loss_in(group) from group
        finally:
            self._connected = False
            stream.cancel()

    async def _talk(self, stream: OutputsStream) -> None:
        await stream.write(worker_pb2.OutputsRequest(hello=self._hello()))
        while True:
            message = self._outbox.next(idle=not self._members)
            if message is None:
                await self._outbox.wait(idle=not self._members)
            else:
                await stream.write(message)

    async def _listen(self, stream: OutputsStream) -> None:
        self._greet(await stream.read())
        while True:
            message = await stream.read()
            self._liveness.heard()
            match message.WhichOneof("message"):
                case "batch":
                    self._batch(message.batch)
                case "bulk":
                    self._bulk(message.bulk)
                case "heartbeat":
                    self._heartbeat(message.heartbeat)
                case other:
                    raise PeerLost(f"the worker said {other or 'something unknown'} in mid-stream")

    async def _watch(self) -> None:
        """Judge the peer, its promises, and whether anybody needs this stream. Raises PeerLost to end it."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._liveness.judge(self._hub.lag.lag_s()) is PeerState.LOST:
                raise PeerLost("the worker is silent")
            self._drop_the_overdue()
            if not self._wanted():
                raise PeerLost("nobody needs the stream")

    def _wanted(self) -> bool:
        now = self._clock.monotonic()
        if self._members:
            self._used_at = now
        return now - self._used_at < IDLE_S

    def _drop_the_overdue(self) -> None:
        now = self._clock.monotonic()
        for attempt, since in list(self._leaving.items()):
            if now - since > FREE_WITHIN_S:
                self._forget(attempt)
                self._handles.update((handle, None) for handle, own in self._handles.items() if own is attempt)
        for attempt, since in list(self._members.items()):
            if attempt.handle is None and attempt not in self._leaving and now - since > OPEN_WITHIN_S:
                attempt.unopened(self._promised.get(attempt, self.incarnation))

    # Hello.

    def _hello(self) -> worker_pb2.Hello:
        identity = self._hub.identity
        return worker_pb2.Hello(
            protocol_major=identity.protocol.major,
            protocol_minor=identity.protocol.minor,
            build=BUILD,
            id=identity.id,
            incarnation=identity.incarnation,
            stream_generation=self._hub.next_generation(),
            features=sorted(identity.protocol.features),
            heartbeat_ms=round(HEARTBEAT_S * 1000),
            max_message_bytes=INTERNAL_MESSAGE_BYTES,
            lane=self.lane,
            held=[_held(attempt) for attempt in self._members if attempt.bound and not attempt.ended.done()],
            pending=[_pending(attempt) for attempt in self._hub.unbound(self.lane)],
        )

    def _greet(self, message: worker_pb2.OutputsResponse) -> None:
        """The worker's Hello. Another incarnation than the one known means that the known one is gone."""
        hello = message.hello
        if message.WhichOneof("message") != "hello" or hello.protocol_major != self._hub.identity.protocol.major:
            self._liveness.refused()
            raise PeerLost("the worker does not speak our protocol", refused=True)
        self._liveness.heard(hello.heartbeat_ms / 1000)
        self._connected = True
        if self.incarnation not in (0, hello.incarnation):
            self._lose_all("the worker's engine was started anew", keep=hello.incarnation)
        self.incarnation, self.worker_id = hello.incarnation, hello.id
        now = self._clock.monotonic()
        for attempt in list(self._members):
            attempt.handle = None
            self._members[attempt] = now
            if self._promised.get(attempt, hello.incarnation) != hello.incarnation:
                self._lose(attempt, "the worker's engine was started anew")

    # Outputs.

    def _batch(self, batch: worker_pb2.OutputBatch) -> None:
        self._number(batch.seq)
        for opened in batch.opened:
            self._open(opened)
        if batch.handle:
            self._runs(batch)
        for event in batch.events:
            self._event(event)
        self._outbox.took(batch.seq)
        self._fruitless = 0

    def _number(self, seq: int) -> None:
        if seq != self._seq + 1:
            raise PeerLost(f"batch {seq} came after {self._seq}")
        self._seq = seq

    def _open(self, opened: worker_pb2.Opened) -> None:
        """Bind it, if it is the current attempt of its request and bound nowhere else; else cancel it."""
        stamp = (opened.epoch, opened.attempt)
        attempt = self._hub.attempts.get(opened.request_id)
        current = attempt is not None and attempt.stamp == stamp and attempt.lane == self.lane
        if len(self._handles) >= _MAX_HANDLES:
            raise PeerLost("the worker opens more than it ends")
        if attempt is not None and current and self._bind(attempt, opened.handle):
            return
        self._hub.stale += 1
        self._handles[opened.handle] = next((own for own in self._leaving if own.request_id == opened.request_id), None)
        self._outbox.cancel(opened.request_id, stamp)
        self._relieve()

    def _bind(self, attempt: Attempt, handle: int) -> bool:
        promised_to = attempt.seat
        if not attempt.opened(self, handle):
            return False
        if isinstance(promised_to, Link) and promised_to is not self:
            promised_to._forget(attempt)
        self._handles[handle] = attempt
        self._members[attempt] = self._clock.monotonic()
        self._promised.pop(attempt, None)
        return True

    def _runs(self, batch: worker_pb2.OutputBatch) -> None:
        """Hand every run to its attempt."""
        now, handles = self._clock.monotonic(), self._handles
        # Columns are taken whole: reading them entry by entry would cost more than all that is done with an entry.
        ids, counts, stops = batch.token_ids[:], batch.count[:], batch.stop_token[:] or [0] * len(batch.handle)
        columns = (batch.handle[:], batch.choice[:], batch.index[:], counts, batch.finish[:], stops)
        if any(len(column) != len(counts) for column in columns) or sum(counts) != len(ids):
            raise PeerLost("the columns of a batch differ in length")
        logprobs = {entry.run: entry.tokens for entry in batch.logprobs}
        at = 0
        for number, (handle, choice, index, count, finish, stop) in enumerate(zip(*columns, strict=True)):
            attempt = handles[handle] if handle in handles else self._at(handle)
            if attempt is None:
                pass  # it was answered with Cancel
            elif count != 1 or finish or not attempt.token(choice, index, ids[at], now):
                entries = logprobs.get(number, _NO_LOGPROBS)
                attempt.run(Run(choice, index, ids[at : at + count], finish, stop - 1 if stop else None, entries), now)
            at += count

    def _bulk(self, piece: worker_pb2.BulkPiece) -> None:
        self._number(piece.seq)
        attempt = self._at(piece.handle)
        if attempt is not None:
            attempt.piece(piece, self._clock.monotonic())
        self._outbox.took(piece.seq, _BULK_WEIGHT)
        self._fruitless = 0

    def _at(self, handle: int) -> Attempt | None:
        """Whose handle it is; None for one that was answered with Cancel."""
        if handle not in self._handles:
            raise PeerLost(f"handle {handle} was never opened here")
        return self._handles[handle]

    def _event(self, event: worker_pb2.RequestEvent) -> None:
        kind = event.WhichOneof("event") or ""
        attempt = self._handles.get(event.handle) if event.handle else self._by_id(event.request_id, kind)
        if attempt is not None:
            self._tell(attempt, event, kind)
        if kind != "scheduled":
            self._handles.pop(event.handle, None)

    def _by_id(self, request_id: bytes, kind: str) -> Attempt | None:
        """Who is meant by an event without a handle: Freed answers a cancel; all else answers a Hello that listed a
        request which the worker does not have."""
        for attempt in self._leaving if kind == "freed" else self._members:
            waits = attempt in self._leaving or (attempt.bound and attempt.handle is None)
            if attempt.request_id == request_id and waits:
                return attempt
        return None

    def _tell(self, attempt: Attempt, event: worker_pb2.RequestEvent, kind: str) -> None:
        match kind:
            case "scheduled":
                attempt.scheduled(event.scheduled)
                return
            case "finished":
                attempt.finished(event.finished)
            case "failed":
                attempt.failed(event.failed)
            case "released":
                attempt.released(event.released)
            case "fenced":
                attempt.fenced()
            case "freed":
                attempt.was_freed()
        self._forget(attempt)

    def _heartbeat(self, beat: worker_pb2.WorkerHeartbeat) -> None:
        """The engine's progress is judged apart from the door's life."""
        running = any(attempt.bound and not attempt.ended.done() for attempt in self._members)
        age = beat.engine_tick_age_ms / 1000
        if engine_stalled(tick_age_s=age, max_step_s=_LONGEST_STEP_S, work_waits=running):
            self._liveness.refused()
            raise PeerLost("the worker's engine makes no progress")

    # Ends.

    def _lose_all(self, message: str, keep: int = 0) -> None:
        """Everything here is lost, but for what the router promised of incarnation `keep`."""
        for attempt in list(self._members):
            if not keep or self._promised.get(attempt) != keep:
                self._lose(attempt, message)

    def _lose(self, attempt: Attempt, message: str) -> None:
        self._hub.lost_attempts += not attempt.ended.done()
        attempt.lost(message, self._promised.get(attempt, self.incarnation))
        self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        """The worker holds it no longer, or nobody listens for that any more."""
        self._members.pop(attempt, None)
        self._promised.pop(attempt, None)
        self._leaving.pop(attempt, None)

    def _relieve(self) -> None:
        """A full outbox breaks the stream: the next Hello says it all."""
        if self._outbox.full:
            self.resync("too much is to be said")


def _held(attempt: Attempt) -> worker_pb2.Held:
    epoch, number = attempt.stamp
    return worker_pb2.Held(request_id=attempt.request_id, epoch=epoch, attempt=number, next=attempt.work.next_indices())


def _pending(attempt: Attempt) -> worker_pb2.Pending:
    epoch, number = attempt.stamp
    return worker_pb2.Pending(request_id=attempt.request_id, epoch=epoch, attempt=number)


def _loss_in(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The PeerLost that ended a session; anything else in the group is a fault of ours and is raised instead."""
    lost, rest = group.split(PeerLost)
    if rest is not None or lost is None:
        return rest or group
    first: BaseException = lost
    while isinstance(first, BaseExceptionGroup):
        first = next((each for each in first.exceptions if getattr(each, "refused", False)), first.exceptions[0])
    return first
