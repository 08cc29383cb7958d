"""The router's queue: order, fairness, bounds, drain rate."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from router.queue import DrainMeter, Queue
from tests.fakes.clock import FakeClock

A = ("artefact-a", "tok")
B = ("artefact-b", "tok")


@dataclass(eq=False)
class Item:
    name: str
    tenant: str = "t"
    priority: int = 0
    begun: bool = False
    cost: int = 10
    size: int = 100
    lane: tuple[str, str] = A
    place: int = 0


def make(clock: FakeClock, capacity: int = 100, tenant_capacity: int = 100, max_bytes: int = 1 << 20) -> Queue[Item]:
    return Queue(clock, capacity, tenant_capacity, max_bytes)


def names(queue: Queue[Item], lane: tuple[str, str] = A) -> str:
    return "".join(item.name for item in queue.in_order(lane))


def test_one_tenant_is_served_in_order_of_arrival(clock: FakeClock) -> None:
    queue = make(clock)
    for name in "abc":
        queue.put(Item(name))
    assert names(queue) == "abc"


def test_higher_priority_goes_first_whoever_owns_it(clock: FakeClock) -> None:
    queue = make(clock)
    queue.put(Item("a", "x", priority=0))
    queue.put(Item("b", "x", priority=5))
    queue.put(Item("c", "y", priority=1))
    assert names(queue) == "bca"


def test_what_has_begun_goes_before_what_is_new_but_not_before_a_higher_priority(clock: FakeClock) -> None:
    queue = make(clock)
    items = [Item("a", "x"), Item("b", "y", priority=1), Item("C", "y", begun=True), Item("D", "x", begun=True)]
    for item in items:
        queue.put(item)
    assert names(queue) == "bCDa"
    assert [queue.ahead(item) for item in items] == [3, 0, 1, 2]


def test_begun_items_of_several_tenants_are_fair_among_themselves_and_come_back_to_their_place(
    clock: FakeClock,
) -> None:
    queue = make(clock)
    for name, tenant in [("A", "x"), ("B", "x"), ("C", "y"), ("D", "y")]:
        queue.put(Item(name, tenant, begun=True))
    assert names(queue) == "ACBD"
    first = next(queue.in_order(A))
    queue.take(first)
    queue.put(Item("e", "z"))
    queue.put_back(first)
    assert names(queue) == "ACBDe"


def test_tenants_alternate_by_tokens_not_by_requests(clock: FakeClock) -> None:
    queue = make(clock)
    for name in "ABC":
        queue.put(Item(name, "big", cost=30))
    for name in "abcdef":
        queue.put(Item(name, "small", cost=10))
    assert names(queue) == "AabcBdefC"


def test_a_tenant_that_comes_late_neither_waits_for_the_backlog_nor_is_repaid_for_its_absence(clock: FakeClock) -> None:
    queue = make(clock)
    for name in "abcdef":
        queue.put(Item(name, "early"))
    for item in list(queue.in_order(A))[:4]:
        queue.take(item)
    for name in "XYZ":
        queue.put(Item(name, "late"))
    assert names(queue) == "XeYfZ"


def test_an_item_put_back_stands_where_it_stood(clock: FakeClock) -> None:
    queue = make(clock)
    items = [Item(name, tenant) for name, tenant in [("a", "x"), ("A", "y"), ("b", "x"), ("B", "y"), ("c", "x")]]
    for item in items:
        queue.put(item)
    before = names(queue)
    first, second = items[0], items[2]
    queue.take(first)
    queue.take(second)
    queue.put_back(second)
    queue.put_back(first)
    assert names(queue) == before


def test_an_item_put_back_into_an_emptied_lane_goes_before_what_came_meanwhile(clock: FakeClock) -> None:
    queue = make(clock)
    item = Item("a", "x", cost=50)
    queue.put(item)
    queue.take(item)
    queue.put(Item("b", "y"))
    queue.put_back(item)
    assert names(queue) == "ab"


def test_what_is_discarded_costs_its_tenant_nothing(clock: FakeClock) -> None:
    queue = make(clock)
    dear = Item("d", "x", cost=1000)
    for item in (dear, Item("a", "y"), Item("b", "x")):
        queue.put(item)
    queue.discard(dear)
    assert names(queue) == "ab"
    queue.take(next(queue.in_order(A)))
    assert names(queue) == "b"


def test_lanes_do_not_see_one_another(clock: FakeClock) -> None:
    queue = make(clock)
    queue.put(Item("a", lane=A))
    queue.put(Item("b", lane=B))
    assert (names(queue, A), names(queue, B), len(queue), set(queue.lanes())) == ("a", "b", 2, {A, B})


def test_an_item_may_be_taken_while_the_order_is_read(clock: FakeClock) -> None:
    queue = make(clock)
    for name in "abcd":
        queue.put(Item(name))
    read = []
    for item in queue.in_order(A):
        read.append(item.name)
        queue.take(item)
    assert (read, len(queue), queue.lanes()) == (list("abcd"), 0, [])


def test_nothing_is_kept_of_a_lane_whose_items_are_all_settled(clock: FakeClock) -> None:
    queue = make(clock)
    for name in "ab":
        queue.put(Item(name))
    first, second = queue.in_order(A)
    queue.take(first)
    queue.discard(second)
    queue.settled(first, served=True)
    assert queue._lanes == {}


@pytest.mark.parametrize(
    ("item", "room"),
    [(Item("c", "x"), False), (Item("c", "y"), True), (Item("c", "y", size=900), False)],
    ids=["the tenant's share is full", "another tenant has room", "too many bytes"],
)
def test_room_ends_with_the_tenants_share_and_with_the_bytes(clock: FakeClock, item: Item, room: bool) -> None:
    queue = make(clock, capacity=3, tenant_capacity=2, max_bytes=1000)
    queue.put(Item("a", "x"))
    queue.put(Item("b", "x"))
    assert queue.has_room(item) is room


def test_room_ends_with_the_capacity(clock: FakeClock) -> None:
    queue = make(clock, capacity=2)
    queue.put(Item("a"))
    queue.put(Item("b"))
    assert not queue.has_room(Item("c", "other"))
    queue.take(next(queue.in_order(A)))
    assert queue.has_room(Item("c", "other"))


def test_position_counts_those_of_higher_priority_and_those_that_fairness_puts_before(clock: FakeClock) -> None:
    queue = make(clock)
    items = {
        name: Item(name, tenant, priority) for name, tenant, priority in [("a", "x", 0), ("b", "x", 0), ("c", "y", 0)]
    }
    for item in items.values():
        queue.put(item)
    queue.put(Item("u", "z", priority=9))
    assert {name: queue.ahead(item) for name, item in items.items()} == {"a": 1, "c": 2, "b": 3}


def test_a_drain_rate_needs_enough_departures_and_a_stall_lowers_it(clock: FakeClock) -> None:
    meter = DrainMeter(clock)
    for _ in range(meter.FEWEST - 1):
        meter.departed()
        clock.advance(0.1)
    assert meter.rate() is None
    meter.departed()
    assert meter.rate() == pytest.approx(10)
    clock.advance(1.5)
    assert meter.rate() == pytest.approx(5)


def test_a_wait_is_told_only_from_departures_of_the_same_backlog(clock: FakeClock) -> None:
    queue = make(clock)
    last = Item("z")
    for number in range(23):
        queue.put(Item(str(number)))
    queue.put(last)
    assert queue.wait_s(last) is None
    for item in list(queue.in_order(A))[:20]:
        clock.advance(0.1)
        queue.take(item)
        queue.settled(item, served=True)
    assert queue.wait_s(last) == pytest.approx(3 / 10, rel=0.1)
    for item in list(queue.in_order(A)):
        queue.take(item)
    queue.put(Item("new"))
    assert queue.wait_s(next(queue.in_order(A))) is None
