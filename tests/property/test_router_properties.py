"""Properties of the router's arithmetic: fairness, order, and the load estimate, over random histories."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet import Fleet
from router.policy import Need, Policy, Weights
from router.queue import Queue
from router.scorers import Estimate, Limits
from tests.fakes.clock import FakeClock
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2

LANE = ("artefact", "tok")


@dataclass(eq=False)
class Item:
    tenant: str
    cost: int
    priority: int = 0
    begun: bool = False
    size: int = 1
    lane: tuple[str, str] = LANE
    place: int = 0


def first(queue: Queue[Item]) -> Item:
    return next(queue.in_order(LANE))


COSTS = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


@given(st.dictionaries(st.sampled_from("abcd"), COSTS, min_size=2), st.randoms(use_true_random=False))
def test_tenants_that_wait_together_get_equal_tokens_up_to_one_request_each(
    costs: dict[str, list[int]], rng: random.Random
) -> None:
    queue: Queue[Item] = Queue(FakeClock(), 1000, 1000, 1000)
    items = [Item(tenant, cost) for tenant, each in costs.items() for cost in each]
    rng.shuffle(items)
    for item in items:
        queue.put(item)
    waiting = Counter(item.tenant for item in items)
    served: Counter[str] = Counter(dict.fromkeys(costs, 0))
    while all(waiting.values()):
        item = first(queue)
        queue.take(item)
        waiting[item.tenant] -= 1
        served[item.tenant] += item.cost
        dearest = sorted((max(each) for each in costs.values()), reverse=True)
        assert max(served.values()) - min(served.values()) <= dearest[0] + dearest[1]


ARRIVALS = st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.integers(0, 2), st.booleans())


@given(st.lists(ARRIVALS, max_size=40), st.data())
def test_coming_going_and_returning_keeps_every_item_once_and_each_tenants_own_order(
    arrivals: list[tuple[str, int, int, bool]], data: st.DataObject
) -> None:
    queue: Queue[Item] = Queue(FakeClock(), 1000, 1000, 1000)
    inside: set[Item] = set()
    outside: list[Item] = []
    for tenant, cost, priority, begun in arrivals:
        item = Item(tenant, cost, priority, begun)
        queue.put(item)
        inside.add(item)
        match data.draw(st.sampled_from(["take", "discard", "back", "nothing"])):
            case "take":
                gone = first(queue)
                queue.take(gone)
                inside.remove(gone)
                outside.append(gone)
            case "discard":
                gone = data.draw(st.sampled_from(sorted(inside, key=lambda each: each.place)))
                queue.discard(gone)
                inside.remove(gone)
            case "back" if outside:
                back = outside.pop(data.draw(st.integers(0, len(outside) - 1)))
                queue.put_back(back)
                inside.add(back)
    order = list(queue.in_order(LANE))
    assert len(order) == len(queue) == len(inside)
    assert set(order) == inside
    ranks = [(item.priority, item.begun) for item in order]
    assert ranks == sorted(ranks, reverse=True)
    for own in {(item.tenant, item.priority, item.begun) for item in order}:
        places = [item.place for item in order if (item.tenant, item.priority, item.begun) == own]
        assert places == sorted(places)
    assert [queue.ahead(item) for item in order] == list(range(len(order)))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), min_size=1, max_size=30), st.integers(1, 10))
def test_taking_some_and_putting_them_back_leaves_the_order_as_it_was(
    arrivals: list[tuple[str, int]], take: int
) -> None:
    queue: Queue[Item] = Queue(FakeClock(), 1000, 1000, 1000)
    for tenant, cost in arrivals:
        queue.put(Item(tenant, cost))
    before = list(queue.in_order(LANE))
    taken = before[:take]
    for item in taken:
        queue.take(item)
    for item in taken:
        queue.put_back(item)
    assert list(queue.in_order(LANE)) == before


@dataclass
class World:
    """A worker in a model: what it holds, and messages on their way. One batch is in flight at a time."""

    held: list[Need] = field(default_factory=list)
    seen: int = 0
    batch: tuple[int, list[Need]] | None = None
    answer: tuple[int, list[Need], bool] | None = None
    reports: deque[tuple[list[Need], int]] = field(default_factory=deque)


def need(rng: random.Random) -> Need:
    prefill = rng.randrange(1, 500)
    return Need("artefact", rng.randrange(1, 4), prefill, prefill + rng.randrange(500))


def totals(needs: list[Need]) -> tuple[int, int, int, int]:
    return (
        len(needs),
        sum(each.choices for each in needs),
        sum(each.kv_tokens for each in needs),
        sum(each.prefill_tokens for each in needs),
    )


def estimated(estimate: Estimate) -> tuple[int, int, int, int]:
    return estimate.requests, estimate.choices, estimate.kv_reserved, estimate.prefill_tokens


def load(needs: list[Need], echo: int) -> worker_pb2.WatchResponse:
    requests, choices, kv, prefill = totals(needs)
    numbers = common_pb2.Load(
        artefact_hash="artefact",
        requests=requests,
        waiting=choices,
        kv_tokens_reserved=kv,
        queued_prefill_tokens=prefill,
        max_requests=1000,
    )
    version = common_pb2.ModelVersion(model="m", artefact_hash="artefact", tokenizer_hash="tok")
    return worker_pb2.WatchResponse(
        worker_id="w", incarnation=1, loads=[numbers], echo_batch_seq=echo, versions=[version], heartbeat_ms=500
    )


OPS = ["place", "arrive", "answer", "end", "other router", "report", "deliver"]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(OPS), max_size=60), st.randoms(use_true_random=False))
def test_the_estimate_is_the_last_report_plus_own_dispatches_which_that_does_not_count(
    ops: list[str], rng: random.Random
) -> None:
    """INV-3: reports and answers may be late in any interleaving."""
    fleet = Fleet(FakeClock(), Policy(Weights(), Limits(), random.Random(0)), lambda: 0.0, max_report_age_s=1e9)
    worker = fleet.add("a:1")
    fleet.reported(worker, load([], 0))
    world = World()
    last: tuple[list[Need], int] = ([], 0)
    own: dict[int, list[Need]] = {}
    for op in [*ops, "arrive", "answer", "report", *["deliver"] * len(ops), "deliver"]:
        match op:
            case "place" if world.batch is None and world.answer is None:
                needs = [need(rng) for _ in range(rng.randrange(1, 4))]
                for each in needs:
                    fleet.place(worker, each)
                seq = fleet.sealed(worker)
                world.batch, own[seq] = (seq, needs), needs
            case "arrive" if world.batch is not None:
                seq, needs = world.batch
                admitted = [each for each in needs if rng.random() < 0.7]
                world.held += admitted
                world.seen, world.batch, world.answer = seq, None, (seq, admitted, len(admitted) < len(needs))
            case "answer" if world.answer is not None:
                seq, admitted, refused = world.answer
                fleet.answered(worker, seq, admitted, refused=refused, draining=False)
                world.answer, own[seq] = None, admitted
            case "end" if world.held:
                world.held.pop(rng.randrange(len(world.held)))
            case "other router":
                world.held.append(need(rng))
            case "report":
                world.reports.append((list(world.held), world.seen))
            case "deliver" if world.reports:
                last = world.reports.popleft()
                fleet.reported(worker, load(*last))
        uncounted = [each for seq, needs in own.items() if seq > last[1] for each in needs]
        assert estimated(worker.estimate("artefact")) == totals(last[0] + uncounted)
    assert estimated(worker.estimate("artefact")) == totals(world.held)
