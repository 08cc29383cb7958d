"""One submission on its way through the router: what it asks, until when, and who waits for its answer.

Owns the parsed request and its spans. The one rule: it ends once, by `succeed`, `fail` or `abandon`, and all
who joined it hear the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from opentelemetry import trace

from router import refusals
from router.policy import Candidate, Lane, Need
from shared.errors import Reason, TrunklineError, Violation
from shared.ids import incarnation_text
from shared.tracing import extract, inject
from shared.wire import Stamp
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

What = worker_pb2.Mismatch.What
MAX_BYTES: Final = (4 << 20) + (64 << 10)


class Submission:
    """Mutable state of one (id, e, a). Also what the queue orders (`router.queue.Queued`)."""

    def __init__(
        self,
        request: router_pb2.SubmitRequest,
        tracer: trace.Tracer,
        *,
        now: float,
        ttl_s: float,
        output_weight: float,
        hands_back: bool = True,
    ) -> None:
        """`hands_back`: its gateway goes to another router if this one drains."""
        sub = request.submission
        self.message = sub  # passed on as it is, but for the remaining budget and the trace context
        self.id = sub.request_id
        self.stamp: Stamp = (sub.epoch, sub.attempt)
        self.lane: Lane = (sub.artefact_hash, sub.tokenizer_hash)
        self.model = request.model
        self.tenant = request.tenant
        self.priority = sub.priority
        self.begun = any(choice.emitted for choice in sub.generate.choices)
        self.need = need_of(request)
        # Prefill and the longest possible output in tokens: what is known of the cost before the work is done.
        output = max(0, request.kv_tokens - request.prefill_tokens)
        self.cost = max(1, round(request.prefill_tokens + output_weight * output))
        self.size = sub.ByteSize()
        self.place = 0
        self.queued = True
        self.hands_back = hands_back
        self.waiters = 0
        self.arrived = now
        self.decided = now
        self.ends = now + sub.budget_ms / 1000
        self.expires = min(self.ends, now + ttl_s)
        self.holder = ""  # address of the worker that has admitted it
        self.timer: asyncio.TimerHandle | None = None
        self.stranded_since: float | None = None
        self.mismatches: dict[int, What] = {}
        self.answer: asyncio.Future[router_pb2.SubmitResponse] = asyncio.get_running_loop().create_future()
        self._tracer = tracer
        self._parent = extract(sub.traceparent, sub.tracestate)
        self._span = self._start_span("router.queue")

    def mismatched(self, incarnation: int, what: What) -> None:
        """That worker cannot serve it and is not asked again."""
        self.mismatches[incarnation] = what
        self.need = replace(self.need, excluded=self.need.excluded | {incarnation})

    def dispatched(self, candidate: Candidate, now: float) -> None:
        """It goes to a worker, under a span that is the parent of the worker's."""
        self.queued = False
        self.decided = now
        self._end_span("dispatched")
        self._span = self._start_span("router.dispatch")
        self._span.set_attribute("trunkline.worker.id", candidate.worker_id)
        self._span.set_attribute("trunkline.worker.incarnation", incarnation_text(candidate.incarnation))
        self._span.set_attribute("trunkline.router.score", candidate.score)
        self.message.budget_ms = max(1, round((self.ends - now) * 1000))
        self.message.traceparent, self.message.tracestate = inject(self._span)

    def returned(self, outcome: str) -> None:
        """It is in the queue again after a definite refusal, or because it was never written."""
        self.queued = True
        self._end_span(outcome)
        self._span = self._start_span("router.queue")

    def succeed(self, response: router_pb2.SubmitResponse) -> None:
        self._end_span("admitted")
        if not self.answer.done():
            self.answer.set_result(response)

    def fail(self, error: TrunklineError) -> None:
        """Ends it with an error, which nobody may be left to hear."""
        self._span.set_attribute("error.type", error.reason.value)
        self._end_span(error.reason.value)
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()

    def abandon(self) -> None:
        """Ends it without an answer: nobody waits for one."""
        self._span.set_attribute("error.type", "CANCELLED")
        self._end_span("abandoned")
        self.answer.cancel()

    def _start_span(self, name: str) -> trace.Span:
        if not trace.get_current_span(self._parent).get_span_context().is_valid:
            return trace.INVALID_SPAN
        attributes: dict[str, str | int] = {"trunkline.request.id": self.id.hex(), "trunkline.attempt": self.stamp[1]}
        return self._tracer.start_span(name, context=self._parent, attributes=attributes)

    def _end_span(self, outcome: str) -> None:
        """Ends the span there is, once."""
        self._span.set_attribute("trunkline.router.outcome", outcome)
        self._span.end()
        self._span = trace.INVALID_SPAN


def need_of(request: router_pb2.SubmitRequest) -> Need:
    """What a request asks of a worker."""
    sub = request.submission
    if sub.WhichOneof("work") == "encode":
        choices = len(sub.encode.inputs)
    else:
        choices = sum(not choice.finish for choice in sub.generate.choices)
    return Need(
        artefact=sub.artefact_hash,
        choices=choices,
        prefill_tokens=request.prefill_tokens,
        kv_tokens=request.kv_tokens,
        excluded=frozenset(request.excluded),
        preferred=tuple(request.preferred),
    )


def check(request: router_pb2.SubmitRequest) -> None:
    """Raises BAD_FIELD with everything in which the request does not keep to the protocol, or TOO_LARGE."""
    sub = request.submission
    rules = {
        "submission.request_id": (len(sub.request_id) == 16, "must be 16 bytes"),
        "submission.epoch": (sub.epoch >= 1, "must be at least 1"),
        "submission.attempt": (sub.attempt >= 1, "must be at least 1"),
        "submission.gateway_incarnation": (sub.gateway_incarnation != 0, "must be set"),
        "submission.work": (sub.WhichOneof("work") is not None, "must be set"),
        "submission.artefact_hash": (bool(sub.artefact_hash), "must be set"),
        "submission.budget_ms": (sub.budget_ms >= 1, "must be at least 1"),
    }
    violations = [Violation(name, text) for name, (kept, text) in rules.items() if not kept]
    if violations:
        raise TrunklineError(Reason.BAD_FIELD, "the submission is not valid", violations=violations)
    if sub.ByteSize() > MAX_BYTES:
        raise refusals.too_large(sub.ByteSize(), MAX_BYTES)
