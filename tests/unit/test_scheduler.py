"""The scheduler's order: who runs, who waits, who has to leave, and that everybody gets through."""

from __future__ import annotations

import pytest

from tests.fakes.engine_rig import Rig, admit
from workers.engine import messages as m
from workers.engine.blocks import BlockPool
from workers.engine.messages import Finish
from workers.engine.scheduler import Limits, Plan, Scheduler
from workers.engine.sequence import Request, generation

SHARED = b"s" * 32


class Desk:
    """A scheduler whose sequences all draw token 7."""

    def __init__(self, blocks: int = 32, batch_tokens: int = 64, seqs: int = 8, cap: int = 3) -> None:
        self.scheduler = Scheduler(Limits(batch_tokens, seqs, 100, 4096, cap), BlockPool(blocks))
        self.rank = 0

    def add(self, key: int, prompt: list[int], max_tokens: int = 8, **rest: object) -> Request:
        self.rank += 1
        request = generation(admit(key, prompt, max_tokens, **rest), self.rank, 0.0, (), 4096)  # type: ignore[arg-type]
        assert self.scheduler.add(request) is None
        return request

    def step(self) -> Plan:
        """One step; sequences that reach their length end."""
        plan = self.scheduler.plan()
        for span in plan.spans:
            self.scheduler.advance(span)
        for sequence in plan.sampled:
            sequence.append(7)
            if sequence.full:
                self.scheduler.finish(sequence, Finish.LENGTH)
        self.scheduler.check()
        return plan


def shape(plan: Plan) -> list[tuple[int, int, int]]:
    """(key, start, count) of each span."""
    return [(span.sequence.request.key, span.start, span.count) for span in plan.spans]


def test_decodes_come_first_and_prefill_chunks_fill_the_rest_of_the_budget() -> None:
    desk = Desk(batch_tokens=16, seqs=8)
    desk.add(1, [1] * 10)
    assert shape(desk.step()) == [(1, 0, 10)]
    desk.add(2, [2] * 40)
    desk.add(3, [3] * 4)
    plan = desk.step()
    assert shape(plan) == [(1, 10, 1), (2, 0, 15)]
    assert (plan.decode_tokens, plan.prefill_tokens) == (1, 15)
    assert shape(desk.step()) == [(1, 11, 1), (2, 15, 15)]
    assert shape(desk.step()) == [(1, 12, 1), (2, 30, 10), (3, 0, 4)]
    assert shape(desk.step()) == [(1, 13, 1), (2, 40, 1), (3, 4, 1)]


def test_a_chunk_draws_a_token_only_when_it_reaches_the_end_of_the_prompt() -> None:
    desk = Desk(batch_tokens=8)
    desk.add(1, [1] * 20)
    assert [desk.step().spans[0].samples for _ in range(3)] == [False, False, True]


def test_the_line_is_by_priority_then_by_arrival() -> None:
    desk = Desk(seqs=1)
    for key, priority in ((1, 0), (2, 0), (3, 5)):
        desk.add(key, [1] * 4, 2, priority=priority)
    order = [shape(desk.step())[0][0] for _ in range(6)]
    assert order == [3, 3, 1, 1, 2, 2]


def test_what_begun_elsewhere_goes_before_what_waits_but_not_before_a_higher_priority() -> None:
    desk = Desk(seqs=1)
    desk.add(1, [1] * 4, 2)
    assert shape(desk.step())[0][0] == 1
    desk.add(2, [2] * 4, 2)
    desk.add(3, [3] * 4, 4, emitted=[7, 7])
    desk.add(4, [4] * 4, 2, priority=1)
    order = [shape(desk.step())[0][0] for _ in range(7)]
    assert order == [1, 4, 4, 3, 3, 2, 2]


def test_whoever_does_not_fit_holds_back_those_behind_him() -> None:
    desk = Desk(blocks=4, seqs=8)
    desk.add(1, [1] * 30, 10)
    desk.step()
    desk.add(2, [2] * 40, 2)
    desk.add(3, [3] * 2, 2)
    for _ in range(9):
        assert [key for key, _, _ in shape(desk.step())] == [1]
    assert [key for key, _, _ in shape(desk.step())] == [2]


