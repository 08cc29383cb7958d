"""One Outputs stream, downwards: handles, numbered messages, the flush rule, the window of unacknowledged ones.

Owns what is under way on one connection; what must outlive it is in the deliveries. Pure: whoever writes asks `next`
for a message, and sleeps until `due` or `wake` when there is none. The one rule: nothing is copied out of a delivery
before it is sent, so a stream that falls behind coalesces by itself and holds no more than its window.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.wire import HEARTBEAT_S, IDLE_HEARTBEAT_S
from trunkline.worker.v1 import worker_pb2
from workers.door.batch import MAX_BYTES, Batch, Sent, acknowledge
from workers.door.delivery import Delivery

if TYPE_CHECKING:
    from workers.door.outlets import Outlet

FLUSH_S = 0.005
MAX_NOTICES = 16_384
PIECE_OVERHEAD = 128


@dataclass(frozen=True, slots=True)
class Window:
    """Most that may be unacknowledged on one stream. The transport would take megabytes from an absent reader."""

    messages: int = 256
    bytes: int = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pulse:
    """What heartbeats say of the engine."""

    tick_age_ms: int
    step: int


class Stream:
    """See the module. `closing` once set, it sends what is left, ignoring the window, and is `done`."""

    def __init__(
        self,
        hello: worker_pb2.Hello,
        outlet: Outlet,
        clock: Clock,
        pulse: Callable[[], Pulse],
        wake: Callable[[], None],
        *,
        window: Window | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`hello` is said first; `max_bytes`: most the peer takes in a message; `wake`: `due` may have come nearer."""
        self.generation = hello.stream_generation
        self.outlet = outlet
        self.closing: TrunklineError | None = None
        self._hello: worker_pb2.Hello | None = hello
        self._clock = clock
        self._pulse = pulse
        self._wake = wake
        self._window = window or Window()
        self._max_bytes = min(max_bytes, MAX_BYTES)
        self._dirty: dict[Delivery, None] = {}  # in order of first change since it was last sent
        self._notices: deque[worker_pb2.RequestEvent] = deque()
        self._under_way: deque[Sent] = deque()
        self._under_way_bytes = 0
        self._handles = 0
        self._carried = 0
        self._seq = 0
        self._urgent = False
        self._abandoned = False
        self._spoke_at = clock.monotonic()
        self._batch_at = -math.inf

    # What the door tells it.

    def open(self, delivery: Delivery) -> None:
        """Carries `delivery` from now on: says Opened and all that is not acknowledged."""
        delivery.carry(self)
        self._carried += 1
        self.mark(delivery)

    def mark(self, delivery: Delivery, urgent: bool = False) -> None:
        """There is something new of a delivery that it carries; `urgent`: not to be held back by the flush rule."""
        if not self._dirty or (urgent and not self._urgent):
            self._urgent = self._urgent or urgent
            self._wake()
        self._dirty[delivery] = None

    def leave(self, delivery: Delivery, event: worker_pb2.RequestEvent | None) -> None:
        """Carries `delivery` no longer; `event` is the last thing said of it, after what is under way."""
        self._dirty.pop(delivery, None)
        self._carried -= 1
        if event is not None:
            self.notice(event, delivery)

    def notice(self, event: worker_pb2.RequestEvent, delivery: Delivery) -> None:
        """Says an event once, without keeping it until acknowledged: by handle where there is one."""
        self.notice_id(event, delivery.execution.request_id, delivery.handle if delivery.stream is self else 0)

    def notice_id(self, event: worker_pb2.RequestEvent, request_id: bytes, handle: int = 0) -> None:
        """Says an event once of a request that may never have been here.

        A peer that asks for more than it reads loses its stream; the next Hello settles what was left unsaid.
        """
        event.handle = handle
        event.request_id = b"" if handle else request_id
        if len(self._notices) == MAX_NOTICES:
            self.abandon(TrunklineError(Reason.SLOW_READER, f"{MAX_NOTICES} events wait to be read"))
            return
        self._notices.append(event)
        self._wake()

    def acknowledge(self, seq: int) -> list[Delivery]:
        """The peer has everything up to `seq`; the deliveries whose ending it has. Raises on a number never sent."""
        if seq > self._seq:
            raise TrunklineError(Reason.BAD_FIELD, f"batch {seq} was acknowledged, {self._seq} were sent")
        arrived: list[Sent] = []
        while self._under_way and self._under_way[0].seq <= seq:
            arrived.append(self._under_way.popleft())
            self._under_way_bytes -= arrived[-1].size
        acknowledge(arrived)
        if self._pending:
            self._wake()
        return [delivery for sent in arrived for delivery in sent.endings]

    def close(self, why: TrunklineError) -> None:
        """Ends after what is left; whoever writes then fails the call with `why`. The first reason stays."""
        self.closing = self.closing or why
        self._wake()

    def abandon(self, why: TrunklineError) -> None:
        """Ends at once, sending nothing more: what it carried goes over another stream."""
        self._abandoned = True
        self.close(why)

    # What the writer asks.

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self._abandoned or (self.closing is not None and not self._pending)

    @property
    def due(self) -> float:
        """Seconds on the clock from which `next` has something to say."""
        if self._hello is not None:
            return self._spoke_at
        if not (self._pending and self._open):
            return self._heartbeat_at
        flush_at = self._batch_at if self._urgent or self.closing else self._batch_at + FLUSH_S
        return min(flush_at, self._heartbeat_at)

    def next(self) -> worker_pb2.OutputsResponse | None:
        """The next message if one is due."""
        now = self._clock.monotonic()
        message = self._compose(now) if now >= self.due else None
        if message is not None:
            self._spoke_at = now
        return message

    @property
    def _pending(self) -> bool:
        return bool(self._dirty or self._notices)

    @property
    def _open(self) -> bool:
        room = len(self._under_way) < self._window.messages and self._under_way_bytes < self._window.bytes
        return room or self.closing is not None

    @property
    def _heartbeat_at(self) -> float:
        return self._spoke_at + (HEARTBEAT_S if self._carried else IDLE_HEARTBEAT_S)

    def _compose(self, now: float) -> worker_pb2.OutputsResponse | None:
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return worker_pb2.OutputsResponse(hello=hello)
        if self._pending and self._open and (message := self._outputs()):
            self._batch_at = now
            return message
        if now < self._heartbeat_at:
            return None  # what was new has gone again: cancelled before it was sent
        pulse = self._pulse()
        beat = worker_pb2.WorkerHeartbeat(engine_tick_age_ms=pulse.tick_age_ms, step=pulse.step)
        return worker_pb2.OutputsResponse(heartbeat=beat)

    def _outputs(self) -> worker_pb2.OutputsResponse | None:
        batch = self._collect()
        if not batch.empty:
            message, sent = batch.finish(self._seq + 1)
            self._sending(sent)
            return message
        piece = self._piece()
        return worker_pb2.OutputsResponse(bulk=piece) if piece else None

    def _collect(self) -> Batch:
        """As much as fits of what is new; what does not fit stays dirty, in its place."""
        batch = Batch(self._max_bytes)
        whole = 0
        for delivery in self._dirty:
            if not (batch.token(delivery) or (batch.room > 0 and self._put(delivery, batch))):
                break
            whole += 1
        if whole == len(self._dirty):
            self._dirty.clear()
        else:
            for delivery in list(itertools.islice(self._dirty, whole)):
                del self._dirty[delivery]
        while self._notices and batch.room > 0:
            batch.event(self._notices.popleft())
        self._urgent = self._pending
        return batch

    def _put(self, delivery: Delivery, batch: Batch) -> bool:
        """Adds what is new of `delivery`; True if that was all."""
        if not delivery.handle:
            self._handles += 1
            delivery.handle = self._handles
            batch.open(delivery)
        execution = delivery.execution
        if execution.bulk is not None:
            if not delivery.cursors[0].drained:
                return False
        elif not batch.choices(delivery):
            return False
        if delivery.news:
            for event in delivery.news:
                event.handle = delivery.handle
                batch.event(event)
            delivery.news.clear()
        ending = execution.ending
        if ending is not None and not delivery.ending_sent:
            ending.handle = delivery.handle
            batch.end(delivery, ending)
            delivery.ending_sent = True
        return True

    def _piece(self) -> worker_pb2.BulkPiece | None:
        """The next piece of the first bulk result in line, which then goes to the end of it."""
        delivery = next(iter(self._dirty), None)
        if delivery is None:
            return None
        cursor, result = delivery.cursors[0], delivery.execution.bulk
        assert result is not None, "only bulk results stay in line behind an empty batch"
        start, end = cursor.sent, min(result.produced, cursor.sent + self._max_bytes - PIECE_OVERHEAD)
        cursor.sent = end
        self._dirty[delivery] = self._dirty.pop(delivery)
        self._sending(Sent(self._seq + 1, end - start, {cursor: end}))
        return worker_pb2.BulkPiece(
            seq=self._seq,
            handle=delivery.handle,
            kind=worker_pb2.BulkPiece.KIND_EMBEDDING,
            offset=start,
            total=result.total,
            data=bytes(result.data[start:end]),
            prompt_tokens=result.prompt_tokens,
        )

    def _sending(self, sent: Sent) -> None:
        self._seq = sent.seq
        self._under_way.append(sent)
        self._under_way_bytes += sent.size
