from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable

import redis
from opentelemetry.context import Context
from opentelemetry.trace import Link, StatusCode, set_span_in_context

from shared import keys, tracing
from shared.config import TracingConfig
from shared.ids import Identity
from shared.tracing import Tracing, extract, inject, setup
from tests.fakes.otlp import OtlpReceiver

ME = Identity("gateway", "g0", 1)


def to_store(url: str, seed: int = 0) -> Tracing:
    return setup(TracingConfig(redis_spans=True), ME, url, rng=random.Random(seed))


def lost(to: str) -> float:
    return tracing._lost.labels(to)._value.get()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_spans_reach_a_collector_with_service_names_and_parents(otlp: OtlpReceiver) -> None:
    traces = setup(TracingConfig(otlp_endpoint=otlp.endpoint), ME, None)
    with traces.tracer.start_as_current_span("chat smollm2") as root, traces.tracer.start_as_current_span("admit"):
        root.set_attribute("gen_ai.request.model", "smollm2")
    by_name = {span.name: (service, span) for service, span in otlp.spans(2)}
    assert {service for service, _ in by_name.values()} == {"trunkline-gateway"}
    assert by_name["admit"][1].parent_span_id == by_name["chat smollm2"][1].span_id
    traces.shutdown()


def test_spans_reach_the_store_in_the_form_that_the_waterfall_reads(redis_url: str) -> None:
    traces = to_store(redis_url)
    with traces.tracer.start_as_current_span("other") as other:
        pass
    with (
        traces.tracer.start_as_current_span("root", links=[Link(other.get_span_context())]) as root,
        traces.tracer.start_as_current_span("child") as child,
    ):
        child.add_event("first_token", {"n": 1}, timestamp=1_000_000)
        child.set_attribute("steps", 3)
        child.set_status(StatusCode.ERROR)
    traces.shutdown()
    trace_id = f"{root.get_span_context().trace_id:032x}"
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        rows = {row["name"]: row for row in map(json.loads, client.lrange(keys.trace(trace_id), 0, -1))}
        assert 3500 < client.ttl(keys.trace(trace_id)) <= tracing.TRACE_TTL_S
    assert rows["child"] == rows["child"] | {
        "service": "g0",
        "role": "gateway",
        "parent_id": rows["root"]["span_id"],
        "status": "ERROR",
        "attrs": {"steps": 3},
        "events": [{"name": "first_token", "at_us": 1000, "attrs": {"n": 1}}],
        "links": [],
    }
    context = other.get_span_context()
    assert rows["root"]["links"] == [f"{context.trace_id:032x}:{context.span_id:016x}"]
    assert rows["root"]["parent_id"] is None
    assert rows["root"]["start_us"] <= rows["child"]["start_us"] <= rows["child"]["end_us"] <= rows["root"]["end_us"]


def test_a_trace_in_the_store_is_bounded(redis_url: str) -> None:
    traces = to_store(redis_url)
    with traces.tracer.start_as_current_span("root") as root:
        for _ in range(tracing.MAX_SPANS + 50):
            traces.tracer.start_span("step").end()
    traces.shutdown()
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen(keys.trace(f"{root.get_span_context().trace_id:032x}")) == tracing.MAX_SPANS


def test_an_unsampled_trace_is_exported_nowhere_and_its_callers_decision_is_followed(redis_url: str) -> None:
    traces = setup(TracingConfig(redis_spans=True, sample_ratio=0.0), ME, redis_url)
    with traces.tracer.start_as_current_span("not wanted"):
        pass
    asked = extract("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03")
    with traces.tracer.start_as_current_span("wanted", context=asked):
        pass
    traces.shutdown()
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.keys("tl:trace:*") == ["tl:trace:0af7651916cd43dd8448eb211c80319c"]


def test_the_same_random_source_makes_the_same_ids() -> None:
    def ids(seed: int) -> tuple[int, int]:
        traces = setup(TracingConfig(), ME, None, rng=random.Random(seed))
        context = traces.tracer.start_span("x").get_span_context()
        return context.trace_id, context.span_id

    assert ids(1) == ids(1) != ids(2)


def test_a_context_survives_the_wire_and_nonsense_becomes_none() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03"
    assert inject(extract(traceparent, "vendor=1")) == (traceparent, "vendor=1")
    assert inject(extract(traceparent)) == (traceparent, "")
    for nonsense in ("", "x", "00-0-0-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01", traceparent[:-3]):
        assert inject(extract(nonsense)) == ("", "")
    assert inject(Context()) == ("", "")
    span = to_nowhere().tracer.start_span("x")
    assert inject(span) == inject(set_span_in_context(span, Context()))


def to_nowhere() -> Tracing:
    return setup(TracingConfig(), ME, None)


def test_a_collector_that_never_answers_holds_up_neither_spans_nor_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        before = lost("otlp")
        traces = setup(TracingConfig(otlp_endpoint=f"127.0.0.1:{silent.getsockname()[1]}"), ME, None)
        began = time.monotonic()
        for _ in range(5000):
            traces.tracer.start_span("x").end()
        assert time.monotonic() - began < 2.0
        began = time.monotonic()
        traces.shutdown()
        assert time.monotonic() - began < 5.0
        until(lambda: lost("otlp") == before + 5000)


def test_spans_past_the_bound_are_counted_and_lost(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(tracing, "MAX_WAITING", 10)
    monkeypatch.setattr(tracing, "EXPORT_EVERY_S", 60)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = lost("store")
        traces = to_store(f"redis://127.0.0.1:{silent.getsockname()[1]}")
        for _ in range(25):
            traces.tracer.start_span("x").end()
        assert lost("store") == before + 15
        traces.shutdown()
        until(lambda: lost("store") == before + 25)


def test_spans_ended_after_the_shutdown_are_counted_and_lost(redis_url: str) -> None:
    traces = to_store(redis_url)
    late = traces.tracer.start_span("late")
    traces.shutdown()
    before = lost("store")
    late.end()
    assert lost("store") == before + 1