def test_a_prompt_is_admitted_only_with_blocks_for_all_of_it() -> None:
    desk = Desk(blocks=4, batch_tokens=16)
    desk.add(1, [1] * 60, 2)
    desk.step()
    assert desk.scheduler.pool.counts.used == 4


def test_at_least_one_token_is_computed_when_everything_is_cached() -> None:
    desk = Desk()
    for key in (1, 2):
        desk.add(key, [5] * 32, 1, cache_scope=SHARED)
    assert shape(desk.step()) == [(1, 0, 32), (2, 0, 32)]
    desk.add(3, [5] * 32, 1, cache_scope=SHARED)
    desk.add(4, [5] * 33, 1, cache_scope=SHARED)
    assert shape(desk.step()) == [(3, 16, 16), (4, 32, 1)]


def test_two_requests_without_a_scope_share_nothing_while_both_run() -> None:
    desk = Desk()
    desk.add(1, [5] * 40)
    desk.step()
    desk.add(2, [5] * 40)
    assert shape(desk.step()) == [(1, 40, 1), (2, 0, 40)]


def test_scopes_do_not_see_one_anothers_blocks_and_no_scope_sees_none() -> None:
    desk = Desk()
    scopes = (SHARED, b"t" * 32, b"", b"")
    for key, scope in enumerate(scopes):
        desk.add(key, [5] * 40, 1, cache_scope=scope)
        assert shape(desk.step()) == [(key, 0, 40)]
    assert desk.scheduler.pool.counts.cached == 4


@pytest.mark.parametrize("scope", [b"", SHARED])
def test_choices_compute_the_shared_prompt_once_and_only_then_start(scope: bytes) -> None:
    desk = Desk(batch_tokens=24)
    desk.add(1, [5] * 40, 3, choices=3, cache_scope=scope)
    desk.add(2, [6] * 4, 3)
    assert shape(desk.step()) == [(1, 0, 24)]
    assert shape(desk.step()) == [(1, 24, 16), (2, 0, 4)]
    assert shape(desk.step()) == [(1, 40, 1), (2, 4, 1), (1, 32, 8), (1, 32, 8)]
    assert desk.scheduler.pool.counts.used == 2 + 3 + 1


def test_when_the_first_choice_has_ended_the_next_one_computes_the_rest_of_the_prompt_alone() -> None:
    desk = Desk(batch_tokens=16, seqs=8)
    request = desk.add(1, [5] * 40, 3, choices=3)
    desk.step()
    desk.scheduler.finish(request.sequences[0], Finish.STOP)
    assert shape(desk.step()) == [(1, 16, 16)]
    assert shape(desk.step()) == [(1, 32, 8)]
    assert shape(desk.step()) == [(1, 40, 1), (1, 32, 8)]


def test_the_most_junior_leaves_and_returns_to_its_cached_prefix() -> None:
    desk = Desk(blocks=6, batch_tokens=64)
    desk.add(1, [1] * 30, 40)
    desk.add(2, [2] * 30, 40)
    while not desk.scheduler.preemptions:
        plan = desk.step()
    assert [key for key, _, _ in shape(plan)] == [1]
    assert [(sequence.request.key, sequence.computed) for sequence in desk.scheduler.waiting] == [(2, 0)]
    while len(plan.spans) < 2 and desk.scheduler.requests:
        plan = desk.step()
        if any(key == 2 for key, _, _ in shape(plan)):
            break
    start = next(start for key, start, _ in shape(plan) if key == 2)
    assert start >= 16


def test_a_higher_priority_is_the_last_to_leave() -> None:
    desk = Desk(blocks=6, batch_tokens=64)
    desk.add(1, [1] * 30, 40)
    desk.add(2, [2] * 30, 40, priority=1)
    while not desk.scheduler.preemptions:
        desk.step()
    assert [sequence.request.key for sequence in desk.scheduler.waiting] == [1]


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_preemptions_are_capped_and_everybody_gets_through(cap: int) -> None:
    desk = Desk(blocks=12, batch_tokens=32, seqs=8, cap=cap)
    requests = [desk.add(key, [key] * 5, 100, priority=key % 2) for key in range(8)]
    steps = 0
    while desk.scheduler.requests:
        desk.step()
        steps += 1
        assert steps < 2000, "livelock"
    preemptions = [request.sequences[0].preemptions for request in requests]
    assert sum(preemptions) == desk.scheduler.preemptions
    assert max(preemptions) <= cap
    assert (desk.scheduler.preemptions > 0) == (cap > 0)


