"""The bounded queue: lanes that never block one another, priorities, fairness among tenants, measured drain rates.

Owns the order in which waiting requests are offered to workers. The one rule: an item leaves by `discard` or by `take`;
what was taken is later either `put_back`, to where it stood, or `settled`.

Order inside a lane: higher priority first; within one priority, what has begun and was moved here before what is new,
since it has waited its turn once and its reader is in the middle of it. Within one such level, start-time fair queueing
over tenants (Goyal, Vin and Cheng, 1996), in tokens instead of bytes. Each tenant t that waits has a tag C(t), the
level has a virtual time V:

    t starts to wait:   C(t) = max(C(t), V)
    next is the tenant with the smallest C (equal tags: the earliest arrival), and of its items the first to arrive
    its item is taken:  V = max(V, C(t)), then C(t) = C(t) + cost(item)
    the item comes back: C(t) = C(t) - cost(item)

Over any time in which two tenants both wait, the costs taken for them differ by at most the dearest item of one plus
the dearest item of the other. An item that is cancelled or expires in the queue costs its tenant nothing.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from router.policy import Lane
from shared.clock import Clock


class Queued(Protocol):
    """What the queue reads of an item, and the one field it writes."""

    @property
    def lane(self) -> Lane:
        """Items of different lanes wait for different workers."""

    @property
    def tenant(self) -> str:
        """Whose it is."""

    @property
    def priority(self) -> int:
        """Higher goes first."""

    @property
    def begun(self) -> bool:
        """It has tokens already; it goes before those of its priority that have none."""

    @property
    def cost(self) -> int:
        """Tokens it is charged at, at least 1."""

    @property
    def size(self) -> int:
        """Bytes it keeps in memory."""

    place: int  # arrival number, written by `put`


ItemT = TypeVar("ItemT", bound=Queued)


class DrainMeter:
    """How fast something empties: items per second over its last departures, None while that is not known."""

    SAMPLES = 128
    FEWEST = 16  # below this many departures, or this many seconds of them, a rate says nothing
    SHORTEST_S = 0.5

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=self.SAMPLES)

    def departed(self) -> None:
        self._times.append(self._clock.monotonic())

    def rate(self) -> float | None:
        """Counts the time since the last departure too, so that a stall lowers it."""
        if len(self._times) < self.FEWEST:
            return None
        span = self._clock.monotonic() - self._times[0]
        return (len(self._times) - 1) / span if span >= self.SHORTEST_S else None


_Rank = tuple[int, bool]
"""Priority, begun: of the greatest first."""


class _Level(Generic[ItemT]):
    """Items of one lane and rank."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[ItemT]] = {}  # each list ascends in place
        self._tag: dict[str, int] = {}
        self._virtual = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def insert(self, item: ItemT, refund: int) -> None:
        if item.tenant not in self._waiting:
            self._waiting[item.tenant] = []
            if not refund:
                self._tag[item.tenant] = max(self._tag.get(item.tenant, 0), self._virtual)
        self._tag[item.tenant] = self._tag.get(item.tenant, self._virtual) - refund
        bisect.insort(self._waiting[item.tenant], item, key=_place)

    def remove(self, item: ItemT, charge: int) -> None:
        items = self._waiting[item.tenant]
        index = bisect.bisect_left(items, item.place, key=_place)
        if index == len(items) or items[index] is not item:
            raise KeyError(item.place)
        del items[index]
        if charge:
            self._virtual = max(self._virtual, self._tag[item.tenant])
            self._tag[item.tenant] += charge
        if not items:
            del self._waiting[item.tenant]
            self._forget_idle()

    def in_order(self) -> Iterator[ItemT]:
        """As `take` would see it if every item offered were taken. Stands still while items come and go."""
        heads = [(self._tag[tenant], items[0].place, 0, items.copy()) for tenant, items in self._waiting.items()]
        heapq.heapify(heads)
        while heads:
            tag, _, index, items = heads[0]
            yield items[index]
            if index + 1 == len(items):
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (tag + items[index].cost, items[index + 1].place, index + 1, items))

    def _forget_idle(self) -> None:
        """A tenant that does not wait and whose tag virtual time has passed is as good as unknown."""
        if len(self._tag) > 2 * len(self._waiting) + 16:
            self._tag = {t: tag for t, tag in self._tag.items() if t in self._waiting or tag > self._virtual}


