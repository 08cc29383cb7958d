"""What the router believes of its workers: states, reports, estimates."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from router.fleet import Fleet, Worker
from router.policy import Need, Policy, Weights
from router.scorers import Limits
from tests.fakes.clock import FakeClock
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2

LANE = ("artefact", "tok")
VERSION = common_pb2.ModelVersion(model="m", version="1", artefact_hash="artefact", tokenizer_hash="tok")
OTHER = common_pb2.ModelVersion(model="m", version="2", artefact_hash="other", tokenizer_hash="tok")


def report(incarnation: int = 1, echo: int = 0, requests: int = 0, **fields: object) -> worker_pb2.WatchResponse:
    load = common_pb2.Load(artefact_hash="artefact", requests=requests, running=requests, max_requests=8)
    return worker_pb2.WatchResponse(
        worker_id="w",
        incarnation=incarnation,
        echo_batch_seq=echo,
        loads=[load],
        heartbeat_ms=500,
        versions=[VERSION],
        **fields,
    )


@pytest.fixture
def lag() -> list[float]:
    return [0.0]


@pytest.fixture
def fleet(clock: FakeClock, lag: list[float]) -> Fleet:
    policy = Policy(Weights(), Limits(), random.Random(0))
    return Fleet(clock, policy, lambda: lag[0], max_report_age_s=7.0)


def requests(worker: Worker) -> int:
    return worker.estimate("artefact").requests


def place(fleet: Fleet, worker: Worker, count: int = 1) -> int:
    for _ in range(count):
        fleet.place(worker, Need(artefact="artefact"))
    return fleet.sealed(worker)


def later(fleet: Fleet, clock: FakeClock, seconds: float) -> None:
    clock.advance(seconds)
    fleet.judge()


def test_a_worker_takes_part_after_its_first_report(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    assert (worker.state, list(fleet.candidates(LANE)), fleet.serving(LANE)) == ("starting", [], frozenset())
    fleet.reported(worker, report())
    assert worker.state == ""
    assert [c.incarnation for c in fleet.candidates(LANE)] == [1]


def test_a_worker_without_an_engine_serves_nothing_and_is_remembered(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    fleet.reported(worker, report(incarnation=0))
    assert (worker.state, list(fleet.candidates(LANE)), list(worker.versions)) == ("starting", [], [LANE])


def test_a_silent_worker_is_suspect_then_lost_and_comes_back_with_a_report(fleet: Fleet, clock: FakeClock) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    states = []
    for seconds in (1.4, 0.2, 3.3, 0.2):
        later(fleet, clock, seconds)
        states.append((worker.state, bool(fleet.serving(LANE))))
    assert states == [("", True), ("suspect", True), ("suspect", True), ("lost", False)]
    fleet.reported(worker, report())
    assert (worker.state, fleet.serving(LANE)) == ("", frozenset({1}))


def test_a_broken_stream_makes_suspect_and_lost_after_a_second(fleet: Fleet, clock: FakeClock) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    fleet.broke(worker)
    assert worker.state == "suspect"
    later(fleet, clock, 1.1)
    assert worker.state == "lost"


def test_a_worker_at_whose_address_nothing_listens_is_lost_at_once(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    fleet.broke(worker, refused=True)
    assert worker.state == "lost"
    fleet.reported(worker, report())
    assert worker.state == ""


def test_own_lag_is_not_blamed_on_workers_but_old_reports_are_not_read_either(
    fleet: Fleet, clock: FakeClock, lag: list[float]
) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    lag[0] = 12.0
    later(fleet, clock, 12.0)
    assert worker.state == "stale"
    assert fleet.serving(LANE) == {1}
    lag[0] = 0.0
    fleet.reported(worker, report())
    assert worker.state == ""


@pytest.mark.parametrize(
    ("fields", "requests_held", "state"),
    [
        ({"engine_tick_age_ms": 2500}, 1, "stalled"),
        ({"engine_tick_age_ms": 2500}, 0, ""),
        ({"engine_tick_age_ms": 2500, "oldest_waiting_ms": 1}, 0, "stalled"),
        ({"engine_tick_age_ms": 2500, "max_step_ms": 1000}, 1, ""),
        ({"engine_tick_age_ms": 10_500, "max_step_ms": 9000}, 1, "stalled"),
        ({"draining": True}, 0, "draining"),
    ],
)
def test_engine_progress_and_drain_are_judged_apart_from_the_stream(
    fleet: Fleet, fields: dict[str, object], requests_held: int, state: str
) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report(requests=requests_held, **fields))
    assert worker.state == state


def test_load_counts_at_the_decision_and_until_a_report_has_counted_it(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report(requests=2))
    seq = place(fleet, worker, 3)
    assert (requests(worker), worker.state) == (5, "busy")
    assert next(iter(fleet.candidates(LANE))).estimate.requests == 5
    fleet.reported(worker, report(requests=2, echo=seq - 1))
    assert requests(worker) == 5
    fleet.reported(worker, report(requests=4, echo=seq))
    assert requests(worker) == 4


def test_a_batch_that_is_not_answered_at_once_closes_the_worker_until_it_is(fleet: Fleet, clock: FakeClock) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    seq = place(fleet, worker)
    (candidate,) = fleet.candidates(LANE)
    assert (candidate.busy, candidate.blocked) == (True, "")
    later(fleet, clock, 0.2)
    (candidate,) = fleet.candidates(LANE)
    assert (candidate.busy, candidate.blocked, fleet.states()) == (False, "unanswered", {"ready": 1})
    fleet.answered(worker, seq, [Need(artefact="artefact")], refused=False, draining=False)
    (candidate,) = fleet.candidates(LANE)
    assert (candidate.busy, candidate.blocked) == (False, "")


def test_what_was_refused_counts_no_longer_and_the_worker_waits_for_a_newer_report(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    seq = place(fleet, worker, 3)
    fleet.answered(worker, seq, [Need(artefact="artefact")], refused=True, draining=False)
    assert (requests(worker), worker.state) == (1, "refused")
    fleet.reported(worker, report(echo=seq - 1))
    assert worker.state == "refused"
    fleet.reported(worker, report(echo=seq, requests=1))
    assert (requests(worker), worker.state) == (1, "")


def test_a_worker_that_refused_everything_is_probed_until_it_takes_something(fleet: Fleet, clock: FakeClock) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    fleet.answered(worker, place(fleet, worker), [], refused=True, draining=False)
    assert worker.probing
    clock.advance(0.02)
    fleet.reported(worker, report(echo=1))
    fleet.answered(worker, place(fleet, worker), [Need(artefact="artefact")], refused=False, draining=False)
    assert not worker.probing


def test_a_worker_that_goes_on_refusing_is_asked_less_and_less_often(fleet: Fleet, clock: FakeClock) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    waits = []
    for number in range(1, 9):
        fleet.answered(worker, place(fleet, worker), [], refused=True, draining=False)
        started = clock.monotonic()
        while worker.state == "refused":
            clock.advance(0.005)
            fleet.reported(worker, report(echo=number))
        waits.append(round(clock.monotonic() - started, 2))
    assert waits == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5]


def test_a_refusal_for_draining_ends_new_work_at_once(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    fleet.answered(worker, place(fleet, worker), [], refused=True, draining=True)
    assert (worker.state, fleet.serving(LANE)) == ("draining", frozenset())


def test_a_batch_of_unknown_outcome_counts_until_a_report_must_have_counted_it(fleet: Fleet, clock: FakeClock) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    fleet.unknown(worker, place(fleet, worker))
    clock.advance(0.5)
    fleet.reported(worker, report())
    assert requests(worker) == 1
    clock.advance(0.6)
    fleet.reported(worker, report())
    assert requests(worker) == 0


def test_a_batch_that_was_never_written_counts_no_longer_and_the_worker_must_be_heard_first(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    fleet.unwritten(worker, place(fleet, worker))
    assert (requests(worker), worker.state) == (0, "suspect")
    fleet.reported(worker, report())
    assert worker.state == ""


def test_a_new_life_of_an_engine_starts_from_its_own_report(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report(incarnation=1, requests=5))
    place(fleet, worker, 2)
    fleet.reported(worker, report(incarnation=2, requests=0))
    assert requests(worker) == 0
    assert [c.incarnation for c in fleet.candidates(LANE)] == [2]


def test_two_addresses_of_one_worker_are_one_candidate(fleet: Fleet, clock: FakeClock) -> None:
    first, second = fleet.add("localhost:1"), fleet.add("127.0.0.1:1")
    fleet.reported(first, report())
    fleet.reported(second, report())
    (candidate,) = fleet.candidates(LANE)
    assert fleet.holder(candidate) is first
    fleet.broke(first)
    clock.advance(1.2)
    fleet.reported(second, report())
    fleet.judge()
    (candidate,) = fleet.candidates(LANE)
    assert fleet.holder(candidate) is second


def test_another_version_of_the_model_is_known_only_from_workers_that_can_be_had(
    fleet: Fleet, clock: FakeClock
) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    assert fleet.has_other_version("m", ("gone", "tok"))
    assert not fleet.has_other_version("m", LANE)
    assert not fleet.has_other_version("another", ("gone", "tok"))
    later(fleet, clock, 20.0)
    assert not fleet.has_other_version("m", ("gone", "tok"))


def test_versions_may_be_left_out_of_later_reports_and_replaced(fleet: Fleet) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    bare = report()
    del bare.versions[:]
    fleet.reported(worker, bare)
    assert list(worker.versions) == [LANE]
    changed = report()
    del changed.versions[:]
    changed.versions.append(OTHER)
    fleet.reported(worker, changed)
    assert (list(fleet.candidates(LANE)), len(fleet.candidates(("other", "tok")))) == ([], 1)


@pytest.mark.parametrize(
    ("change", "topology"),
    [
        (lambda fleet, worker: fleet.reported(worker, report(requests=1)), False),
        (lambda fleet, worker: fleet.reported(worker, report(incarnation=2)), True),
        (lambda fleet, worker: fleet.reported(worker, report(draining=True)), True),
        (lambda fleet, worker: fleet.broke(worker), True),
        (lambda fleet, worker: fleet.remove(worker), True),
    ],
    ids=["load", "new life", "drain", "broken stream", "forgotten"],
)
def test_observers_learn_whether_who_serves_what_has_changed(
    fleet: Fleet, change: Callable[[Fleet, Worker], None], topology: bool
) -> None:
    worker = fleet.add("a:1")
    fleet.reported(worker, report())
    heard: list[bool] = []
    fleet.observe(heard.append)
    change(fleet, worker)
    assert heard == [topology]