def test_a_sequence_that_was_preempted_often_enters_with_all_it_can_ever_need() -> None:
    desk = Desk(blocks=12, cap=1)
    request = desk.add(1, [1] * 5, 100)
    request.sequences[0].preemptions = 1
    desk.step()
    assert desk.scheduler.pool.counts.used == 7


def test_a_sequence_that_was_preempted_often_is_no_victim_even_of_a_senior() -> None:
    desk = Desk(blocks=7, cap=1)
    desk.add(1, [1] * 5, 100)
    while (
        desk.scheduler.running == [] or desk.scheduler.running[0].held < 4 or len(desk.scheduler.running[0].tokens) < 62
    ):
        desk.step()
    desk.add(2, [2] * 5, 27).sequences[0].preemptions = 1
    desk.step()
    assert [sequence.held for sequence in desk.scheduler.running] == [4, 2]
    while not desk.scheduler.preemptions:
        plan = desk.step()
    assert [key for key, _, _ in shape(plan)] == [2]
    while any(sequence.request.key == 2 for sequence in desk.scheduler.running):
        plan = desk.step()
    assert [key for key, _, _ in shape(desk.step())] == [1]


def test_a_paused_request_holds_no_blocks_and_goes_on_where_it_was() -> None:
    desk = Desk()
    desk.add(1, [1] * 40, 9)
    desk.step()
    desk.step()
    desk.scheduler.pause(1, True)
    assert desk.scheduler.plan().spans == ()
    assert desk.scheduler.pool.counts.used == 0
    desk.add(2, [2] * 4, 2)
    assert shape(desk.step()) == [(2, 0, 4)]
    desk.scheduler.pause(1, False)
    assert shape(desk.step()) == [(2, 4, 1), (1, 32, 10)]
    assert desk.scheduler.preemptions == 0


def test_nothing_of_a_removed_request_is_left() -> None:
    desk = Desk()
    desk.add(1, [1] * 40, 9, choices=3)
    desk.step()
    desk.step()
    desk.scheduler.remove(1)
    counts = desk.scheduler.pool.counts
    assert (counts.used, counts.cached, desk.scheduler.held, desk.scheduler.requests) == (0, 0, 0, {})
    assert desk.scheduler.remove(1) is None


def test_what_can_never_fit_and_what_is_too_many_is_refused_with_a_reason() -> None:
    scheduler = Scheduler(Limits(8, 8, 2, 4096), BlockPool(4))
    big = generation(admit(1, [1] * 30, 36), 1, 0.0, (), 4096)
    refusal = scheduler.add(big)
    assert refusal is not None
    assert refusal.reason == "TOO_LARGE"
    assert scheduler.add(generation(admit(2, [1] * 30, 35), 2, 0.0, (), 4096)) is None
    refusal = scheduler.add(generation(admit(3, [1], 1, choices=2), 3, 0.0, (), 4096))
    assert refusal is not None
    assert refusal.reason == "QUEUE_FULL"


def test_limits_that_would_starve_decodes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_seqs 9"):
        Limits(max_batch_tokens=8, max_seqs=9, max_held=10, max_context=100)


def test_load_counts_what_runs_waits_and_is_still_to_be_computed() -> None:
    rig = Rig(blocks=16, batch_tokens=16, seqs=2)
    rig.say(admit(1, [3] * 20, 5, ignore_eos=True), admit(2, [4] * 10, 5), admit(3, [5] * 10, 5))
    rig.step()
    step = rig.notes.messages[-1]
    assert isinstance(step, m.StepOut)
    assert (step.load.running, step.load.waiting) == (1, 2)
    assert step.load.queued_prefill_tokens == 4 + 10 + 10
    assert (step.load.kv_blocks_used, step.load.kv_blocks_free, step.load.kv_blocks_cached) == (2, 14, 0)
    rig.step()
    step = rig.notes.messages[-1]
    assert isinstance(step, m.StepOut)
    assert step.load.oldest_waiting_ms == pytest.approx(10.0)
