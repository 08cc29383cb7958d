"""What a gateway tells of its requests: one trace, one line, bounded metrics, and never what was written."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from prometheus_client.parser import text_string_to_metric_families

from shared import metrics
from shared.config import TracingConfig
from shared.errors import TrunklineError
from tests.fakes import mesh as fake
from tests.fakes.gateway_client import Client, expected, first_token, rest, spec, until, world
from tests.fakes.otlp import OtlpReceiver
from trunkline.inference.v1 import inference_pb2 as pb

SECRET_TEXT = "a secret nobody may log"
PARENT = "00-11111111111111111111111111111111-2222222222222222-01"


def attributes(span: trace_pb2.Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in span.attributes}


def by_name(receiver: OtlpReceiver, count: int) -> dict[str, trace_pb2.Span]:
    return {span.name: span for _, span in receiver.spans(count)}


def samples() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def with_parent(client: Client, asked: pb.GenerationSpec) -> Any:
    metadata = (*client.metadata, ("traceparent", PARENT))
    return client.stub.Generate(pb.GenerateRequest(spec=asked), metadata=metadata, timeout=20)


async def test_a_request_is_one_trace_that_continues_the_clients_with_gen_ai_names_and_no_text(
    redis_url: str, tmp_path: Path, otlp: OtlpReceiver
) -> None:
    tracing = TracingConfig(otlp_endpoint=otlp.endpoint)
    async with world(redis_url, tmp_path, tracing=tracing) as (client, (router,), _):
        call = await with_parent(client, spec(SECRET_TEXT, max_tokens=4))
        said = await first_token(call)
        await rest(call, said)
        spans = await asyncio.to_thread(by_name, otlp, 6)
        root = spans[f"text_completion {fake.MODEL}"]
        server = spans["trunkline.inference.v1.InferenceService/Generate"]
        assert {span.trace_id.hex() for span in spans.values()} == {"1" * 32}
        assert server.parent_span_id.hex() == "2" * 16
        assert root.parent_span_id == server.span_id
        assert {"auth", "tokenise", "admit", "attempt 1"} <= spans.keys()
        assert [event.name for event in spans["attempt 1"].events] == ["opened", "first_token"]
        sent = router.requests[0].submission
        assert sent.traceparent.split("-")[1:3] == ["1" * 32, spans["attempt 1"].span_id.hex()]
        shown = attributes(root)
        assert said.started is not None
        assert said.finished is not None
        assert shown["gen_ai.request.model"] == fake.MODEL
        assert shown["gen_ai.usage.output_tokens"] == 4
        assert shown["gen_ai.response.id"] == said.started.request_id
        assert shown["trunkline.receipt.total_ms"] == said.finished.receipt.total_ms
        assert said.started.trace_id == said.finished.receipt.trace_id == "1" * 32
        everything = b"".join(span.SerializeToString() for span in spans.values())
        assert b"secret" not in everything


async def test_a_client_that_leaves_is_recorded_as_cancelled_everywhere(
    redis_url: str, tmp_path: Path, otlp: OtlpReceiver
) -> None:
    fakes = {"lengths": (10**6,)}
    tracing = TracingConfig(otlp_endpoint=otlp.endpoint)
    async with world(redis_url, tmp_path, fakes=fakes, tracing=tracing) as (client, _, (worker,)):
        call = client.generate(spec((5, 6, 7)))
        await first_token(call)
        call.cancel()
        await until(lambda: worker.cancels)
        spans = await asyncio.to_thread(by_name, otlp, 6)
        assert attributes(spans[f"text_completion {fake.MODEL}"])["error.type"] == "CLIENT_GONE"
        assert attributes(spans["attempt 1"])["error.type"] == "CANCELLED"
        server = attributes(spans["trunkline.inference.v1.InferenceService/Generate"])
        assert server["rpc.response.status_code"] == "CANCELLED"


async def test_every_request_writes_one_line_without_its_text(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="trunkline.request"):
        async with world(redis_url, tmp_path) as (client, _, _):
            said = await client.stream(spec(SECRET_TEXT))
            with pytest.raises(TrunklineError):
                await client.stream(spec(SECRET_TEXT, max_tokens=0))
            await until(lambda: len(caplog.records) >= 2)
    lines = [getattr(record, "trunkline_fields", {}) for record in caplog.records if record.name == "trunkline.request"]
    assert [(line["state"], line["reason"]) for line in lines] == [("FINISHED", "stop"), ("FAILED", "BAD_FIELD")]
    assert said.started is not None
    assert lines[0]["request_id"] == said.started.request_id
    assert (lines[0]["completion_tokens"], lines[0]["attempts"], lines[0]["worker"]) == (8, 1, "w1")
    assert "secret" not in str(lines)
    assert said.texts[0] not in str(lines)


async def test_metrics_count_outcomes_by_names_that_are_bounded(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        before = samples()
        await client.stream(spec((5, 6, 7)))
        for model in ("made up", "by a client"):
            asked = spec((5,))
            asked.model = model
            with pytest.raises(TrunklineError):
                await client.stream(asked)
        call = (("gen_ai_operation_name", "text_completion"),)

        def grown(name: str, **labels: str) -> float:
            key = name, tuple(sorted((*call, *labels.items())))
            return samples().get(key, 0.0) - before.get(key, 0.0)

        await until(
            lambda: grown("trunkline_gateway_requests_total", gen_ai_request_model=fake.MODEL, outcome="ok") == 1
        )
        refused = {"gen_ai_request_model": "", "outcome": "MODEL_UNKNOWN"}
        assert grown("trunkline_gateway_requests_total", **refused) == 2
        usage = {"gen_ai_request_model": fake.MODEL, "gen_ai_token_type": "output"}
        assert grown("gen_ai_client_token_usage_sum", **usage) == 8
        duration = {"gen_ai_request_model": fake.MODEL, "error_type": ""}
        assert grown("gen_ai_client_operation_duration_seconds_count", **duration) == 1
        assert not [labels for _, labels in samples() if "made up" in dict(labels).values()]


async def test_the_event_loop_is_not_blocked_by_long_prompts(redis_url: str, tmp_path: Path, unblocked: None) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        long = " the quick brown fox" * 20_000
        streams = [asyncio.create_task(client.stream(spec((5, 6, number)))) for number in range(20)]
        with pytest.raises(TrunklineError):
            await client.stream(spec(long))
        for number, stream in enumerate(streams):
            assert (await stream).texts == {0: expected((5, 6, number), 0, 8)}
        with pytest.raises(grpc.aio.AioRpcError):
            await client.generate(spec(" the" * 2_000_000)).read()
