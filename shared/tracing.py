"""Traces: one per request over every hop.

The one rule: no prompt text and no token ids in names, attributes or events. Exporting runs on threads of its own,
behind bounded queues: a span costs the loop microseconds and never waits.
"""

from __future__ import annotations

from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

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
