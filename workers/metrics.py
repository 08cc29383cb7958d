"""A worker's Prometheus metrics: its own names, and those that routers of the vLLM world scrape.

Owns the names. The one rule: counts are made where the door says that something happened; gauges are read from the door
when somebody scrapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared import metrics
from shared.clock import Clock
from workers.door.door import Door
from workers.door.execution import Execution
from workers.engine import messages as m

STEP_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

_answers = Counter("trunkline_worker_submissions", "Submissions answered.", ["answer"])
_adopted = Counter("trunkline_worker_adopted", "Executions taken over by a higher attempt.")
_ended = Counter("trunkline_worker_executions", "Executions ended.", ["outcome"])
_tokens = Counter("trunkline_worker_tokens", "Tokens computed by the engine.", ["phase"])
_steps = Histogram("trunkline_worker_step_seconds", "Engine steps.", buckets=STEP_BUCKETS)
_queue = Histogram("trunkline_worker_queue_seconds", "Admission to first step.", buckets=metrics.FIRST_TOKEN_BUCKETS)
_duration = metrics.gen_ai(
    "gen_ai.server.request.duration", "Admission to end.", metrics.DURATION_BUCKETS, ("gen_ai_request_model",)
)
_first = metrics.gen_ai(
    "gen_ai.server.time_to_first_token",
    "Admission to first token.",
    metrics.FIRST_TOKEN_BUCKETS,
    ("gen_ai_request_model",),
)
_per_token = metrics.gen_ai(
    "gen_ai.server.time_per_output_token",
    "Mean time between a request's tokens after the first.",
    metrics.PER_TOKEN_BUCKETS,
    ("gen_ai_request_model",),
)


class Metrics:
    """Observer (`door.holdings.Observer`) that counts."""

    def __init__(self, model: str, clock: Clock) -> None:
        self._clock = clock
        self._duration, self._first, self._per_token = (each.labels(model) for each in (_duration, _first, _per_token))

    def answered(self, kind: str) -> None:
        """See `Observer`."""
        _answers.labels(kind).inc()

    def admitted(self, execution: Execution, *, adopted: bool) -> None:
        """See `Observer`."""
        _adopted.inc(adopted)

    def scheduled(self, execution: Execution) -> None:
        """See `Observer`."""
        if execution.scheduled is not None:
            _queue.observe(execution.scheduled.queue_ms / 1e3)

    def first_token(self, execution: Execution) -> None:
        """See `Observer`."""
        self._first.observe(self._clock.monotonic() - execution.times.admitted)

    def ended(self, execution: Execution, outcome: str) -> None:
        """See `Observer`."""
        _ended.labels(outcome).inc()
        now, first = self._clock.monotonic(), execution.times.first_token
        self._duration.observe(now - execution.times.admitted)
        after_first = sum(max(0, choice.produced - choice.given - 1) for choice in execution.choices)
        if outcome == "finished" and first is not None and after_first:
            self._per_token.observe((now - first) * len(execution.choices) / after_first)

    def stepped(self, step: m.StepOut) -> None:
        """See `Observer`."""
        if step.prefill_tokens or step.decode_tokens:
            _steps.observe(step.duration_ms / 1e3)
            _tokens.labels("prefill").inc(step.prefill_tokens)
            _tokens.labels("decode").inc(step.decode_tokens)


class Gauges(Collector):
    """What the door is like now; register it while the door lives."""

    def __init__(self, door: Door, model: str) -> None:
        self._door = door
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        yield from self._own()
        yield from self._as_vllm()

    def _own(self) -> Iterator[Metric]:
        door, load, engine = self._door, self._door.loads.current(), self._door.loads.engine
        gauges = {
            "ready": (float(door.served is not None and not door.draining), "1 while new work is taken."),
            "requests": (load.requests, "Requests that hold a reservation."),
            "retained_requests": (door.held, "Requests held, ended ones included until acknowledged."),
            "retained_bytes": (door.retained_bytes, "Bytes kept until gateways acknowledge them."),
            "choices_running": (load.running, "Choices in the running batch."),
            "choices_waiting": (load.waiting, "Choices admitted, not running."),
            "queued_prefill_tokens": (load.queued_prefill_tokens, "Prompt tokens not yet computed."),
            "kv_tokens_free": (load.kv_tokens_free, "KV tokens neither used nor cached."),
            "kv_tokens_cached": (load.kv_tokens_cached, "KV tokens of evictable prefix-cache blocks."),
            "kv_tokens_total": (load.kv_tokens_total, "KV tokens in all."),
            "kv_tokens_reserved": (load.kv_tokens_reserved, "KV tokens that admitted requests may come to need."),
            "engine_tick_age_seconds": (door.engine.pulse.tick_age_ms / 1e3, "Since the engine was last heard."),
            "engine_max_step_seconds": (engine.max_step_ms / 1e3, "Longest engine step of the last minute."),
            "tombstones": (len(door.fences), "Marks of ended or refused attempts."),
            "tombstones_evicted": (door.fences.evicted, "Marks given up before their time, since the start."),
            "gateways": (door.gateway_count, "Gateway lives with a stream or something to deliver."),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"trunkline_worker_{name}", text, value=value)

    def _as_vllm(self) -> Iterator[Metric]:
        """The names llm-d and the Gateway API inference extension read; from the same load as our own."""
        load, engine = self._door.loads.current(), self._door.loads.engine
        used = load.kv_tokens_total - load.kv_tokens_free - load.kv_tokens_cached
        served = self._door.loads.served
        gauges = {
            "num_requests_running": (load.running, "Sequences in the running batch."),
            "num_requests_waiting": (load.waiting, "Sequences that wait."),
            "kv_cache_usage_perc": (used / load.kv_tokens_total if load.kv_tokens_total else 0.0, "KV use, 0 to 1."),
        }
        for name, (value, text) in gauges.items():
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name", "engine"])
            family.add_metric([self._model, "0"], value)
            yield family
        preempted = CounterMetricFamily("vllm:num_preemptions", "Preemptions.", labels=["model_name", "engine"])
        preempted.add_metric([self._model, "0"], engine.preemptions)
        yield preempted
        labels = ["block_size", "num_gpu_blocks", "engine"]
        info = GaugeMetricFamily("vllm:cache_config_info", "KV pool.", labels=labels)
        if served is not None:
            info.add_metric([str(served.block_size), str(served.kv_tokens // served.block_size), "0"], 1)
        yield info