class _Lane(Generic[ItemT]):
    """Items that wait for the same workers. Lives as long as any of them may wait here or come back."""

    def __init__(self, clock: Clock) -> None:
        self.levels: dict[_Rank, _Level[ItemT]] = {}
        self.waiting = 0
        self.out = 0  # taken and not settled
        self.drain = DrainMeter(clock)  # of the present backlog: begun anew when nothing waits

    def in_order(self) -> Iterator[ItemT]:
        for rank in sorted(self.levels, reverse=True):
            yield from self.levels[rank].in_order()

    def ahead(self, item: ItemT) -> int:
        """Items that go before this one if none comes, goes or fails."""
        above = sum(len(level) for rank, level in self.levels.items() if rank > _rank(item))
        level = self.levels[_rank(item)].in_order()
        return above + next(i for i, other in enumerate(level) if other is item)


class Queue(Generic[ItemT]):
    """Every item that waits: at most `capacity` of them, `tenant_capacity` of one tenant, `max_bytes` together.

    What is put back was counted when it came: it always finds room.
    """

    def __init__(self, clock: Clock, capacity: int, tenant_capacity: int, max_bytes: int) -> None:
        self._clock = clock
        self._capacity = capacity
        self._tenant_capacity = tenant_capacity
        self._max_bytes = max_bytes
        self._lanes: dict[Lane, _Lane[ItemT]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._places = 0
        self._length = 0
        self._bytes = 0
        self.drain = DrainMeter(clock)

    def __len__(self) -> int:
        return self._length

    def lanes(self) -> list[Lane]:
        """Lanes in which something waits."""
        return [name for name, lane in self._lanes.items() if lane.waiting]

    def has_room(self, item: ItemT) -> bool:
        """Whether a new item may be put in."""
        tenant_has = self._by_tenant[item.tenant] < self._tenant_capacity
        return tenant_has and self._length < self._capacity and self._bytes + item.size <= self._max_bytes

    def put(self, item: ItemT) -> None:
        """Takes a new item; the caller has asked `has_room`."""
        self._places += 1
        item.place = self._places
        self._insert(item, refund=0)

    def put_back(self, item: ItemT) -> None:
        """Takes back an item that was taken, to where it stood."""
        self._insert(item, refund=item.cost)
        self._lanes[item.lane].out -= 1

    def take(self, item: ItemT) -> None:
        """The item goes to a worker; its tenant is charged."""
        self._lanes[item.lane].out += 1
        self._remove(item, charge=item.cost)

    def settled(self, item: ItemT, *, served: bool) -> None:
        """An item that was taken does not come back; `served` if a worker has it."""
        lane = self._lanes[item.lane]
        lane.out -= 1
        if served:
            self.drain.departed()
            lane.drain.departed()
        self._drop_idle(item.lane)

    def discard(self, item: ItemT) -> None:
        """The item will not be served; nobody is charged."""
        self._remove(item, charge=0)
        self._drop_idle(item.lane)

    def in_order(self, lane: Lane) -> Iterator[ItemT]:
        """The lane's items, first to be offered first. Items may be taken or discarded meanwhile."""
        return self._lanes[lane].in_order() if lane in self._lanes else iter(())

    def ahead(self, item: ItemT) -> int:
        """Items of the lane that go before this one, which must wait."""
        return self._lanes[item.lane].ahead(item)

    def wait_s(self, item: ItemT) -> float | None:
        """Time until the item's turn at the lane's drain rate, which must wait; None while that is not known."""
        lane = self._lanes[item.lane]
        rate = lane.drain.rate()
        return None if rate is None else lane.ahead(item) / rate

    def _insert(self, item: ItemT, refund: int) -> None:
        lane = self._lanes.get(item.lane)
        if lane is None:
            lane = self._lanes[item.lane] = _Lane(self._clock)
        level = lane.levels.get(_rank(item))
        if level is None:
            level = lane.levels[_rank(item)] = _Level()
        level.insert(item, refund)
        lane.waiting += 1
        self._length += 1
        self._bytes += item.size
        self._by_tenant[item.tenant] += 1

    def _remove(self, item: ItemT, charge: int) -> None:
        lane = self._lanes[item.lane]
        lane.levels[_rank(item)].remove(item, charge)
        lane.waiting -= 1
        if not lane.waiting:
            lane.drain = DrainMeter(self._clock)
        self._length -= 1
        self._bytes -= item.size
        self._by_tenant[item.tenant] -= 1
        if not self._by_tenant[item.tenant]:
            del self._by_tenant[item.tenant]

    def _drop_idle(self, name: Lane) -> None:
        lane = self._lanes[name]
        if not lane.waiting and not lane.out:
            del self._lanes[name]


def _rank(item: Queued) -> _Rank:
    return item.priority, item.begun


def _place(item: Queued) -> int:
    return item.place
