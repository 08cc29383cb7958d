"""What runs in the next step: decode first, then prefill chunks, then admission, inside one token budget.

Owns the waiting and running sequences and their blocks; pure (no clock, no tensors, no randomness). The one rule: call
`plan`, launch it, `advance` each span of it, and `take` each token that it drew when it is known; nothing else moves
`computed`.

A plan may be made while the step before is in flight: then a sequence that draws in that step takes part with one token
whose value is not known (`Span.pending`), and nobody is preempted: if blocks are short, the plan is empty, and the next
one is made when it is known who ended.

Why nothing starves or livelocks: the waiting line is strict (priority, begun elsewhere, arrival, choice) and stops at
the first sequence that does not fit; the victim of a preemption is always the most junior, so the most senior always
moves; a victim keeps its prefix cached; and after `preemption_cap` preemptions a sequence enters only with all blocks
it can ever need, and is then no victim any more. A sequence that could not fit into the empty pool is refused before
it gets here.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

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
    itl_slo_ms: float = 0.0  # objective for the time between two tokens of a stream (`pacing`); 0 = none

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
    pending: bool = False  # its one token is what the step before draws, which is not known yet

    @property
    def encodes(self) -> bool:
        """True if its hidden states are wanted."""
        return isinstance(self.sequence.request.spec, Encode)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    spans: tuple[Span, ...]

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that draw a token in this step, in span order."""
        return [span.sequence for span in self.spans if span.samples]

    @property
    def encoded(self) -> list[Span]:
        """Spans whose hidden states are wanted."""
        return [span for span in self.spans if span.encodes]

    def carried(self, before: Plan) -> list[tuple[int, int]]:
        """For each pending span: its row among this step's tokens, and which pick of the step `before` it is."""
        picks = {sequence: index for index, sequence in enumerate(before.sampled)}
        rows = accumulate((span.count for span in self.spans), initial=0)
        return [(row, picks[span.sequence]) for row, span in zip(rows, self.spans, strict=False) if span.pending]

    @property
    def prefill_tokens(self) -> int:
        """Tokens of spans that are not decodes."""
        return sum(span.count for span in self.spans if span.prefill)

    @property
    def decode_tokens(self) -> int:
        """Tokens of decode spans."""
        return sum(span.count for span in self.spans if not span.prefill)

    @property
    def decode_context(self) -> int:
        """Cached tokens that the decode spans read."""
        return sum(span.start for span in self.spans if not span.prefill)


Allowance = Callable[[int, int], int]  # (sequences that decode, their cached tokens) → prefill tokens beside them


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

    def plan(self, allowance: Allowance | None = None, *, flying: bool = False) -> Plan:
        """The next step. It is empty only if everything is paused, nothing is here, or the one in flight decides.

        `allowance` bounds the prefill tokens beside sequences that decode; `flying`: a step was launched that is not
        read yet.
        """
        decoding = [sequence for sequence in self.running if not sequence.prefilling]
        if flying and self._short(decoding):
            return Plan(())
        spans = [self._span(sequence, 1) for sequence in self._decodes(decoding)]
        budget = self.limits.max_batch_tokens - len(spans)
        if allowance is not None and decoding:
            budget = min(budget, allowance(len(decoding), sum(sequence.computed for sequence in decoding)))
        prefills = self._prefills()
        while budget and (sequence := next(prefills, None)):
            spans.append(self._span(sequence, budget))
            budget -= spans[-1].count
        assert flying or bool(spans) == self.runnable, "something could run and no token moves"
        assert self.pool.writable(_written(spans)), "a shared or published block would be written"
        return Plan(tuple(spans))

    def advance(self, span: Span) -> None:
        """The span was launched: every later step finds it computed, so its full blocks become shareable."""
        sequence = span.sequence
        assert sequence.state is State.RUNNING, "a span was launched for a sequence that does not run"
        sequence.computed += span.count
        sequence.prefilling = sequence.computed < sequence.length
        sequence.pending += span.samples
        self._publish(sequence)

    def take(self, sequence: Sequence, token: int) -> None:
        """The token that a launched span drew is known: the block that it completes becomes shareable."""
        sequence.append(token)
        self._publish(sequence)

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
        wanted = sequence.wanted
        count = min(budget, wanted)
        samples = count == wanted and not isinstance(sequence.request.spec, Encode)
        return Span(sequence, sequence.computed, count, sequence.prefilling, samples, bool(sequence.pending))

    def _publish(self, sequence: Sequence) -> None:
        """Offers its blocks whose tokens are all launched and all known (a pending token has no hash)."""
        full = min(sequence.computed, sequence.length) // BLOCK_SIZE
        if full > sequence.published:
            keys = sequence.keys(full)
            for index in range(sequence.published, full):
                self.pool.publish(int(sequence.blocks[index]), keys[index])
            sequence.published = full

    def _decodes(self, decoding: list[Sequence]) -> Iterator[Sequence]:
        for sequence in decoding:
            if sequence.state is State.RUNNING and sequence.wanted and self._extend(sequence):
                yield sequence

    def _short(self, decoding: list[Sequence]) -> bool:
        """True if somebody would have to leave for the next tokens of these."""
        return sum(_at_the_edge(sequence) for sequence in decoding if sequence.wanted) > self.pool.available

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
        if request.paused or sequence.pending:
            return False
        if isinstance(request.spec, Encode):
            return True
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
        sequence.published = len(cached)
        sequence.computed = len(cached) * BLOCK_SIZE
        sequence.state = State.RUNNING
        _drop(self.waiting, sequence)
        bisect.insort(self.running, sequence, key=_seniority)
        return True

    def _extend(self, sequence: Sequence) -> bool:
        """Room for its next token, at the expense of its juniors; False when it had to leave itself."""
        while _at_the_edge(sequence):
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
        assert not victim.pending, "a sequence was preempted by a plan that could have waited"
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


def _at_the_edge(sequence: Sequence) -> bool:
    """True if its next token needs one more block."""
    return sequence.computed == sequence.held * BLOCK_SIZE


def _seniority(sequence: Sequence) -> tuple[int, bool, int, int]:
    return sequence.order


def _drop(line: list[Sequence], sequence: Sequence) -> None:
    """Takes it out of a line, which is in order of seniority."""
    removed = line.pop(bisect.bisect_left(line, sequence.order, key=_seniority))
    assert removed is sequence, "a line is out of order"


def _all_keys(sequences: Iterable[Sequence]) -> Iterator[bytes]:
    for sequence in sequences:
        yield from sequence.known_keys
