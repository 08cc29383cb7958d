"""One attempt of one request: what a link tells it, where it is bound, and how it ends.

The one rule: an attempt ends once. What arrives after its end changes nothing but `freed`; and once every choice
has ended it ends DONE, whatever becomes of its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from opentelemetry.trace import Span

from gateway.receipt import AttemptStages
from gateway.transcript import Fit, Run, Stop
from shared.errors import Reason, TrunklineError
from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2

# Every choice has ended; how long the worker has to say that the request is over, and what it took.
_FAREWELL_S = 1.0


class Kind(Enum):
    """How an attempt ended."""

    DONE = "done"  # every choice ended
    REFUSED = "refused"  # the router gave a reason
    UNREACHED = "unreached"  # the router broke off; what became of the submission is unknown
    UNOPENED = "unopened"  # a worker was said to have it and never opened it
    LOST = "lost"  # the incarnation it was bound to (or promised to) is gone
    RELEASED = "released"  # the worker holds it no longer
    UNFIT = "unfit"  # the worker's tokens do not join on
    FAILED = "failed"  # the worker gave a reason


class _Gap(Enum):
    """Whether runs did not join on, and what was done about it."""

    NONE = "none"
    ASKED = "asked"  # for a replay; until it comes, more of the same is expected
    REPLAYED = "replayed"


@dataclass(frozen=True)
class End:
    """The end of an attempt. `bound`: a worker had opened it. `incarnation`: the worker concerned, 0 if none."""

    kind: Kind
    bound: bool = False
    incarnation: int = 0
    error: TrunklineError | None = None
    why: worker_pb2.Released.Why = worker_pb2.Released.WHY_UNSPECIFIED
    message: str = ""
    retryable: bool = False


class Work(Protocol):
    """What an attempt is for: the transcript of a generation, or the pieces of an embedding."""

    @property
    def complete(self) -> bool:
        """Nothing more is wanted."""
        ...

    def token(self, choice: int, index: int, token: int, now: float) -> bool:
        """Take one more token of a choice (lane TOKENS), if nothing else is to be done about it; False if it must be
        appended as a run."""
        ...

    def append(self, run: Run) -> Fit:
        """Take tokens (lane TOKENS)."""
        ...

    def piece(self, piece: worker_pb2.BulkPiece) -> Fit:
        """Take a piece (lane BULK)."""
        ...

    def stops(self) -> Sequence[Stop]:
        """Choices ended here so far, oldest first."""
        ...

    def next_indices(self) -> list[worker_pb2.NextIndex]:
        """Where each choice goes on, for Hello."""
        ...


class Seat(Protocol):
    """The stream an attempt is bound to, or promised to."""

    incarnation: int
    worker_id: str

    def stop(self, attempt: Attempt, stop: Stop) -> None:
        """Tell the worker that a choice has ended."""
        ...

    def resync(self, why: str) -> None:
        """Open the stream anew: the worker replays from what is held."""
        ...


class Attempt:
    """(epoch, attempt) of a request. `seat` is the stream it is bound to; `handle` its number there, None while a
    stream that was opened anew has not named it yet. `ended` gives its End; `freed` is set once no worker holds it."""

    def __init__(
        self,
        request_id: bytes,
        stamp: Stamp,
        lane: worker_pb2.Lane,
        work: Work,
        stages: AttemptStages,
        span: Span,
        on_bound: Callable[[Attempt], None],
    ) -> None:
        self.request_id = request_id
        self.stamp = stamp
        self.lane = lane
        self.work = work
        self.stages = stages
        self.seat: Seat | None = None
        self.handle: int | None = None
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.freed = asyncio.Event()
        self.bound = False  # a worker has opened it
        self._span = span
        self._on_bound = on_bound
        self._flows = False  # it has begun to bring tokens, and has not ended
        self._stops_told = 0
        self._gap = _Gap.NONE
        self._farewell: asyncio.TimerHandle | None = None

    def opened(self, seat: Seat, handle: int) -> bool:
        """A stream opened this (e, a). False if that is not where it is bound: the stream must be answered Cancel."""
        if self.ended.done() or (self.bound and self.seat is not seat):
            return False
        self.seat, self.handle = seat, handle
        if self._gap is _Gap.ASKED:
            self._gap = _Gap.REPLAYED
        self._stops_told = 0
        self._tell_stops()
        if not self.bound:
            self.bound = True
            self.stages.worker = seat.worker_id
            self._span.set_attribute("trunkline.worker.id", seat.worker_id)
            self._span.add_event("opened")
            self._on_bound(self)
        return True

    def token(self, choice: int, index: int, token: int, now: float) -> bool:
        """One more token came, as nearly always; False if it must come as a run."""
        if not self._flows or not self.work.token(choice, index, token, now):
            return False
        self.stages.last_token = now
        return True

    def run(self, run: Run, now: float) -> None:
        """Tokens came."""
        if not self.ended.done():
            self._joined(self.work.append(run), now)

    def piece(self, piece: worker_pb2.BulkPiece, now: float) -> None:
        """A piece of a bulk result came."""
        if not self.ended.done():
            self._joined(self.work.piece(piece), now)

    def scheduled(self, event: worker_pb2.Scheduled) -> None:
        """It entered its first step."""
        self.stages.worker_queue_ms = event.worker_queue_ms
        self.stages.cached_tokens = event.cached_tokens

    def finished(self, event: worker_pb2.Finished) -> None:
        """The worker is done with it."""
        stages = self.stages
        stages.worker_queue_ms, stages.prefill_ms = event.worker_queue_ms, event.prefill_ms
        stages.decode_ms, stages.steps, stages.cached_tokens = event.decode_ms, event.steps, event.cached_tokens
        if self.work.complete:
            self.end(Kind.DONE)
        else:
            self.end(Kind.UNFIT, message="the worker ended it before every choice had ended")

    def failed(self, event: worker_pb2.Failed) -> None:
        """The worker ended it with an error."""
        reason = Reason(event.reason) if event.reason in Reason.__members__ else Reason.INTERNAL
        error = TrunklineError(reason, event.message or "the worker failed")
        self.end(Kind.FAILED, error=error, retryable=event.retryable)

    def released(self, event: worker_pb2.Released) -> None:
        """The worker holds it no longer."""
        self.end(Kind.RELEASED, why=event.why, message=event.message)

    def fenced(self) -> None:
        """The worker says that a higher (e, a) took it over; this owner knows of none."""
        self.end(Kind.RELEASED, message="it was fenced out")

    def was_freed(self) -> None:
        """The engine holds nothing for it. Without a cancel of ours somebody else cancelled it there."""
        self.end(Kind.RELEASED, message="its worker freed it")
        self.freed.set()

    def lost(self, message: str, incarnation: int) -> None:
        """The incarnation it was bound or promised to is gone."""
        self.end(Kind.LOST, message=message, incarnation=incarnation)
        self.freed.set()

    def unopened(self, incarnation: int) -> None:
        """The worker that was said to have it does not open it."""
        self.end(Kind.UNOPENED, incarnation=incarnation)

    def leave(self) -> None:
        """Nothing that comes now counts."""
        self._flows = False
        self.ended.cancel()

    def end(
        self,
        kind: Kind,
        *,
        error: TrunklineError | None = None,
        why: worker_pb2.Released.Why = worker_pb2.Released.WHY_UNSPECIFIED,
        message: str = "",
        retryable: bool = False,
        incarnation: int = 0,
    ) -> None:
        """End it, unless it has ended. A request whose every choice has ended is done, however its worker ends."""
        if self.ended.done():
            return
        if self._farewell is not None:
            self._farewell.cancel()
        self._flows = False
        if self.work.complete:
            kind = Kind.DONE
        if self.seat is not None and not incarnation:
            incarnation = self.seat.incarnation
        self.ended.set_result(End(kind, self.bound, incarnation, error, why, message, retryable))

    def _joined(self, fit: Fit, now: float) -> None:
        if fit is Fit.TAKEN:
            self._took(now)
        elif fit is not Fit.KNOWN:
            self._unfit(fit)

    def _took(self, now: float) -> None:
        if self.stages.first_token is None:
            self.stages.first_token = now
            self._flows = True
            self._span.add_event("first_token")
        self.stages.last_token = now
        self._tell_stops()
        if self._farewell is None and self.work.complete:
            self._farewell = asyncio.get_running_loop().call_later(_FAREWELL_S, self._part)

    def _part(self) -> None:
        self.end(Kind.DONE)

    def _tell_stops(self) -> None:
        stops = self.work.stops()
        if self.seat is not None and len(stops) > self._stops_told:
            for stop in stops[self._stops_told :]:
                self.seat.stop(self, stop)
            self._stops_told = len(stops)

    def _unfit(self, fit: Fit) -> None:
        """A gap may be a lost batch: ask for a replay once. What differs from the transcript no replay can mend."""
        if fit is Fit.GAP and self._gap is _Gap.NONE and self.seat is not None:
            self._gap = _Gap.ASKED
            self.seat.resync("a run does not join on")
        elif fit is Fit.DIVERGED or self._gap is _Gap.REPLAYED:
            self.end(Kind.UNFIT, message=f"its tokens do not join on ({fit.value})")
