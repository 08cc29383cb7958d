"""One request from acceptance to its one outcome: admission, attempts, record, settlement, telemetry.

Owns what generations and embeddings have in common. The one rule: everything taken is given back by `scope`: whatever
happens inside it, the worker is cancelled, the reservation settled and the terminal record written, each exactly once.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Literal, Self

from opentelemetry import trace

from gateway import receipt
from gateway.admission import KeyTaken, Reservation
from gateway.attempt import Attempt, Work
from gateway.auth import Principal
from gateway.custody import OwnerMoved
from gateway.ledger import Headroom
from gateway.parts import Parts
from gateway.receipt import Stages
from gateway.submission import Sender
from gateway.telemetry import MOVED, Story
from shared import rpc, tracing
from shared.errors import Reason, TrunklineError
from shared.ids import incarnation_text, new_request_id
from shared.wire import Stamp
from trunkline.common.v1 import common_pb2
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

_log = logging.getLogger(__name__)

Operation = Literal["chat", "text_completion", "embeddings"]
_EXPIRED_WITHIN_S: Final = 0.01  # a client whose deadline passes leaves at the same moment


class Request(ABC):
    """See the module. A subclass prepares the work and says what it came to."""

    lane: worker_pb2.Lane

    def __init__(
        self,
        parts: Parts,
        principal: Principal,
        model: str,
        *,
        operation: Operation,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
        raw_id: bytes | None = None,
    ) -> None:
        """`budget_ms`: the tightest the caller named, None if none; the server's own limits hold besides. `raw_id`: of
        a request that another gateway began."""
        self.raw_id = raw_id or new_request_id(parts.rng)  # 16 bytes
        self.principal = principal
        self.operation = operation
        self.model = model
        self.client_id = ""
        self.version = common_pb2.ModelVersion()
        self.state: common_pb2.RequestState = common_pb2.REQUEST_STATE_QUEUED
        self.error: TrunklineError | None = None
        self.ended = asyncio.Event()
        self.stages = Stages(parts.clock.monotonic())
        self.span = _root_span(parts.tracer, f"{operation} {model[:128]}", trace_parent)
        self.ran = False  # a worker had it
        self.seated = asyncio.Event()  # the same
        self.parts = parts
        self._stamp: Stamp = (1, 0)
        self.accepted_ms = parts.clock.wall_ms()
        self._ended_ms = 0
        self._deadline = self.stages.accepted + min(
            budget_ms or parts.limits.default_deadline_ms, parts.limits.max_deadline_ms
        ) / 1000  # fmt: skip
        self._reservation: Reservation | None = None
        self._task: asyncio.Task[None] | None = None
        self._attempt: Attempt | None = None
        self._cancel_reason: Reason | None = None
        self._left = False
        self._owned = False  # the store may say that it is owned here
        self.told_receipt: common_pb2.Receipt | None = None  # as the caller got it

    # What a subclass says.

    @property
    @abstractmethod
    def work(self) -> Work:
        """What is to be completed; there once `_prepare` is done."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Progress: tokens that came so far."""

    @property
    @abstractmethod
    def usage(self) -> common_pb2.Usage:
        """What was read and made."""

    @abstractmethod
    async def _prepare(self) -> int:
        """Resolve, check, tokenise; the most tokens it may use. Raises TrunklineError."""

    @abstractmethod
    def submission(self, stamp: Stamp) -> router_pb2.SubmitRequest:
        """What to submit now."""

    @abstractmethod
    def _finish_word(self) -> str:
        """How a request that succeeded ended, for its record."""

    @abstractmethod
    def _ended(self) -> None:
        """It is over: wake who waits for it."""

    @abstractmethod
    def _story(self) -> Story:
        """What to tell of it at its end."""

    # What callers see.

    @property
    def id(self) -> str:
        """32 hexadecimal digits."""
        return self.raw_id.hex()

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self.span.get_span_context().trace_id:032x}"

    @property
    def headroom(self) -> Headroom | None:
        """What its admission left of the limits."""
        return self._reservation.headroom if self._reservation else None

    @asynccontextmanager
    async def scope(self) -> AsyncIterator[Self]:
        """Admit on entry (raises TrunklineError, and then nothing was taken); on exit cancel what is not over."""
        await self.admit()
        try:
            yield self
        finally:
            self._left = True
            self.cancel(Reason.CLIENT_GONE)
            self._tell_if_over()

    def cancel(self, reason: Reason) -> None:
        """End it now. Without effect once it is over."""
        if not self.ended.is_set() and self._task is not None:
            self._cancel_reason = self._cancel_reason or reason
            self._task.cancel()

    async def gone(self, within_s: float) -> bool:
        """Wait until no engine holds anything for it; False if that is not known in time."""
        try:
            async with asyncio.timeout(within_s):
                await self.ended.wait()
                if self._attempt is not None:
                    await self._attempt.freed.wait()
        except TimeoutError:
            return False
        return True

    def record(self) -> common_pb2.RequestRecord:
        """What is known of it now."""
        return common_pb2.RequestRecord(
            request_id=self.id,
            tenant=self.principal.tenant,
            model=self.model,
            version=self.version.version,
            state=self.state,
            gateway_id=self.parts.identity.id,
            worker_id=self.stages.last.worker,
            epoch=self._stamp[0],
            attempt=self._stamp[1],
            usage=self.usage,
            reason=self._reason(),
            trace_id=self.trace_id,
            accepted_at_ms=self.accepted_ms,
            ended_at_ms=self._ended_ms,
        )

    # What its attempts tell it.

    @property
    def epoch(self) -> int:
        """Its owner's epoch."""
        return self._stamp[0]

    def remaining_s(self) -> float:
        """Seconds left; not below 0."""
        return max(0.0, self._deadline - self.parts.clock.monotonic())

    async def queued(self, attempt: Attempt) -> None:
        """An attempt begins."""
        self._attempt, self._stamp = attempt, attempt.stamp
        self._move(common_pb2.REQUEST_STATE_QUEUED)

    def bound(self, attempt: Attempt) -> None:
        """A worker has it."""
        self.ran = True
        self.seated.set()
        self._move(common_pb2.REQUEST_STATE_RUNNING)

    async def renew(self) -> None:
        """The version is gone: do it all again for the one that is served now. The reservation stays."""
        await self._prepare()

    # Its life.

    async def admit(self) -> None:
        """Resolve, check, reserve, and run. Raises TrunklineError, KeyTaken; then nothing was taken."""
        with self.parts.table.entering():
            await self._admit()
        if self.client_id:
            self.parts.records.write_alias(self.principal.tenant, self.client_id, self.id)
        self._begin()

    async def _admit(self) -> None:
        try:
            async with asyncio.timeout(self.remaining_s()):
                self._check_door()
                most = await self._prepare()
                with self.stage("admit"):
                    await self._claim()
                    self._reservation = await self._reserve(most)
        except TimeoutError:
            expired = self._expired()
            self._refuse(expired)
            raise expired from None
        except asyncio.CancelledError:
            self._refuse(self._cancelled(Reason.CLIENT_GONE))
            raise
        except KeyTaken:
            self._abandon()
            self.span.end()
            raise
        except Exception as exc:
            self._refuse(exc if isinstance(exc, TrunklineError) else _internal())
            raise

    def _begin(self) -> None:
        """It is owned here, and runs."""
        self.parts.table.add(self)
        self._task = asyncio.get_running_loop().create_task(self._own(), context=self._context())
        self._task.add_done_callback(self._done)

    def _context(self) -> contextvars.Context | None:
        """Where it runs; None: in that of the call."""
        return None

    async def _claim(self) -> None:  # noqa: B027 - most have nothing to claim
        """What goes before the reservation."""

    def claims(self) -> tuple[str, bytes] | None:
        """The idempotency key and the hash of the body that it stands for."""
        return None

    def _abandon(self) -> None:
        """It was not admitted: leave nothing behind."""
        if self._owned:
            self.parts.custody.disown(self.id, self.principal.tenant)

    def _check_door(self) -> None:
        if self.parts.lifecycle.refusing:
            raise draining()
        if len(self.parts.table) >= self.parts.limits.max_in_flight:
            raise TrunklineError(
                Reason.QUEUE_FULL, "the gateway holds as many requests as it can", retry_after_s=1.0
            )  # fmt: skip

    async def _reserve(self, most: int) -> Reservation:
        """Reserve. A caller that leaves meanwhile gives back what is taken after it has left."""
        ttl_s = self.remaining_s() + 1.0
        self._owned = True
        owned = self.parts.custody.owned(self.id, self.principal.tenant)
        reserving = asyncio.get_running_loop().create_task(
            self.parts.admission.reserve(self.principal, self.model, self.id, most, ttl_s, owned, self.claims())
        )
        try:
            return await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(self._give_back)
            raise

    def _give_back(self, reserving: asyncio.Task[Reservation]) -> None:
        if not reserving.cancelled() and reserving.exception() is None:
            reserving.result().settle(0)
        self._abandon()

    async def _own(self) -> None:
        """Run its attempts to the one outcome."""
        try:
            async with asyncio.timeout(self.remaining_s()):
                await self.parts.upstream.execute(self)
            self._end(None)
        except TimeoutError:
            self._end(self._expired())
        except TrunklineError as error:
            self._end(error)
        except asyncio.CancelledError:
            self._end(self._cancelled(self._cancel_reason))
            raise
        except Exception:
            _log.exception("request %s failed", self.id)
            self._end(_internal())

    def _done(self, task: asyncio.Task[None]) -> None:
        """A task cancelled before its first step never came to its end."""
        if not self.ended.is_set():
            self._end(self._cancelled(self._cancel_reason))

    def _end(self, error: TrunklineError | None) -> None:
        self.error = error
        self._ended_ms = self.parts.clock.wall_ms()
        self.state = _state_after(error)
        moved = isinstance(error, OwnerMoved)
        if moved:
            self.parts.custody.leave(self.id)
            self.parts.records.forget(self.id)
        else:
            self._settle()
            self.parts.custody.disown(self.id, self.principal.tenant)
        self.parts.table.end(self, known=not moved)
        self.ended.set()
        self._ended()
        self._tell_if_over()

    def _settle(self) -> None:
        """Give back and write down: it ended here, and not at another gateway."""
        if self._reservation is not None:
            usage = self.usage
            self._reservation.settle(usage.prompt_tokens + usage.completion_tokens if self.ran else 0)
        self._write_record()

    def _tell_if_over(self) -> None:
        """The story is told once: when it is over and the caller has left."""
        if self._left and self.ended.is_set():
            self.parts.telemetry.told(self.span, self._story())

    def _refuse(self, error: TrunklineError) -> None:
        """It ends before it began."""
        self.error, self._left = error, True
        self.state = _state_after(error)
        self._abandon()
        self.parts.telemetry.refused(self.span, self._story())

    def _move(self, state: common_pb2.RequestState) -> None:
        self.state = state
        self._write_record()

    def _write_record(self) -> None:
        seat = self._attempt.seat if self._attempt is not None else None
        incarnation = incarnation_text(self.parts.identity.incarnation)
        self.parts.records.write(self.record(), incarnation=incarnation, worker=seat.incarnation if seat else 0)

    def _cancelled(self, reason: Reason | None) -> TrunklineError:
        """Why it was cancelled. A client's deadline and ours pass together: then it expired."""
        if reason is Reason.OWNER_MOVED:
            return OwnerMoved()
        if reason is Reason.CLIENT_GONE and self.remaining_s() <= _EXPIRED_WITHIN_S:
            return self._expired()
        return TrunklineError(reason or Reason.DRAINING, _CANCELLED[reason or Reason.DRAINING])

    def _expired(self) -> TrunklineError:
        if self.state == common_pb2.REQUEST_STATE_RUNNING:
            return TrunklineError(Reason.RUN_EXPIRED, "the deadline passed while the request ran")
        return TrunklineError(Reason.QUEUE_EXPIRED, "the deadline passed before the request ran")

    def _reason(self) -> str:
        if self.error is not None:
            return self.error.reason.value
        return self._finish_word() if self._ended_ms else ""

    def story(
        self,
        *,
        asked: Mapping[str, str | int | float | list[str]],
        finishes: Sequence[str] = (),
        to_first_s: float | None = None,
        between_s: float | None = None,
    ) -> Story:
        """The story, with what a subclass has to add."""
        return Story(
            request_id=self.id,
            operation=self.operation,
            model=self.version.model,
            version=self.version.version,
            tenant=self.principal.tenant,
            key_id=self.principal.key_id,
            state=MOVED if isinstance(self.error, OwnerMoved) else _STATES[self.state],
            error=self.error,
            reason=self._reason(),
            usage=self.usage,
            receipt=self.told_receipt or self.receipt(),
            asked=asked,
            finishes=list(finishes),
            to_first_s=to_first_s,
            between_s=between_s,
        )

    def receipt(self) -> common_pb2.Receipt:
        """Where the time went, until now."""
        return receipt.make(self.stages, self.parts.clock.monotonic(), self.trace_id)

    def sender(self, priority: int = 0, session_id: str = "", cache_salt: str = "") -> Sender:
        """Who submits."""
        most = self.principal.limits.max_priority
        identity, tenant = self.parts.identity, self.principal.tenant
        return Sender(identity, self.raw_id, tenant, min(priority, most), session_id, cache_salt)

    @contextmanager
    def stage(self, name: Literal["admit", "tokenise"]) -> Iterator[None]:
        """A stage of its own: a span, and time in the receipt."""
        began = self.parts.clock.monotonic()
        try:
            with self.parts.tracer.start_as_current_span(name, context=trace.set_span_in_context(self.span)):
                yield
        finally:
            spent = self.parts.clock.monotonic() - began
            if name == "admit":
                self.stages.admit_s += spent
            else:
                self.stages.tokenise_s += spent


