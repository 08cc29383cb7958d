"""An engine on a hand-driven clock, with a list for an inbox and a notebook for an outbox."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.clock import FakeClock
from tests.fakes.hash_model import END, VOCAB, HashModel
from workers.engine import messages as m
from workers.engine.batch import RaggedBatch
from workers.engine.blocks import BlockPool
from workers.engine.engine import Engine, Vocabulary
from workers.engine.runner import Runner, encoded_rows
from workers.engine.sampler import Draw, sample
from workers.engine.scheduler import Limits, Plan, Scheduler
from workers.engine.step import Result, StepRunner


@dataclass
class Notebook:
    """Outbox that keeps everything and checks INV-2 as it comes."""

    messages: list[m.FromEngine] = field(default_factory=list)
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[tuple[int, int], list[m.Logprob]] = field(default_factory=lambda: defaultdict(list))
    first_index: dict[tuple[int, int], int] = field(default_factory=dict)
    finishes: dict[tuple[int, int], m.Run] = field(default_factory=dict)
    scheduled: dict[int, m.Scheduled] = field(default_factory=dict)
    ended: dict[int, m.Event] = field(default_factory=dict)
    vectors: dict[int, dict[int, m.Encoded]] = field(default_factory=lambda: defaultdict(dict))

    def send(self, message: m.FromEngine) -> None:
        self.messages.append(message)
        if not isinstance(message, m.StepOut):
            return
        for event in message.events:
            if isinstance(event, m.Scheduled):
                assert event.key not in self.scheduled
                assert event.key not in self.ended
                self.scheduled[event.key] = event
        for run in message.runs:
            self._run(run)
        for event in message.events:
            if not isinstance(event, m.Scheduled):
                self._end(event)

    def _run(self, run: m.Run) -> None:
        where = (run.key, run.choice)
        assert run.key not in self.ended, "a token after the terminal event"
        assert where not in self.finishes, "a token after the finish"
        first = self.first_index.setdefault(where, run.index)
        assert run.index == first + len(self.tokens[where]), "a gap in a choice"
        self.tokens[where].extend(run.tokens)
        self.logprobs[where].extend(run.logprobs)
        if run.finish:
            self.finishes[where] = run

    def _end(self, event: m.Event) -> None:
        if isinstance(event, m.Freed) and event.key in self.ended:
            return  # cancelling what has ended is acknowledged as well
        assert event.key not in self.ended, "two terminal events"
        if isinstance(event, m.Encoded):
            assert event.index not in self.vectors[event.key]
            self.vectors[event.key][event.index] = event
            if not event.last:
                return
        self.ended[event.key] = event


class SpyRunner(Runner):
    """Remembers which requests were in each step, and how many preemptions any sequence has seen."""

    def __init__(self, blocks: int) -> None:
        super().__init__(HashModel(), HashModel.cache(blocks))
        self.keys: list[set[int]] = []
        self.sizes: list[int] = []
        self.most_preempted = 0

    def arrays(self, plan: Plan) -> RaggedBatch:
        self.keys.append({span.sequence.request.key for span in plan.spans})
        self.sizes.append(sum(span.count for span in plan.spans))
        self.most_preempted = max(self.most_preempted, *(span.sequence.preemptions for span in plan.spans))
        return super().arrays(plan)


@dataclass
class LateStep:
    """A step on its way: what was read of the host when it was launched, and what it will have computed."""

    runner: LateRunner
    plan: Plan
    batch: RaggedBatch
    draws: Sequence[Draw]
    carried: list[tuple[int, int]]
    outcome: Result | None = None

    def result(self) -> Result:
        """The device gets to it now, at the latest."""
        assert self.runner.unread.popleft() is self, "results are asked in the order of the launches"
        self.runner.catch_up(self)
        self.runner.landed()
        assert self.outcome is not None
        return self.outcome


class LateRunner(SpyRunner):
    """Overlaps: steps run in their order, at some time between the launch and the moment somebody waits for them."""

    overlaps = True

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.unread: deque[LateStep] = deque()
        self.carried = 0  # pending tokens so far
        self._queue: deque[LateStep] = deque()
        self._before = Plan(())
        self._picks: Sequence[int] = ()
        self._rng = random.Random(blocks)

    def launch(self, plan: Plan, draws: Sequence[Draw]) -> LateStep:  # type: ignore[override]
        assert len(self.unread) <= 1, "a third step was launched"
        assert not any(draw.pending and draw.sampling.penalised for draw in draws)
        step = LateStep(self, plan, self.arrays(plan), draws, plan.carried(self._before))
        self.carried += len(step.carried)
        self._before = plan
        self._queue.append(step)
        self.unread.append(step)
        if self._rng.random() < 0.5:
            self.catch_up(step)
        return step

    def catch_up(self, last: LateStep) -> None:
        """Runs what was launched, up to `last`."""
        while last.outcome is None:
            self._compute(self._queue.popleft())

    def landed(self) -> None:
        """A result was asked for and is there; a test may let time pass."""

    def _compute(self, step: LateStep) -> None:
        for row, pick in step.carried:
            step.batch.tokens[row] = self._picks[pick]
        output = self.forward(step.batch)
        picks = sample(output.logits, step.draws)
        self._picks = [0 if pick is None else pick.token for pick in picks]
        step.outcome = Result(picks, encoded_rows(step.plan, output.hidden))


class Rig:
    """The engine and everything around it. Each step takes 10 ms."""

    def __init__(
        self,
        blocks: int = 64,
        batch_tokens: int = 32,
        seqs: int = 8,
        context: int = 512,
        held: int = 64,
        itl_slo_ms: float = 0.0,
        *,
        overlap: bool = False,
        runner: StepRunner | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.notes = Notebook()
        self.runner: Any = runner or (LateRunner(blocks) if overlap else SpyRunner(blocks))
        self.pool = BlockPool(blocks)
        limits = Limits(batch_tokens, seqs, held, context, itl_slo_ms=itl_slo_ms)
        self.scheduler = Scheduler(limits, self.pool)
        self.queue: list[m.ToEngine] = []
        self.engine = Engine(Vocabulary(VOCAB, (END,)), self.scheduler, self.runner, self.clock, self, self.notes)

    def receive(self, timeout_s: float) -> Sequence[m.ToEngine]:
        taken, self.queue = self.queue, []
        return taken

    def say(self, *messages: m.ToEngine) -> None:
        """Puts messages where the next step finds them."""
        self.queue.extend(messages)

    def step(self) -> bool:
        """One turn and 10 ms."""
        ran = self.engine.step()
        self.clock.advance(0.01)
        return ran

    def finish(self, most_steps: int = 5000) -> None:
        """Steps until nothing runs; more than `most_steps` is a livelock."""
        for _ in range(most_steps):
            if not self.step() and not self.queue:
                return
        raise AssertionError("the engine does not come to an end")


def admit(
    key: int,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    choices: int = 1,
    emitted: Sequence[int] = (),
    **rest: object,
) -> m.Admit:
    """A greedy generation of `choices` choices that have `emitted`, unless `rest` says otherwise."""
    rest.setdefault("sampling", m.Sampling())
    begun = [m.ChoiceIn(index, m.pack_tokens(emitted)) for index in range(choices)]
    return m.Admit(key, m.pack_tokens(prompt), begun, max_tokens=max_tokens, **rest)  # type: ignore[arg-type]
