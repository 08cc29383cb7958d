"""What runs in the next step: decode first, then prefill chunks, then admission, inside one token budget.

Owns the waiting and running sequences and their blocks; pure (no clock, no tensors, no randomness). The one rule: call
`plan`, compute every span of it, then `advance` each; nothing else moves `computed`.

Why nothing starves or livelocks: the waiting line is strict (priority, begun elsewhere, arrival, choice) and stops at
the first sequence that does not fit; the victim of a preemption is always the most junior, so the most senior always
moves; a victim keeps its prefix cached; and after `preemption_cap` preemptions a sequence enters only with all blocks
it can ever need, and is then no victim any more. A sequence that could not fit into the empty pool is refused before
it gets here.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from shared.errors import Reason
from workers.engine.batch import BLOCK_SIZE
from workers.engine.blocks import BlockPool, blocks_for
from workers.engine.messages import Encode, Finish, Load
from workers.engine.refusals import Refusal
from workers.engine.sequence import Request, Sequence, State, Tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one engine."""

    max_batch_tokens: int  # tokens of one step
    max_seqs: int  # sequences running at once
    max_held: int  # sequences held, waiting or running
    max_context: int  # prompt and output tokens of one sequence
    preemption_cap: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.max_seqs <= self.max_batch_tokens:
            raise ValueError(f"max_seqs {self.max_seqs} must be in 1..max_batch_tokens {self.max_batch_tokens}")


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start : start + count` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    count: int
    prefill: bool  # False: a decode, its one token was drawn in the step before
    samples: bool  # a token is drawn from its last row


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    spans: tuple[Span, ...]

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that draw a token in this step, in span order."""
        return [span.sequence for span in self.spans if span.samples]

    @property
    def prefill_tokens(self) -> int:
        """Tokens of spans that are not decodes."""
        return sum(span.count for span in self.spans if span.prefill)

    @property
    def decode_tokens(self) -> int:
        """Tokens of decode spans."""
        return sum(span.count for span in self.spans if not span.prefill)


class Scheduler:
    """Sequences and the pool they share."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.requests: dict[int, Request] = {}
        self.waiting: list[Sequence] = []  # both in order of seniority
        self.running: list[Sequence] = []
        self.preemptions = 0

    @property
    def held(self) -> int:
        """Sequences here, waiting or running."""
        return len(self.waiting) + len(self.running)

    @property
    def runnable(self) -> bool:
        """True when a step is due (INV-8): something is neither done nor paused."""
        return any(not request.paused for request in self.requests.values())

    def add(self, request: Request) -> Refusal | None:
        """A new request joins the line, or the answer says why it cannot."""
        assert request.key not in self.requests, "a key was used twice"
        most = max(sequence.most_blocks for sequence in request.sequences)
        if most > self.pool.total:
            needed, there = most * BLOCK_SIZE, self.pool.total * BLOCK_SIZE
            return Refusal(Reason.TOO_LARGE, f"{needed} tokens of cache are needed, this engine has {there}")
        if self.held + len(request.sequences) > self.limits.max_held:
            return Refusal(Reason.QUEUE_FULL, f"{self.held} of {self.limits.max_held} sequences are held")
        self.requests[request.key] = request
        for sequence in request.sequences:
            self._queue(sequence)
        return None

    def expired(self, now: float) -> list[Request]:
        """Requests whose budget is used up at `now` (seconds of the engine's clock)."""
        return [request for request in self.requests.values() if request.deadline <= now]

    def load(self, now: float, max_step_ms: float) -> Load:
        """Absolute load; paused requests count as waiting but want no tokens and do not age."""
        counts = self.pool.counts
        waiting = [sequence for sequence in self.waiting if not sequence.request.paused]
        prefills = (sequence for sequence in (*waiting, *self.running) if sequence.prefilling)
        fresh = (sequence.request.arrived for sequence in waiting if sequence.request.scheduled is None)
        return Load(
            running=len(self.running),
            waiting=len(self.waiting),
            queued_prefill_tokens=sum(sequence.length - sequence.computed for sequence in prefills),
            kv_blocks_free=counts.free,
            kv_blocks_cached=counts.cached,
            kv_blocks_used=counts.used,
            oldest_waiting_ms=(now - min(fresh, default=now)) * 1e3,
            max_step_ms=max_step_ms,
            preemptions=self.preemptions,
        )

    def remove(self, key: int, *, forget: bool = False) -> Request | None:
        """Ends a request wherever it is and frees what it holds; `forget` withdraws what it published."""
        request = self.requests.get(key)
        if request is None:
            return None
        for sequence in request.sequences:
            self.finish(sequence, Finish.NONE)
        if forget:
            self._forget(request)
        return request

    def pause(self, key: int, paused: bool) -> None:
        """Holds a request back, or lets it go on. A paused one holds no blocks: they stay cached while room lasts."""
        request = self.requests.get(key)
        if request is None:
            return
        request.paused = paused
        for sequence in request.sequences if paused else ():
            if sequence.state is State.RUNNING:
                self._to_waiting(sequence)

    def plan(self) -> Plan:
        """The next step. It is empty only if everything is paused or nothing is here."""
        spans = [self._span(sequence, 1) for sequence in self._decodes()]
        budget = self.limits.max_batch_tokens - len(spans)
        prefills = self._prefills()
        while budget and (sequence := next(prefills, None)):
            spans.append(self._span(sequence, budget))
            budget -= spans[-1].count
        assert bool(spans) == self.runnable, "something could run and no token moves"
        assert self.pool.writable(_written(spans)), "a shared or published block would be written"
        return Plan(tuple(spans))

    def advance(self, span: Span) -> None:
        """The span was computed: its full blocks become shareable."""
        sequence = span.sequence
        assert sequence.state is State.RUNNING, "a span was computed for a sequence that does not run"
        sequence.computed += span.count
        sequence.prefilling = sequence.computed < sequence.length
        full = sequence.computed // BLOCK_SIZE
        keys = sequence.keys(full)
        for index in range(span.start // BLOCK_SIZE, full):
            self.pool.publish(int(sequence.blocks[index]), keys[index])

    def finish(self, sequence: Sequence, why: Finish) -> None:
        """Ends a sequence; with its last one the request is gone. Ending twice changes nothing."""
        if sequence.state is State.DONE:
            return
        _drop(self.running if sequence.state is State.RUNNING else self.waiting, sequence)
        self.pool.release(sequence.surrender())
        sequence.state, sequence.finish = State.DONE, why
        request = sequence.request
        request.alive -= 1
        if request.done:
            del self.requests[request.key]
            if request.private:
                self._forget(request)

    def check(self) -> None:
        """Asserts INV-4 and the bounds; called after every step."""
        self.pool.check([sequence.blocks for sequence in self.running])
        assert len(self.running) <= self.limits.max_seqs, "more sequences run than allowed"
        assert self.held <= self.limits.max_held, "more sequences are held than allowed"

    def _span(self, sequence: Sequence, budget: int) -> Span:
        wanted = sequence.length - sequence.computed
        count = min(budget, wanted)
        samples = count == wanted and not isinstance(sequence.request.spec, Encode)
        return Span(sequence, sequence.computed, count, sequence.prefilling, samples)

    def _decodes(self) -> Iterator[Sequence]:
        for sequence in [sequence for sequence in self.running if not sequence.prefilling]:
            if sequence.state is State.RUNNING and self._extend(sequence):
                yield sequence

    def _prefills(self) -> Iterator[Sequence]:
        """Sequences in the middle of a prefill, then newly admitted ones, as far as the caller asks for more."""
        yield from [sequence for sequence in self.running if sequence.prefilling]
        for sequence in tuple(self.waiting):
            if not self._ready(sequence):
                continue
            if len(self.running) == self.limits.max_seqs or not self._admit(sequence):
                return  # whoever is behind in the line waits too
            yield sequence

    def _ready(self, sequence: Sequence) -> bool:
        """Choices wait for the first living one to compute the prompt that they share with it."""
        request = sequence.request
        if request.paused or isinstance(request.spec, Encode):
            return not request.paused
        first = next(other for other in request.sequences if other.alive)
        return sequence is first or not first.prefilling

    def _admit(self, sequence: Sequence) -> bool:
        """Gives it blocks for all its tokens, cached ones first; at least one token is left to compute."""
        most_cached = (sequence.length - 1) // BLOCK_SIZE
        cached = self.pool.match(sequence.keys(most_cached))
        whole = sequence.most_blocks if self._sheltered(sequence) else blocks_for(sequence.length)
        fresh = whole - len(cached)
        spare = len(self.running)  # each may soon want one more block
        if fresh + spare > self.pool.available - self.pool.idle(cached):
            return False
        self.pool.share(cached)
        sequence.hold([*cached, *self.pool.take(fresh)])
        sequence.computed = len(cached) * BLOCK_SIZE
        sequence.state = State.RUNNING
        _drop(self.waiting, sequence)
        bisect.insort(self.running, sequence, key=_seniority)
        return True

    def _extend(self, sequence: Sequence) -> bool:
        """Room for its next token, at the expense of its juniors; False when it had to leave itself."""
        while sequence.computed == sequence.held * BLOCK_SIZE:
            if self.pool.available:
                sequence.hold(self.pool.take(1))
                break
            victim = next(other for other in reversed(self.running) if not self._sheltered(other))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _sheltered(self, sequence: Sequence) -> bool:
        return sequence.preemptions >= self.limits.preemption_cap

    def _preempt(self, victim: Sequence) -> None:
        victim.preemptions += 1
        victim.request.preemptions += 1
        self.preemptions += 1
        self._to_waiting(victim)

    def _to_waiting(self, sequence: Sequence) -> None:
        _drop(self.running, sequence)
        self.pool.release(sequence.surrender())
        sequence.state = State.WAITING
        self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_seniority)

    def _forget(self, request: Request) -> None:
        self.pool.forget(_all_keys(request.sequences))


def _written(spans: list[Span]) -> Tokens:
    """Ids of the blocks that the spans write, int32 [n]."""
    tables = [span.sequence.blocks[span.start // BLOCK_SIZE : blocks_for(span.start + span.count)] for span in spans]
    return np.concatenate(tables) if tables else np.zeros(0, np.int32)


def _seniority(sequence: Sequence) -> tuple[int, bool, int, int]:
    return sequence.order


def _drop(line: list[Sequence], sequence: Sequence) -> None:
    """Takes it out of a line, which is in order of seniority."""
    removed = line.pop(bisect.bisect_left(line, sequence.order, key=_seniority))
    assert removed is sequence, "a line is out of order"


def _all_keys(sequences: Iterable[Sequence]) -> Iterator[bytes]:
    for sequence in sequences:
        yield from sequence.known_keys