_STATES: Final = {
    value.number: value.name.removeprefix("REQUEST_STATE_")
    for value in common_pb2.RequestState.DESCRIPTOR.values
}  # fmt: skip
_CANCELLED: Final = {
    Reason.CLIENT_GONE: "the client left",
    Reason.CLIENT_CANCEL: "the request was cancelled",
    Reason.SLOW_READER: "the client took nothing for too long",
    Reason.DRAINING: "the gateway ends",
}


def draining() -> TrunklineError:
    """What a draining gateway answers to whoever is new."""
    return TrunklineError(Reason.DRAINING, "the gateway is draining", retry_after_s=0.0)


def _state_after(error: TrunklineError | None) -> common_pb2.RequestState:
    if error is None:
        return common_pb2.REQUEST_STATE_FINISHED
    if error.reason in (Reason.CLIENT_GONE, Reason.CLIENT_CANCEL, Reason.SLOW_READER):
        return common_pb2.REQUEST_STATE_CANCELLED
    if error.reason in (Reason.QUEUE_EXPIRED, Reason.WOULD_MISS, Reason.RUN_EXPIRED):
        return common_pb2.REQUEST_STATE_EXPIRED
    return common_pb2.REQUEST_STATE_FAILED


def _root_span(tracer: trace.Tracer, name: str, trace_parent: tuple[str, str]) -> trace.Span:
    """The request's span: under the call's, else under what the caller sent, else the root of a new trace."""
    call = rpc.current()
    served = call is not None and call.span.get_span_context().is_valid
    context = trace.set_span_in_context(call.span) if call and served else tracing.extract(*trace_parent)
    return tracer.start_span(name, context=context)


def _internal() -> TrunklineError:
    return TrunklineError(Reason.INTERNAL, "internal error")
