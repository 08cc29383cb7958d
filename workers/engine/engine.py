"""The engine loop: drain → schedule → arrays → forward → sample → complete → emit, one synchronous turn at a time.

Owns the order of things in a step and what is said about it. The one rule: nothing here blocks except the inbox, and
time comes from the clock it was given, so a simulation can call `step` with a virtual clock and a runner that only
pretends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shared.clock import Clock
from shared.errors import TABLE, Reason
from workers.engine import messages as m
from workers.engine.batch import RaggedBatch
from workers.engine.pooling import add_rows, embedding
from workers.engine.refusals import refusal
from workers.engine.runner import Output
from workers.engine.sampler import Draw, Pick
from workers.engine.scheduler import Plan, Scheduler, Span
from workers.engine.sequence import Request, encoding, generation
from workers.engine.sequence import Sequence as Row

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


class StepRunner(Protocol):
    """Computes a plan (`runner.Runner`, or something that pretends to)."""

    def arrays(self, plan: Plan) -> RaggedBatch:
        """The plan as arrays."""
        ...

    def forward(self, batch: RaggedBatch) -> Output:
        """Hidden states and logits of the step."""
        ...


Sample = Callable[[torch.Tensor, Sequence[Draw]], Sequence[Pick | None]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the engine must know of the model's tokens."""

    size: int
    ends: tuple[int, ...]  # end-of-sequence ids


class Engine:
    """One model's loop over one scheduler."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        scheduler: Scheduler,
        runner: StepRunner,
        sample: Sample,
        clock: Clock,
        inbox: Inbox,
        outbox: Outbox,
    ) -> None:
        self.open = True
        self.steps = 0
        self._vocabulary = vocabulary
        self._scheduler = scheduler
        self._runner = runner
        self._sample = sample
        self._clock = clock
        self._inbox = inbox
        self._outbox = outbox
        self._arrivals = 0
        self._runs: list[m.Run] = []
        self._events: list[m.Event] = []
        self._slowest = SlowestStep()
        self._spoke_at = clock.monotonic()

    def run(self) -> None:
        """Steps until `Shutdown`, or until inbox or outbox raise."""
        while self.open:
            self.step(0.0 if self._scheduler.runnable else TICK_S)

    def step(self, wait_s: float = 0.0) -> bool:
        """One turn, waiting up to `wait_s` for work if there is none; True if a forward step ran."""
        self._drain(wait_s)
        began = self._clock.monotonic()
        self._expire(began)
        if self._runs or self._events:
            self._emit(_NOTHING, began)  # who was cancelled hears it now, not after another step
        plan = self._scheduler.plan()
        if plan.spans:
            self._begin(plan, began)
            batch = self._runner.arrays(plan)
            output = self._runner.forward(batch)
            picks = self._sample(output.logits, [self._draw(row) for row in plan.sampled])
            self._complete(plan, output, picks)
        self._scheduler.check()
        self._emit(plan, began)
        return bool(plan.spans)

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

    # Schedule: what the plan means for its requests.

    def _begin(self, plan: Plan, now: float) -> None:
        for span in plan.spans:
            request = span.sequence.request
            if request.scheduled is None:
                request.scheduled = now
                request.cached_tokens = min(span.start, span.sequence.prompt_length)
                queue_ms = _ms(request.arrived, now)
                self._events.append(m.Scheduled(request.key, queue_ms, request.cached_tokens))
            if request.last_step != self.steps:
                request.last_step = self.steps
                request.steps += 1

    def _draw(self, row: Row) -> Draw:
        spec = row.request.spec
        assert isinstance(spec, m.Admit)
        banned = row.request.stop_ids if row.output_length < spec.min_tokens else ()
        return Draw(spec.sampling, row.tokens, row.prompt_length, row.choice, banned)

    # Complete: what was computed becomes tokens, embeddings, endings.

    def _complete(self, plan: Plan, output: Output, picks: Sequence[Pick | None]) -> None:
        now = self._clock.monotonic()
        self.steps += 1
        for span in plan.spans:
            self._scheduler.advance(span)
        for row, pick in zip(plan.sampled, picks, strict=True):
            if row.alive:  # another choice of its request may have failed in this very step
                self._take(row, pick, now)
        offset = 0
        for span in plan.spans:
            if isinstance(span.sequence.request.spec, m.Encode) and span.sequence.alive:
                self._pool(span, output.hidden[offset : offset + span.count])
            offset += span.count

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
        row.append(pick.token)
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
            self._slowest.add(now, _ms(began, now))
        load = self._scheduler.load(now, self._slowest.at(now))
        if plan.spans or self._runs or self._events:
            prefill, decode = plan.prefill_tokens, plan.decode_tokens
            self._send(m.StepOut(self.steps, _ms(began, now), self._runs, self._events, load, prefill, decode), now)
            self._runs, self._events = [], []
        elif now - self._spoke_at >= TICK_S:
            self._send(m.Tick(self.steps, load), now)

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
