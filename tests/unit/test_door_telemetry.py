"""Spans and metrics of a worker, from a door that works."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from tests.fakes.door_world import Gateway, World, request_id
from tests.fakes.owner import submission
from trunkline.worker.v1 import worker_pb2
from workers.metrics import Gauges, Metrics
from workers.observers import Observers
from workers.spans import Spans

ONE, TWO = request_id(1), request_id(2)
PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8


def traced() -> tuple[World, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    world = World(observe=lambda clock: Observers(Metrics("nothing", clock), Spans(provider.get_tracer("t"), clock)))
    return world, exporter


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def milliseconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return round((span.end_time - span.start_time) / 1e6, 3)


def run(world: World, *subs: worker_pb2.Submission, steps: int = 8) -> Gateway:
    gateway = Gateway(world)
    gateway.connect()
    for sub in subs:
        gateway.expect(sub)
        world.submit(sub)
    for _ in range(steps):
        world.step()
        gateway.read()
    return gateway


def test_stages_stand_end_to_end_with_the_engines_own_durations() -> None:
    world, exporter = traced()
    run(world, submission(ONE, traceparent=f"{PARENT}-01", max_tokens=5))
    spans = exporter.get_finished_spans()
    stages = [named(spans, f"worker.{stage}")[0] for stage in ("queue", "prefill", "decode")]
    assert [milliseconds(span) for span in stages] == [0.0, 10.0, 40.0]
    assert all(span.parent is not None and f"{span.parent.span_id:016x}" == "cd" * 8 for span in spans)
    assert stages[-1].attributes is not None
    assert stages[-1].attributes["trunkline.outcome"] == "finished"


def test_a_cancelled_request_is_recorded_as_cancelled_in_the_stage_it_had_reached() -> None:
    world, exporter = traced()
    sub = submission(ONE, traceparent=f"{PARENT}-01", max_tokens=50)
    world.submit(sub)
    world.clock.advance(0.02)
    world.door.routers.cancel(ONE, (1, 1))
    (span,) = exporter.get_finished_spans()
    assert (span.name, milliseconds(span)) == ("worker.queue", 20.0)
    assert span.attributes is not None
    assert span.attributes["error.type"] == "CANCELLED"


def test_a_few_steps_are_drawn_with_links_to_every_traced_request_in_them() -> None:
    world, exporter = traced()
    subs = [submission(each, traceparent=f"{PARENT}-01", max_tokens=33) for each in (ONE, TWO)]
    run(world, *subs, steps=40)
    steps = named(exporter.get_finished_spans(), "engine.step")
    assert 4 <= len(steps) <= 8
    assert {len(span.links) for span in steps} == {2}


def test_requests_that_are_not_traced_leave_no_spans() -> None:
    world, exporter = traced()
    run(world, submission(ONE), submission(TWO, traceparent=f"{PARENT}-00"))
    assert not exporter.get_finished_spans()


def test_scraped_gauges_follow_the_load() -> None:
    world, _ = traced()
    registry = CollectorRegistry()
    registry.register(Gauges(world.door, "nothing"))
    run(world, submission(ONE, prompt=[1] * 20, emitted=[(), ()], max_tokens=50), steps=3)
    text = generate_latest(registry).decode()
    assert 'vllm:num_requests_running{engine="0",model_name="nothing"} 2.0' in text
    assert "trunkline_worker_requests 1.0" in text
    assert "trunkline_worker_kv_tokens_reserved 120.0" in text


def test_the_wait_for_a_step_under_way_counts_as_waiting_in_the_worker() -> None:
    world, exporter = traced()
    gateway = Gateway(world)
    gateway.connect()
    sub = submission(ONE, traceparent=f"{PARENT}-01", max_tokens=1)
    gateway.expect(sub)
    world.submit(sub)
    world.clock.advance(0.5)  # the engine is in a long step and reads its messages only after it
    world.step(3)
    gateway.read()
    (waited,) = named(exporter.get_finished_spans(), "worker.queue")
    assert milliseconds(waited) == 500.0
