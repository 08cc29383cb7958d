"""The attempts of a request: submit, wait for its end, and go round again as its course says.

Owns Submit calls. The one rule: a Submit call lives exactly as long as its attempt. It is not broken off when a worker
opens the attempt before the router answers: the router would take that for a cancel.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from opentelemetry import trace

from gateway.attempt import Attempt, End, Kind, Work
from gateway.course import Course, CourseLimits, MoveBudget
from gateway.links import Links
from gateway.receipt import Stages
from gateway.routers import Routers
from gateway.transport import PeerLost, Transport
from shared.clock import Clock
from shared.errors import TrunklineError
from shared.ids import Rng
from shared.tracing import inject
from shared.wire import Stamp
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

_GRACE_S = 1.0  # the owner's own deadline comes first; the call's is a backup


class Errand(Protocol):
    """A request, as its attempts see it."""

    raw_id: bytes
    lane: worker_pb2.Lane
    stages: Stages
    span: trace.Span

    @property
    def work(self) -> Work:
        """What is to be completed."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens (or bytes) that came so far: the measure of progress."""
        ...

    @property
    def epoch(self) -> int:
        """How often another gateway has taken it over, plus one."""
        ...

    def remaining_s(self) -> float:
        """Seconds left."""
        ...

    def submission(self, stamp: Stamp) -> router_pb2.SubmitRequest:
        """What to submit now, emitted tokens included; budget, exclusions and trace are filled in here."""
        ...

    async def queued(self, attempt: Attempt) -> None:
        """A new attempt begins; nothing of it is submitted before this returns."""
        ...

    def bound(self, attempt: Attempt) -> None:
        """A worker has opened the attempt."""
        ...

    async def renew(self) -> None:
        """The version is gone: resolve, render and tokenise anew."""
        ...


class Upstream:
    """Runs errands to their ends. `retries` counts attempts after the first, over all requests."""

    def __init__(
        self,
        transport: Transport,
        routers: Routers,
        links: Links,
        tracer: trace.Tracer,
        clock: Clock,
        rng: Rng,
        *,
        budget: MoveBudget,
        limits: CourseLimits,
    ) -> None:
        self.retries = 0
        self._transport = transport
        self._routers = routers
        self._links = links
        self._tracer = tracer
        self._clock = clock
        self._rng = rng
        self._budget = budget
        self._limits = limits
        self._waiting: dict[Attempt, str] = {}  # for an answer of the router at this address
        routers.on_lost(self._router_lost)

    async def execute(self, errand: Errand) -> None:
        """Return when the work is complete; raises the TrunklineError it ends with. Cancelled, cancels the worker."""
        course = Course(self._limits, self._budget, self._rng, errand.epoch)
        while not errand.work.complete:
            end = await self._attempt(errand, course)
            if end.kind is Kind.DONE:
                return
            again = course.after(end, tokens=errand.tokens, routers=max(1, len(self._routers.usable())))
            errand.stages.migrations = course.migrations
            self.retries += 1
            if again.renew:
                await errand.renew()
            await asyncio.sleep(again.after_s)

    async def _attempt(self, errand: Errand, course: Course) -> End:
        stamp = course.begin()
        span = self._tracer.start_span(f"attempt {stamp[1]}", context=trace.set_span_in_context(errand.span))
        stages = errand.stages.attempt_began(self._clock.monotonic())
        attempt = Attempt(errand.raw_id, stamp, errand.lane, errand.work, stages, span, errand.bound)
        try:
            await errand.queued(attempt)
            request = errand.submission(stamp)
            request.excluded.extend(course.excluded)
            request.submission.traceparent, request.submission.tracestate = inject(span)
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                end = await self._run(errand, course, attempt, request)
            _describe(span, end)
            return end
        except asyncio.CancelledError:
            span.set_attribute("error.type", "CANCELLED")
            raise
        finally:
            span.end()

    async def _run(self, errand: Errand, course: Course, attempt: Attempt, request: router_pb2.SubmitRequest) -> End:
        self._links.enter(attempt)
        submit = asyncio.create_task(self._submit(errand, course, attempt, request))
        try:
            await asyncio.wait((submit, attempt.ended), return_when=asyncio.FIRST_COMPLETED)
            if submit.done():
                submit.result()  # a fault of ours; refusals have ended the attempt
            return await attempt.ended
        finally:
            submit.cancel()
            self._links.leave(attempt)

    async def _submit(
        self, errand: Errand, course: Course, attempt: Attempt, request: router_pb2.SubmitRequest
    ) -> None:
        address = self._routers.next(course.refusers)
        if address is None:
            attempt.end(Kind.UNREACHED, message="no router is known")
            return
        remaining_s = errand.remaining_s()
        request.submission.budget_ms = max(1, round(remaining_s * 1000))
        self._waiting[attempt] = address
        try:
            response = await self._transport.submit(address, request, remaining_s + _GRACE_S)
        except PeerLost as lost:
            self._routers.failed(address)
            self._refused(attempt, Kind.UNREACHED, message=str(lost))
        except TrunklineError as error:
            course.refusers.add(address)
            self._refused(attempt, Kind.REFUSED, error=error)
        else:
            attempt.stages.router_queue_ms = response.queue_ms
            self._links.expect(attempt, response)
        finally:
            del self._waiting[attempt]

    def _router_lost(self, address: str) -> None:
        """Whom it leaves without an answer goes to another router; where there is none, it may yet wake up."""
        if not any(other != address for other in self._routers.usable()):
            return
        for attempt, asked in list(self._waiting.items()):
            if asked == address:
                self._refused(attempt, Kind.UNREACHED, message="the router is silent")

    def _refused(self, attempt: Attempt, kind: Kind, *, error: TrunklineError | None = None, message: str = "") -> None:
        """After Opened the call's own result means nothing."""
        if not attempt.bound:
            attempt.end(kind, error=error, message=message)


def _describe(span: trace.Span, end: End) -> None:
    """How the attempt ended, on its span."""
    span.set_attribute("trunkline.attempt.end", end.kind.value)
    if end.kind is not Kind.DONE:
        span.set_attribute("error.type", end.error.reason.value if end.error else end.kind.name)
        span.set_status(trace.StatusCode.ERROR)
