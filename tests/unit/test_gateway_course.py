"""What a request does when an attempt ends."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.attempt import End, Kind
from gateway.course import Again, Course, CourseLimits, MoveBudget
from shared.errors import Reason, TrunklineError
from tests.fakes.clock import FakeClock
from trunkline.worker.v1 import worker_pb2

Released = worker_pb2.Released


def course(**limits: Any) -> Course:
    return Course(CourseLimits(**limits), MoveBudget(FakeClock()), random.Random(1))


def refused(reason: Reason, **metadata: str) -> End:
    return End(Kind.REFUSED, error=TrunklineError(reason, "no", metadata=metadata))


def lost(incarnation: int, *, bound: bool = True) -> End:
    return End(Kind.LOST, bound=bound, incarnation=incarnation, message="gone")


def released(why: Released.Why, incarnation: int = 7) -> End:
    return End(Kind.RELEASED, bound=True, incarnation=incarnation, why=why)


def test_attempts_ascend_in_epoch_one() -> None:
    own = course()
    assert [own.begin() for _ in range(3)] == [(1, 1), (1, 2), (1, 3)]


def test_a_lost_worker_is_excluded_for_good_and_the_first_retry_is_at_once() -> None:
    own = course()
    assert own.after(lost(7), tokens=3, routers=1) == Again(0.0)
    assert own.excluded == [7]
    assert own.migrations == 1


def test_a_move_before_the_first_token_is_no_migration() -> None:
    own = course()
    own.after(lost(7), tokens=0, routers=1)
    assert own.migrations == 0


def test_two_losses_while_running_are_suspect_but_losses_before_opening_are_not() -> None:
    own = course()
    for incarnation in range(1, 5):
        own.after(lost(incarnation, bound=False), tokens=0, routers=1)
    own.after(lost(8), tokens=1, routers=1)
    with pytest.raises(TrunklineError) as caught:
        own.after(released(Released.WHY_GROUP_FAILED), tokens=2, routers=1)
    assert caught.value.reason is Reason.POISON_SUSPECTED


def test_drains_and_overload_are_not_suspect() -> None:
    own = course()
    for number, why in enumerate([Released.WHY_DRAINING, Released.WHY_OVERLOADED] * 10):
        own.after(released(why, number + 1), tokens=number, routers=1)
    assert 1 in own.excluded
    assert len(own.excluded) <= 32


def test_attempts_without_a_new_token_are_bounded_and_tokens_start_the_count_anew() -> None:
    own = course(fruitless=3)
    unreached = End(Kind.UNREACHED)
    own.after(unreached, tokens=0, routers=1)
    own.after(unreached, tokens=0, routers=1)
    own.after(unreached, tokens=1, routers=1)
    own.after(unreached, tokens=1, routers=1)
    with pytest.raises(TrunklineError) as caught:
        own.after(unreached, tokens=1, routers=1)
    assert caught.value.reason is Reason.NO_REPLICA


def test_waits_between_fruitless_attempts_grow_up_to_a_bound() -> None:
    own = course(fruitless=20)
    waits = [own.after(End(Kind.UNREACHED), tokens=0, routers=1).after_s for _ in range(12)]
    assert waits[0] == 0
    assert 0.025 <= waits[1] <= 0.05
    assert all(wait <= 1.0 for wait in waits)
    assert waits[-1] >= 0.5


def test_no_replica_is_asked_of_every_router_once() -> None:
    own = course()
    own.after(refused(Reason.NO_REPLICA), tokens=0, routers=2)
    with pytest.raises(TrunklineError) as caught:
        own.after(refused(Reason.NO_REPLICA), tokens=0, routers=2)
    assert caught.value.reason is Reason.NO_REPLICA


def test_a_router_that_drains_says_nothing_of_the_others() -> None:
    own = course()
    waits = [own.after(refused(Reason.DRAINING), tokens=0, routers=1).after_s for _ in range(3)]
    assert waits[0] == 0
    own.after(End(Kind.UNREACHED), tokens=0, routers=1)
    own.after(released(Released.WHY_DRAINING), tokens=1, routers=1)
    bounded = course(fruitless=3)
    bounded.after(refused(Reason.DRAINING), tokens=0, routers=1)
    bounded.after(refused(Reason.DRAINING), tokens=0, routers=1)
    with pytest.raises(TrunklineError) as caught:
        bounded.after(refused(Reason.DRAINING), tokens=0, routers=1)
    assert caught.value.reason is Reason.DRAINING


def test_no_replica_while_somebody_is_avoided_tries_them_before_it_gives_up() -> None:
    own = course()
    own.after(refused(Reason.OUTCOME_UNKNOWN, incarnation=f"{7:016x}"), tokens=0, routers=1)
    assert own.excluded == [7]
    own.after(refused(Reason.NO_REPLICA), tokens=0, routers=1)
    assert own.excluded == []
    with pytest.raises(TrunklineError):
        own.after(refused(Reason.NO_REPLICA), tokens=0, routers=1)


def test_the_version_is_renewed_once_and_only_before_the_first_token() -> None:
    own = course()
    assert own.after(refused(Reason.VERSION_GONE), tokens=0, routers=1).renew
    with pytest.raises(TrunklineError) as caught:
        own.after(refused(Reason.VERSION_GONE), tokens=0, routers=1)
    assert caught.value.reason is Reason.VERSION_GONE
    late = course()
    with pytest.raises(TrunklineError):
        late.after(refused(Reason.VERSION_GONE), tokens=1, routers=1)


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.WOULD_MISS, Reason.QUEUE_EXPIRED, Reason.TOO_LARGE])
def test_other_refusals_end_it_as_they_are(reason: Reason) -> None:
    with pytest.raises(TrunklineError) as caught:
        course().after(refused(reason), tokens=0, routers=3)
    assert (caught.value.reason, caught.value.message) == (reason, "no")


def test_moves_off_a_draining_worker_are_spread_over_time_and_cost_the_lost_nothing() -> None:
    clock = FakeClock()
    budget = MoveBudget(clock, burst=2, per_s=4.0)

    def moves() -> Course:
        return Course(CourseLimits(), budget, random.Random(1))

    drained = released(Released.WHY_DRAINING)
    waits = [moves().after(drained, tokens=1, routers=1).after_s for _ in range(4)]
    assert waits == [0.0, 0.0, 0.25, 0.5]
    assert [moves().after(lost(7), tokens=1, routers=1) for _ in range(2)] == [Again(0.0)] * 2
    with pytest.raises(TrunklineError) as caught:
        moves().after(lost(7), tokens=1, routers=1)
    assert caught.value.reason is Reason.WORKER_LOST
    clock.advance(0.25)
    assert moves().after(lost(7), tokens=1, routers=1) == Again(0.0)


def test_moves_have_a_budget_that_fills_again() -> None:
    clock = FakeClock()
    budget = MoveBudget(clock, burst=2, per_s=1.0)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    clock.advance(1.5)
    assert [budget.take() for _ in range(2)] == [True, False]
