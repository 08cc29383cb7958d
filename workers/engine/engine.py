"""The engine loop: drain → schedule → launch → land → emit, one turn at a time.

Owns the order of things in a step and what is said about it. A runner that overlaps has the next step launched before
the one in flight lands, so that its device never waits for this loop; with any other the step that was launched lands
in the same turn. The one rule: nothing here blocks except the inbox and a step's result, and time comes from the clock
it was given, so a simulation can call `step` with a virtual clock and a runner that only pretends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shared.clock import Clock
from shared.errors import TABLE, Reason
from workers.engine import messages as m
from workers.engine.pacing import Pacer
from workers.engine.pooling import add_rows, embedding
from workers.engine.refusals import refusal
from workers.engine.sampler import Draw, Pick
from workers.engine.scheduler import Plan, Scheduler, Span
from workers.engine.sequence import Request, encoding, generation
from workers.engine.sequence import Sequence as Row
from workers.engine.step import Launched, StepRunner

TICK_S = 0.25
_NOTHING = Plan(())


class Inbox(Protocol):
    """Where work comes from."""

    def receive(self, timeout_s: float) -> Sequence[m.ToEngine]:
        """What has arrived, in order; waits up to `timeout_s` seconds if nothing has. Raises when the sender died."""
        ...


class Outbox(Protocol):
    """Where results go."""

    def send(self, message: m.FromEngine) -> None:
        """Hands over one message. Raises when the receiver died."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine must know of the model's tokens."""

    size: int
    ends: tuple[int, ...]  # end-of-sequence ids


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched and is not read yet."""

    plan: Plan
    launched: Launched
    began: float  # seconds of the engine's clock


class Engine:
    """One model's loop over one scheduler."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Clock,
        inbox: Inbox,
        outbox: Outbox,
    ) -> None:
        self.open = True
        self.steps = 0
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._inbox = inbox
        self._outbox = outbox
        self._arrivals = 0
        self._runs: list[m.Run] = []
        self._events: list[m.Event] = []
        self._flight: Flight | None = None
        self._pacer = Pacer(scheduler.limits.itl_slo_ms, scheduler.limits.max_batch_tokens)
        self._slowest = SlowestStep()
        self._spoke_at = self._landed_at = clock.monotonic()

    @property
    def busy(self) -> bool:
        """True when a turn is due, whether or not anything arrives."""
        return self._flight is not None or self._scheduler.runnable

    def run(self) -> None:
        """Steps until `Shutdown`, or until inbox or outbox raise."""
        while self.open:
            self.step(0.0 if self.busy else TICK_S)

    def step(self, wait_s: float = 0.0) -> bool:
        """One turn, waiting up to `wait_s` for work if there is none; True if a step was launched or landed."""
        self._drain(wait_s)
        began = self._clock.monotonic()
        self._expire(began)
        if self._runs or self._events:
            self._emit(_NOTHING, began)  # who was cancelled hears it now, not after another step
        launched = self._launch(began)
        landing, self._flight = (self._flight, launched) if self._runner.overlaps else (launched, None)
        if landing:
            self._land(landing)
            began = max(landing.began, self._landed_at)  # the device was not free for it before
        self._scheduler.check()
        self._emit(landing.plan if landing else _NOTHING, began)
        return bool(launched or landing)

    # Drain: what the door says, in order.

    def _drain(self, wait_s: float) -> None:
        for message in self._inbox.receive(wait_s):
            match message:
                case m.Admit() | m.Encode():
                    self._admit(message)
                case m.Cancel(key):
                    self._scheduler.remove(key)
                    self._events.append(m.Freed(key, self.steps))
                case m.StopChoice(key, choice):
                    self._stop(key, choice)
                case m.Pause(key, paused):
                    self._scheduler.pause(key, paused)
                case m.Shutdown():
                    self.open = False

    def _admit(self, spec: m.Admit | m.Encode) -> None:
        self._arrivals += 1
        limits = self._scheduler.limits
        flaw = refusal(spec, self._vocabulary.size, limits.max_context) or self._scheduler.add(self._request(spec))
        if flaw is not None:
            self._events.append(_failed(spec.key, flaw.reason, flaw.message, work_done=False))
            return
        for row in self._scheduler.requests[spec.key].sequences:
            if row.full:  # its context was full before it moved here
                self._end(row, m.Finish.LENGTH)

    def _request(self, spec: m.Admit | m.Encode) -> Request:
        now = self._clock.monotonic()
        if isinstance(spec, m.Encode):
            return encoding(spec, self._arrivals, now)
        return generation(spec, self._arrivals, now, self._vocabulary.ends, self._scheduler.limits.max_context)

    def _stop(self, key: int, choice: int) -> None:
        request = self._scheduler.requests.get(key)
        if request is None or isinstance(request.spec, m.Encode):
            return  # it ended in the step before, or has no choices
        for row in request.sequences:
            if row.choice == choice and row.alive:
                self._end(row, m.Finish.STOP)

    def _expire(self, now: float) -> None:
        for request in self._scheduler.expired(now):
            queued = request.scheduled is None
            reason = Reason.QUEUE_EXPIRED if queued else Reason.RUN_EXPIRED
            where = "before its first step" if queued else "while it ran"
            self._fail(request, reason, f"the budget of {request.spec.budget_ms} ms ended {where}")

    # Launch: what the plan means for its requests.

    def _launch(self, now: float) -> Flight | None:
        plan = self._scheduler.plan(self._pacer.allowance, flying=self._flight is not None)
        if not plan.spans:
            return None
        for span in plan.spans:
            self._begin(span, now)
        launched = self._runner.launch(plan, [_draw(span) for span in plan.spans if span.samples])
        for span in plan.spans:
            self._scheduler.advance(span)
        return Flight(plan, launched, now)

    def _begin(self, span: Span, now: float) -> None:
        request = span.sequence.request
        if request.scheduled is None:
            request.scheduled = now
            request.cached_tokens = min(span.start, span.sequence.prompt_length)
            self._events.append(m.Scheduled(request.key, _ms(request.arrived, now), request.cached_tokens))

    # Land: what was computed becomes tokens, embeddings, endings. Rows that ended meanwhile computed for nobody.

    def _land(self, flight: Flight) -> None:
        result = flight.launched.result()
        now = self._clock.monotonic()
        self.steps += 1
        for span in flight.plan.spans:
            self._count(span.sequence)
        for row, pick in zip(flight.plan.sampled, result.picks, strict=True):
            if row.alive:
                self._take(row, pick, now)
        for span, hidden in zip(flight.plan.encoded, result.hidden, strict=True):
            if span.sequence.alive:
                self._pool(span, hidden)

    def _count(self, row: Row) -> None:
        request = row.request
        if row.alive and request.last_step != self.steps:
            request.last_step = self.steps
            request.steps += 1

    def _take(self, row: Row, pick: Pick | None, now: float) -> None:
        request = row.request
        if pick is None:
            self._fail(request, Reason.NAN_LOGITS, "the model's scores are not finite", forget=True)
            return
        request.first_token = now if request.first_token is None else request.first_token
        request.last_token = now
        if pick.token in request.stop_ids:
            self._end(row, m.Finish.STOP, stop_token=pick.token)
            return
        self._scheduler.take(row, pick.token)
        if row.full:
            self._end(row, m.Finish.LENGTH, pick)
        else:
            self._say(row, pick)

    def _pool(self, span: Span, rows: torch.Tensor) -> None:
        row, spec = span.sequence, span.sequence.request.spec
        assert isinstance(spec, m.Encode)
        add_rows(row, span.start, rows)
        if row.pooled < row.length:
            return  # more chunks follow
        vector = embedding(row, spec.normalize)
        if not np.isfinite(vector).all():
            self._fail(row.request, Reason.NAN_LOGITS, "the model's hidden states are not finite", forget=True)
            return
        self._scheduler.finish(row, m.Finish.NONE)
        data = vector.astype("<f4").tobytes()
        self._events.append(m.Encoded(spec.key, row.choice, len(vector), data, row.length, row.request.done))

    # Endings, and what is said.

    def _end(self, row: Row, why: m.Finish, pick: Pick | None = None, stop_token: int = -1) -> None:
        """Ends a choice, saying its last token (if any) and its finish together, and its request with the last one."""
        request = row.request
        self._scheduler.finish(row, why)
        self._say(row, pick, stop_token)
        if request.done:
            self._events.append(_finished(request))

    def _say(self, row: Row, pick: Pick | None, stop_token: int = -1) -> None:
        tokens = () if pick is None else (pick.token,)
        logprobs = () if pick is None or pick.logprob is None else (pick.logprob,)
        index = row.output_length - len(tokens)
        self._runs.append(m.Run(row.request.key, row.choice, index, tokens, row.finish, stop_token, logprobs))

    def _fail(self, request: Request, reason: Reason, message: str, *, forget: bool = False) -> None:
        self._scheduler.remove(request.key, forget=forget)
        self._events.append(_failed(request.key, reason, message, work_done=request.scheduled is not None))

    def _emit(self, plan: Plan, began: float) -> None:
        now = self._clock.monotonic()
        if plan.spans:
            self._measure(plan, now, _ms(began, now))
        load = self._scheduler.load(now, self._slowest.at(now))
        if plan.spans or self._runs or self._events:
            prefill, decode = plan.prefill_tokens, plan.decode_tokens
            self._send(m.StepOut(self.steps, _ms(began, now), self._runs, self._events, load, prefill, decode), now)
            self._runs, self._events = [], []
        elif now - self._spoke_at >= TICK_S:
            self._send(m.Tick(self.steps, load), now)

    def _measure(self, plan: Plan, now: float, took_ms: float) -> None:
        self._landed_at = now
        self._slowest.add(now, took_ms)
        self._pacer.observe(plan.prefill_tokens, plan.decode_tokens, plan.decode_context, took_ms)

    def _send(self, message: m.StepOut | m.Tick, now: float) -> None:
        self._outbox.send(message)
        self._spoke_at = now


