"""What is told of a request at its end."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import INVALID_SPAN
from prometheus_client import REGISTRY

from gateway.custody import OwnerMoved
from gateway.telemetry import MOVED, Story, Telemetry
from trunkline.common.v1 import common_pb2

MODEL = "told"


def story(**fields: Any) -> Story:
    usage = common_pb2.Usage(prompt_tokens=7, completion_tokens=5)
    receipt = common_pb2.Receipt(total_ms=20.0, attempts=1)
    given = {"state": "FINISHED", "error": None, "reason": "stop", "to_first_s": 0.01, "between_s": 0.001, **fields}
    return Story("id", "chat", MODEL, "v1", "t", "k", usage=usage, receipt=receipt, **given)


def sample(name: str, **labels: str) -> float:
    found = {"gen_ai_operation_name": "chat", "gen_ai_request_model": MODEL, **labels}
    return sum(
        each.value
        for metric in REGISTRY.collect()
        for each in metric.samples
        if each.name == name and found.items() <= each.labels.items()
    )


def test_tokens_and_times_of_a_request_that_moved_are_counted_once_by_who_finishes_it() -> None:
    Telemetry().told(INVALID_SPAN, story(state=MOVED, error=OwnerMoved(), reason="OWNER_MOVED"))
    assert sample("gen_ai_client_token_usage_count") == 0
    assert sample("gen_ai_client_operation_duration_seconds_count") == 0
    assert sample("trunkline_gateway_requests_total", outcome="OWNER_MOVED") == 1
    Telemetry().told(INVALID_SPAN, story())
    assert sample("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 5
    assert sample("gen_ai_client_operation_duration_seconds_count") == 1
    assert sample("trunkline_gateway_requests_total", outcome="ok") == 1
