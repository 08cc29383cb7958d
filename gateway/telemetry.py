"""What is told of a request at its end: metrics, the root span's attributes, one log line.

The one rule: labels and attributes hold no prompt text, no token ids; labels only what is bounded (operations, models
that are served, reasons).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace
from prometheus_client import Counter, Gauge

from shared import metrics
from shared.errors import TrunklineError
from shared.logging import canonical
from trunkline.common.v1 import common_pb2

_log = logging.getLogger("trunkline.request")

_PROVIDER: Final = "trunkline"
_CALL: Final = ("gen_ai_operation_name", "gen_ai_request_model")

_usage = metrics.gen_ai(
    "gen_ai.client.token.usage", "Tokens of a request.", metrics.TOKEN_BUCKETS, (*_CALL, "gen_ai_token_type")
)
_duration = metrics.gen_ai(
    "gen_ai.client.operation.duration", "A request's time.", metrics.DURATION_BUCKETS, (*_CALL, "error_type")
)
_first = metrics.gen_ai(
    "gen_ai.client.operation.time_to_first_chunk", "To the first token.", metrics.FIRST_TOKEN_BUCKETS, _CALL
)
_between = metrics.gen_ai(
    "gen_ai.client.operation.time_per_output_chunk",
    "Mean time between tokens of a request.",
    metrics.PER_TOKEN_BUCKETS,
    _CALL,
)
_outcomes = Counter("trunkline_gateway_requests", "Requests by outcome.", (*_CALL, "outcome"))
_attempts = Counter("trunkline_gateway_attempts", "Attempts of requests that are over.", _CALL)
_migrations = Counter("trunkline_gateway_migrations", "Moves to another worker after the first token.", _CALL)

MOVED: Final = "MOVED"  # it is not over, another gateway owns it: what it comes to is told there

_Attribute = str | int | float | list[str]


@dataclass(frozen=True)
class Story:
    """A request at its end. `model` is empty where it is not one that is served; `asked` are gen_ai attributes."""

    request_id: str
    operation: str
    model: str
    version: str
    tenant: str
    key_id: str
    state: str
    error: TrunklineError | None
    reason: str
    usage: common_pb2.Usage
    receipt: common_pb2.Receipt
    to_first_s: float | None = None
    between_s: float | None = None
    asked: Mapping[str, _Attribute] = field(default_factory=dict)
    finishes: list[str] = field(default_factory=list)


class Telemetry:
    """Tells stories. `gauge` shows a number that is read when asked for."""

    def gauge(self, name: str, help_: str, read: Callable[[], float]) -> None:
        """A gauge `trunkline_gateway_<name>`; of several gateways in one process the last one shows."""
        gauge = _gauges.get(name)
        if gauge is None:
            gauge = _gauges[name] = Gauge(f"trunkline_gateway_{name}", help_)
        gauge.set_function(read)

    def refused(self, span: trace.Span, story: Story) -> None:
        """A request that was not admitted."""
        _outcomes.labels(story.operation, story.model, story.reason).inc()
        self._close(span, story, "request refused")

    def told(self, span: trace.Span, story: Story) -> None:
        """A request that was admitted is over."""
        call = (story.operation, story.model)
        _outcomes.labels(*call, story.reason if story.error else "ok").inc()
        _attempts.labels(*call).inc(story.receipt.attempts)
        _migrations.labels(*call).inc(story.receipt.migrations)
        if story.state != MOVED:
            self._observe(call, story)
        self._close(span, story, "request")

    def _observe(self, call: tuple[str, str], story: Story) -> None:
        """What counts once for a request, however many gateways it had."""
        _duration.labels(*call, story.reason if story.error else "").observe(story.receipt.total_ms / 1000)
        _usage.labels(*call, "input").observe(story.usage.prompt_tokens)
        _usage.labels(*call, "output").observe(story.usage.completion_tokens)
        if story.to_first_s is not None:
            _first.labels(*call).observe(story.to_first_s)
        if story.between_s is not None:
            _between.labels(*call).observe(story.between_s)

    def _close(self, span: trace.Span, story: Story, event: str) -> None:
        for name, value in {**_attributes(story), **story.asked}.items():
            span.set_attribute(name, value)
        if story.error is not None:
            span.set_attribute("error.type", story.reason)
            if story.error.row.http >= 500:
                span.set_status(trace.StatusCode.ERROR)
        span.end()
        canonical(_log, event, **_line(story))


_gauges: dict[str, Gauge] = {}


def _attributes(story: Story) -> dict[str, _Attribute]:
    found: dict[str, _Attribute] = {
        "gen_ai.operation.name": story.operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.response.id": story.request_id,
        "gen_ai.usage.input_tokens": story.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": story.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": story.usage.cached_tokens,
        "trunkline.state": story.state,
    }
    if story.model:
        found["gen_ai.request.model"] = found["gen_ai.response.model"] = story.model
        found["trunkline.version"] = story.version
    if story.finishes:
        found["gen_ai.response.finish_reasons"] = story.finishes
    if story.to_first_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = story.to_first_s
    return found | {f"trunkline.receipt.{name}": value for name, value in _receipt(story.receipt).items()}


def _receipt(receipt: common_pb2.Receipt) -> dict[str, _Attribute]:
    return {descriptor.name: value for descriptor, value in receipt.ListFields()}


def _line(story: Story) -> dict[str, object]:
    line: dict[str, object] = {
        "request_id": story.request_id,
        "operation": story.operation,
        "model": story.model,
        "version": story.version,
        "tenant": story.tenant,
        "key": story.key_id,
        "state": story.state,
        "reason": story.reason,
        "prompt_tokens": story.usage.prompt_tokens,
        "completion_tokens": story.usage.completion_tokens,
        "cached_tokens": story.usage.cached_tokens,
    }
    if story.error is not None:
        line["message"] = story.error.message
    if story.to_first_s is not None:
        line["to_first_ms"] = round(story.to_first_s * 1000, 3)
    return line | {
        name: round(value, 3) if isinstance(value, float) else value for name, value in _receipt(story.receipt).items()
    }
