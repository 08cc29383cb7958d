from __future__ import annotations

from prometheus_client import REGISTRY

from shared import logging, metrics, state, tracing


def test_conventional_histograms_have_their_prometheus_names_and_published_buckets() -> None:
    duration = metrics.gen_ai("gen_ai.test.request.duration", "x", metrics.DURATION_BUCKETS, ("model",))
    tokens = metrics.gen_ai("gen_ai.test.token.usage", "x", metrics.TOKEN_BUCKETS)
    try:
        duration.labels("m").observe(0.015)
        tokens.observe(5)
        text = metrics.exposition().decode()
        assert 'gen_ai_test_request_duration_seconds_bucket{le="0.02",model="m"} 1.0' in text
        assert 'gen_ai_test_request_duration_seconds_bucket{le="81.92",model="m"} 1.0' in text
        assert 'gen_ai_test_token_usage_bucket{le="16.0"} 1.0' in text
        assert 'gen_ai_test_token_usage_bucket{le="6.7108864e+07"} 1.0' in text
    finally:
        REGISTRY.unregister(duration)
        REGISTRY.unregister(tokens)


def test_every_process_says_what_it_loses() -> None:
    text = metrics.exposition().decode()
    lost = {logging: "log_lines_lost", tracing: "spans_lost", state: "state_writes_dropped"}
    for module, name in lost.items():
        assert f"# HELP trunkline_{name}_total" in text, f"{module.__name__} does not say it"
