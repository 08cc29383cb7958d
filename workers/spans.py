"""A worker's spans: queue, prefill and decode of each traced request, and samples of the engine steps it took part in.

Owns nothing but notes on traced requests. The one rule: spans are made when their times are known, from the engine's
own durations, so that they say what the engine did and not when the door heard of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context

from shared.clock import Clock
from shared.tracing import extract
from workers.door.execution import Execution
from workers.engine import messages as m

MAX_LINKS = 32


@dataclass(slots=True)
class _Traced:
    """One request that is traced. Times in seconds of the monotonic clock."""

    context: Context  # of whoever submitted it
    link: trace.Link
    steps: int = 0  # engine steps that brought it tokens


class Spans:
    """Observer (`door.holdings.Observer`) that traces."""

    def __init__(self, tracer: trace.Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        # Wall time is read once: spans of one worker keep their order even if the machine's time is set.
        self._epoch_ns = clock.wall_ms() * 1_000_000 - int(clock.monotonic() * 1e9)
        self._traced: dict[int, _Traced] = {}  # by engine key

    def answered(self, kind: str) -> None:
        """See `Observer`: the router's own span tells it."""

    def admitted(self, execution: Execution, *, adopted: bool) -> None:
        """See `Observer`."""
        context = extract(execution.traceparent, execution.tracestate)
        submitter = trace.get_current_span(context).get_span_context()
        if submitter.is_valid and submitter.trace_flags.sampled and not adopted:
            self._traced[execution.key] = _Traced(context, trace.Link(submitter))

    def scheduled(self, execution: Execution) -> None:
        """See `Observer`: known again at the end."""

    def first_token(self, execution: Execution) -> None:
        """See `Observer`: known again at the end."""

    def ended(self, execution: Execution, outcome: str) -> None:
        """See `Observer`."""
        traced = self._traced.pop(execution.key, None)
        if traced is None:
            return
        stages = _stages(execution, self._clock.monotonic())
        for name, start, end in stages:
            span = self._tracer.start_span(name, context=traced.context, start_time=self._ns(start))
            if name == stages[-1][0]:
                _describe(span, execution, outcome)
            span.end(self._ns(max(start, end)))

    def stepped(self, step: m.StepOut) -> None:
        """See `Observer`. Of each request, the steps that bring its 1st, 2nd, 4th, 8th … token are drawn: few, and
        some of every part of its life. A step stands in the trace of the first such request, with links to all."""
        if not self._traced:
            return
        here = {run.key: traced for run in step.runs if (traced := self._traced.get(run.key)) is not None}
        host: _Traced | None = None
        for traced in here.values():
            traced.steps += 1
            if traced.steps & (traced.steps - 1) == 0:
                host = host or traced
        if host is None:
            return
        now = self._clock.monotonic()
        span = self._tracer.start_span(
            "engine.step",
            context=host.context,
            start_time=self._ns(now - step.duration_ms / 1e3),
            links=[traced.link for traced in list(here.values())[:MAX_LINKS]],
            attributes={
                "trunkline.step": step.step,
                "trunkline.prefill_tokens": step.prefill_tokens,
                "trunkline.decode_tokens": step.decode_tokens,
                "trunkline.running": step.load.running,
                "trunkline.waiting": step.load.waiting,
            },
        )
        span.end(self._ns(now))

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)


def _stages(execution: Execution, now: float) -> list[tuple[str, float, float]]:
    """Name, start and end of each stage it has reached, end to end; the last one ends at `now` at the latest."""
    times, ending = execution.times, execution.ending
    if times.scheduled is None:
        return [("worker.queue", times.admitted, now)]
    first = times.first_token
    end = now
    if ending is not None and ending.HasField("finished"):
        first = min(now, times.scheduled + ending.finished.prefill_ms / 1e3)
        end = min(now, first + ending.finished.decode_ms / 1e3)
    stages = [
        ("worker.queue", times.admitted, times.scheduled),
        ("worker.prefill", times.scheduled, end if first is None else first),
    ]
    return stages if first is None else [*stages, ("worker.decode", first, end)]


def _describe(span: trace.Span, execution: Execution, outcome: str) -> None:
    """The last span of a request says how it ended."""
    span.set_attribute("trunkline.outcome", outcome)
    ending = execution.ending
    if ending is None:
        span.set_attribute("error.type", "CANCELLED")
    elif ending.HasField("finished"):
        span.set_attribute("trunkline.steps", ending.finished.steps)
        span.set_attribute("trunkline.cached_tokens", ending.finished.cached_tokens)
        span.set_attribute("trunkline.preemptions", ending.finished.preemptions)
    else:
        span.set_attribute("error.type", ending.failed.reason or outcome)
        span.set_status(trace.StatusCode.ERROR)
