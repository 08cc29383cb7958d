"""The router's choice: filters, scores, ties."""

from __future__ import annotations

import random
from dataclasses import replace
from time import perf_counter

import pytest

from router.policy import Candidate, Need, Policy, Weights
from router.scorers import SCORERS, Estimate, Limits

LIMITS = Limits(prefill_tokens=1000)
IDLE = Estimate(max_requests=10, kv_available=1000, kv_total=1000)


def policy(seed: int = 0) -> Policy:
    return Policy(Weights(), LIMITS, random.Random(seed))


def candidate(incarnation: int, estimate: Estimate = IDLE, blocked: str = "") -> Candidate:
    return Candidate(f"w{incarnation}", incarnation, estimate, blocked, score=policy().base_score(estimate))


@pytest.mark.parametrize(
    "worse",
    [
        replace(IDLE, requests=1),
        replace(IDLE, choices=3),
        replace(IDLE, prefill_tokens=50),
        replace(IDLE, kv_reserved=100),
    ],
    ids=["requests", "choices", "prefill", "kv"],
)
def test_the_less_loaded_worker_is_chosen_in_every_respect(worse: Estimate) -> None:
    for candidates in ([candidate(1, worse), candidate(2)], [candidate(2), candidate(1, worse)]):
        chosen = policy().choose(candidates, Need())
        assert chosen is not None
        assert chosen.incarnation == 2


@pytest.mark.parametrize("score", SCORERS.values(), ids=SCORERS)
def test_scores_stay_within_zero_and_one_even_beyond_every_limit(score) -> None:
    over = Estimate(99, 10, 500, 10**9, -5, 10**9, 1000)
    for estimate in (IDLE, over, Estimate()):
        assert 0.0 <= score(estimate, LIMITS) <= 1.0


@pytest.mark.parametrize(
    ("estimate", "need", "name"),
    [
        (replace(IDLE, requests=10), Need(), "requests"),
        (Estimate(), Need(), "requests"),
        (replace(IDLE, requests=1, prefill_tokens=600), Need(prefill_tokens=500), "prefill"),
        (replace(IDLE, requests=1, prefill_tokens=600), Need(prefill_tokens=400), ""),
        (replace(IDLE, requests=1), Need(prefill_tokens=2000), "kv"),
        (IDLE, Need(prefill_tokens=2000), ""),
        (IDLE, Need(excluded=frozenset({1})), "excluded"),
    ],
)
def test_filters_say_what_drops_a_worker(estimate: Estimate, need: Need, name: str) -> None:
    subject = candidate(1, estimate)
    assert policy().filter(subject, need) == name
    assert (policy().choose([subject], need) is None) == bool(name)


def test_a_blocked_worker_is_not_chosen_and_the_explanation_says_why() -> None:
    subject = candidate(1, blocked="draining")
    assert policy().choose([subject], Need()) is None
    assert policy().explain(subject, Need()).filtered_by == "draining"


def test_a_worker_that_an_earlier_request_waits_for_is_not_overtaken_on() -> None:
    assert policy().choose([candidate(1)], Need(), {1}) is None


def test_a_preferred_worker_wins_over_an_idle_one_and_the_first_named_over_the_second() -> None:
    busy = replace(IDLE, requests=8, choices=8, prefill_tokens=200, kv_reserved=600)
    candidates = [candidate(1), candidate(2, busy), candidate(3, busy)]
    chosen = policy().choose(candidates, Need(preferred=(3, 2)))
    assert chosen is not None
    assert chosen.incarnation == 3


def test_a_preferred_worker_without_room_is_not_waited_for() -> None:
    chosen = policy().choose([candidate(1), candidate(2, replace(IDLE, requests=10))], Need(preferred=(2,)))
    assert chosen is not None
    assert chosen.incarnation == 1


def test_ties_are_spread_and_repeat_with_the_seed() -> None:
    candidates = [candidate(i) for i in range(1, 5)]

    def draws(seed: int) -> list[int]:
        subject = policy(seed)
        return [c.incarnation for _ in range(200) if (c := subject.choose(candidates, Need())) is not None]

    assert draws(1) == draws(1)
    assert set(draws(1)) == {1, 2, 3, 4}
    assert all(draws(1).count(i) > 25 for i in range(1, 5))


def test_the_explained_total_is_the_score_that_decides() -> None:
    subject = candidate(1, replace(IDLE, requests=3, kv_reserved=300))
    verdict = policy().explain(subject, Need(preferred=(1,)))
    weights = Weights()
    total = sum(weights.of(name) * score for name, score in verdict.scores.items()) / 2.0
    assert verdict.total == pytest.approx(total)
    assert verdict.total > subject.score


def test_a_decision_among_a_thousand_workers_is_quick() -> None:
    rng = random.Random(3)
    candidates = [
        candidate(i, replace(IDLE, requests=rng.randrange(9), kv_reserved=rng.randrange(900))) for i in range(1, 1001)
    ]
    subject, need = policy(), Need(prefill_tokens=10, excluded=frozenset({1, 2}))
    started = perf_counter()
    for _ in range(50):
        subject.choose(candidates, need)
    assert (perf_counter() - started) / 50 < 0.002, "a decision takes more than ten times what it should"
