"""Where outputs go: one outlet per (gateway incarnation, lane), with a stream or waiting for one.

Owns the set of gateways that the door delivers to. The one rule: a delivery belongs to exactly one outlet from its
admission to its end, whether a stream is there or not; without one it is dropped when the grace is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from trunkline.worker.v1 import worker_pb2
from workers.door.delivery import Delivery
from workers.door.stream import Stream


@dataclass(slots=True, eq=False)
class Gateway:
    """One life of a gateway, over both lanes."""

    id: str
    incarnation: int
    pressed: bool = False  # some of its requests are paused
    outlets: dict[int, Outlet] = field(default_factory=dict)  # by lane

    @property
    def deliveries(self) -> Iterator[Delivery]:
        """All that is delivered to it."""
        for outlet in self.outlets.values():
            yield from outlet.deliveries.values()

    @property
    def retained(self) -> int:
        """Bytes kept until it acknowledges them."""
        return sum(delivery.retained for delivery in self.deliveries)


@dataclass(slots=True, eq=False)
class Outlet:
    """One lane of a gateway."""

    gateway: Gateway
    generation: int = 0  # of its newest stream
    stream: Stream | None = None
    deliveries: dict[bytes, Delivery] = field(default_factory=dict)

    def say(self, delivery: Delivery, event: worker_pb2.RequestEvent) -> None:
        """Says an event once of a delivery that has left; without a stream there is nobody to hear it."""
        if self.stream is not None:
            self.stream.notice(event, delivery)


class Outlets:
    """All of them."""

    def __init__(self, clock: Clock, grace_s: float) -> None:
        """`grace_s`: how long deliveries wait for a stream."""
        self._clock = clock
        self._grace_s = grace_s
        self._gateways: dict[int, Gateway] = {}

    def __iter__(self) -> Iterator[Outlet]:
        for gateway in self._gateways.values():
            yield from gateway.outlets.values()

    @property
    def gateways(self) -> list[Gateway]:
        """Those there are."""
        return list(self._gateways.values())

    def outlet(self, gateway_id: str, incarnation: int, lane: int) -> Outlet:
        """The one outlet, made if need be."""
        gateway = self._gateways.setdefault(incarnation, Gateway(gateway_id, incarnation))
        return gateway.outlets.setdefault(lane, Outlet(gateway))

    def attach(self, delivery: Delivery) -> None:
        """A delivery begins at its outlet: on the stream, or waiting for one."""
        outlet = delivery.outlet
        outlet.deliveries[delivery.execution.request_id] = delivery
        if outlet.stream is not None:
            outlet.stream.open(delivery)
        else:
            delivery.orphan(self._clock.monotonic() + self._grace_s)

    def detach(self, delivery: Delivery, last_word: worker_pb2.RequestEvent | None = None) -> None:
        """A delivery ends; `last_word` is the last thing said of it if its Opened was said."""
        outlet = delivery.outlet
        del outlet.deliveries[delivery.execution.request_id]
        delivery.close()
        if outlet.stream is not None and delivery.stream is outlet.stream:
            outlet.stream.leave(delivery, last_word if delivery.handle else None)

    def connect(self, stream: Stream) -> None:
        """A new stream takes the place of an older one. Raises OWNER_MOVED if it is not newer."""
        outlet = stream.outlet
        if stream.generation <= outlet.generation:
            raise TrunklineError(
                Reason.OWNER_MOVED, f"stream generation {outlet.generation} is here, {stream.generation} is not newer"
            )
        if outlet.stream is not None:
            outlet.stream.abandon(TrunklineError(Reason.OWNER_MOVED, "a newer stream took this one's place"))
        outlet.generation = stream.generation
        outlet.stream = stream
        self._orphan(outlet)

    def disconnect(self, stream: Stream) -> None:
        """A stream has ended; if it was the current one its deliveries wait for the next."""
        outlet = stream.outlet
        if outlet.stream is stream:
            outlet.stream = None
            self._orphan(outlet)

    def orphans(self) -> list[Delivery]:
        """Deliveries whose grace is over."""
        now = self._clock.monotonic()
        return [
            delivery
            for outlet in self
            for delivery in outlet.deliveries.values()
            if delivery.orphan_at is not None and delivery.orphan_at <= now
        ]

    def sweep(self) -> None:
        """Forgets gateways to which nothing is delivered."""
        for gateway in list(self._gateways.values()):
            if not any(outlet.stream or outlet.deliveries for outlet in gateway.outlets.values()):
                del self._gateways[gateway.incarnation]

    def clear(self, why: TrunklineError) -> None:
        """The engine is gone: every stream sends what is left, then ends; nothing is delivered any more."""
        for outlet in self:
            if outlet.stream is not None:
                outlet.stream.close(why)
        self._gateways.clear()

    def _orphan(self, outlet: Outlet) -> None:
        at = self._clock.monotonic() + self._grace_s
        for delivery in outlet.deliveries.values():
            delivery.orphan(at)
