"""Traces: one per request over every hop.

The one rule: no prompt text and no token ids in names, attributes or events. Exporting runs on threads of its own,
behind bounded queues: a span costs the loop microseconds and never waits; what cannot be exported is counted and lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import redis
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import Counter

from shared import keys
from shared.config import TracingConfig
from shared.ids import BUILD, SYSTEM_RNG, Identity, Rng

TRACE_TTL_S: Final = 3600
MAX_SPANS: Final = 4000
MAX_WAITING: Final = 8192  # spans that wait to be exported, per exporter
BATCH: Final = 512
EXPORT_EVERY_S: Final = 0.2
EXPORT_TIMEOUT_S: Final = 2.0
_lost: Final = Counter("trunkline_spans_lost_total", "Spans that could not be exported.", ["to"])
_W3C: Final = TraceContextTextMapPropagator()


def extract(traceparent: str, tracestate: str = "") -> Context:
    """The context a caller sent; an empty one where there is none or it is malformed."""
    if not traceparent:
        return Context()
    carrier = {"traceparent": traceparent}
    if tracestate:
        carrier["tracestate"] = tracestate
    return _W3C.extract(carrier, Context())


def inject(source: Context | trace.Span) -> tuple[str, str]:
    """(traceparent, tracestate) of a context or span; empty strings where it has no trace."""
    span = source if isinstance(source, trace.Span) else trace.get_current_span(source)
    context = span.get_span_context()
    if not context.is_valid:
        return "", ""
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    return traceparent, context.trace_state.to_header()


class Tracing:
    """One process's tracer and what it exports to."""

    def __init__(self, provider: TracerProvider) -> None:
        self.tracer: Final = provider.get_tracer("trunkline")
        self._provider = provider

    def shutdown(self) -> None:
        """Export what is left, for at most 2 s per exporter; blocks, so call it when the loop has ended."""
        self._provider.shutdown()


def setup(config: TracingConfig, identity: Identity, store_url: str | None, *, rng: Rng = SYSTEM_RNG) -> Tracing:
    """The process's tracing. `store_url`: the state store, for `redis_spans`."""
    resource = Resource.create(
        {"service.name": f"trunkline-{identity.role}", "service.instance.id": identity.id, "service.version": BUILD}
    )
    provider = TracerProvider(
        resource=resource,
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        id_generator=_Ids(rng),
        shutdown_on_exit=False,
    )
    if config.otlp_endpoint:
        exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=True, timeout=EXPORT_TIMEOUT_S)
        provider.add_span_processor(Exporting(exporter, "otlp"))
    if config.redis_spans and store_url:
        provider.add_span_processor(Exporting(StoreSpanExporter(store_url), "store"))
    return Tracing(provider)


class _Ids(IdGenerator):
    """Ids from a random source that is an argument."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def generate_span_id(self) -> int:
        return self._rng.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self._rng.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True


class Exporting(SpanProcessor):
    """Hands ended spans to an exporter from a thread of its own.

    Beside the SDK's own batching processor this one ends in bounded time with a collector that does not answer, counts
    what is lost instead of logging a line a span, and has nothing to do with forks.
    """

    def __init__(self, exporter: SpanExporter, to: str) -> None:
        self._exporter = exporter
        self._to = to
        self._waiting: deque[ReadableSpan] = deque()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"spans-{to}", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span to be exported; past the bound it is lost."""
        if self._ending.is_set() or len(self._waiting) >= MAX_WAITING:
            _lost.labels(self._to).inc()
            return
        self._waiting.append(span)

    def shutdown(self) -> None:
        """Export what waits, for at most EXPORT_TIMEOUT_S."""
        self._ending.set()
        self._thread.join(EXPORT_TIMEOUT_S)
        _lost.labels(self._to).inc(len(self._waiting))
        self._waiting.clear()
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Not offered: spans leave by themselves within EXPORT_EVERY_S."""
        return False

    def _run(self) -> None:
        while not self._ending.wait(EXPORT_EVERY_S):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                _lost.labels(self._to).inc(len(batch))


class StoreSpanExporter(SpanExporter):
    """Spans as JSON in the state store, one list a trace, for development. Runs on the processor's thread."""

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Append the spans to their traces' lists; a store that is away costs them."""
        by_trace: dict[str, list[bytes]] = {}
        for span in spans:
            if span.context is not None:
                by_trace.setdefault(f"{span.context.trace_id:032x}", []).append(msgspec.json.encode(span_record(span)))
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                for trace_id, rows in by_trace.items():
                    key = keys.trace(trace_id)
                    pipe.rpush(key, *rows)
                    pipe.ltrim(key, -MAX_SPANS, -1)
                    pipe.expire(key, TRACE_TTL_S)
                pipe.execute()
        except redis.RedisError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the connection."""
        self._redis.close()


def span_record(span: ReadableSpan) -> dict[str, Any]:
    """A span as `trunkctl trace` reads it. Times in microseconds since the epoch."""
    assert span.context is not None, "an ended span has a context"
    assert span.start_time is not None, "an ended span has begun"
    assert span.end_time is not None, "only ended spans are exported"
    return {
        "name": span.name,
        "service": str(span.resource.attributes.get("service.instance.id", "")),
        "role": str(span.resource.attributes.get("service.name", "")).removeprefix("trunkline-"),
        "span_id": f"{span.context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_us": span.start_time // 1000,
        "end_us": span.end_time // 1000,
        "status": span.status.status_code.name,
        "attrs": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "at_us": event.timestamp // 1000, "attrs": dict(event.attributes or {})}
            for event in span.events
        ],
        "links": [f"{link.context.trace_id:032x}:{link.context.span_id:016x}" for link in span.links],
    }