class SlowestStep:
    """The longest step of the last minute, in sixty one-second buckets."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, float]] = deque(maxlen=60)

    def add(self, now: float, took_ms: float) -> None:
        """A step that ended at `now` seconds took `took_ms`."""
        second = int(now)
        if self._buckets and self._buckets[-1][0] == second:
            took_ms = max(took_ms, self._buckets.pop()[1])
        self._buckets.append((second, took_ms))

    def at(self, now: float) -> float:
        """Milliseconds; 0 if no step ran in the last minute."""
        return max((took for second, took in self._buckets if second > now - 60), default=0.0)


def _draw(span: Span) -> Draw:
    row, spec = span.sequence, span.sequence.request.spec
    assert isinstance(spec, m.Admit)
    banned = row.request.stop_ids if row.output_length + span.pending < spec.min_tokens else ()
    return Draw(spec.sampling, row.tokens, row.prompt_length, row.choice, banned, span.pending)


def _failed(key: int, reason: Reason, message: str, *, work_done: bool) -> m.Failed:
    return m.Failed(key, reason.value, message, TABLE[reason].retryable, work_done)


def _finished(request: Request) -> m.Finished:
    """The end of a generation. INV-5: arrived ≤ scheduled ≤ first token ≤ last token."""
    start, first, last = request.scheduled, request.first_token, request.last_token
    times = [time for time in (request.arrived, start, first, last) if time is not None]
    assert times == sorted(times), "a request's times run backwards"
    return m.Finished(
        request.key,
        queue_ms=_ms(request.arrived, start),
        prefill_ms=_ms(start, first),
        decode_ms=_ms(first, last),
        steps=request.steps,
        cached_tokens=request.cached_tokens,
        preemptions=request.preemptions,
    )


def _ms(start: float | None, end: float | None) -> float:
    """Milliseconds between two times in seconds; 0 where one of them never came."""
    return 0.0 if start is None or end is None else (end - start) * 1e3
