"""Traces: one per request over every hop.

The one rule: no prompt text and no token ids in names, attributes or events. Exporting runs on threads of its own,
behind bounded queues: a span costs the loop microseconds and never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import redis
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared import keys
from shared.config import TracingConfig
from shared.ids import Identity

TRACE_TTL_S: Final = 3600
MAX_SPANS: Final = 4000
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
        """Export what is left, for at most a few seconds."""
        self._provider.shutdown()


def setup(config: TracingConfig, identity: Identity, store_url: str | None) -> Tracing:
    """The process's tracing. `store_url`: the state store, for `redis_spans`."""
    resource = Resource.create(
        {"service.name": f"trunkline-{identity.role}", "service.instance.id": identity.id, "service.version": "1"}
    )
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)))
    if config.otlp_endpoint:
        provider.add_span_processor(_batched(OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=True)))
    if config.redis_spans and store_url:
        provider.add_span_processor(_batched(StoreSpanExporter(store_url)))
    return Tracing(provider)


def _batched(exporter: SpanExporter) -> BatchSpanProcessor:
    return BatchSpanProcessor(exporter, max_queue_size=8192, schedule_delay_millis=200, max_export_batch_size=512)


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
