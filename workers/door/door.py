"""The door's state machine, whole: three sides over one set of holdings. No sockets, no tasks, no waiting.

Owns the assembly, and what happens by time alone. The one rule: call `tick` every 100 ms or so; all else happens inside
the call that causes it, and streams say by `wake` that they have something to send.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.wire import ORPHAN_GRACE_S, PROTOCOL, TOMBSTONE_S, Version
from trunkline.worker.v1 import worker_pb2
from workers.door import events
from workers.door.admission import Admission
from workers.door.engine_side import EngineSide
from workers.door.fencing import Fences
from workers.door.gateway_side import GatewaySide
from workers.door.holdings import Holdings, Observer, Send
from workers.door.intake import Served
from workers.door.ledger import Capacity
from workers.door.load import Loads
from workers.door.outlets import Outlets
from workers.door.pressure import Pressure
from workers.door.router_side import RouterSide
from workers.door.stream import Window


@dataclass(frozen=True, slots=True)
class Limits:
    """The door's own bounds."""

    orphan_grace_s: float = ORPHAN_GRACE_S
    tombstone_s: float = TOMBSTONE_S
    slow_reader_s: float = 30.0  # how long a request is paused before it ends
    retained_bytes: int = 64 * 1024 * 1024  # kept for one gateway until acknowledged
    window: Window = field(default_factory=Window)


class Door:
    """See the module."""

    def __init__(
        self,
        worker_id: str,
        build: str,
        clock: Clock,
        observer: Observer,
        limits: Limits,
        protocol: Version = PROTOCOL,
    ) -> None:
        self.closed = False
        self.draining = False  # says so; refusing what is new may come later
        self._outlets = Outlets(clock, limits.orphan_grace_s)
        self._fences = Fences(clock, ttl_s=limits.tombstone_s)
        self._holdings = Holdings(self._fences, self._outlets, observer, clock)
        self.loads = Loads(self._holdings, clock)
        self._admission = Admission(self._holdings, self.loads, clock)
        self._pressure = Pressure(
            self._holdings, clock, retained_bytes=limits.retained_bytes, slow_reader_s=limits.slow_reader_s
        )
        self.engine = EngineSide(self._holdings, self.loads, observer, clock)
        self.routers = RouterSide(self._holdings, self._admission, self.loads, observer, clock)
        self.gateways = GatewaySide(
            self._holdings,
            self._pressure,
            clock,
            lambda: self.engine.pulse,
            worker_id=worker_id,
            build=build,
            protocol=protocol,
            window=limits.window,
        )

    @property
    def served(self) -> Served | None:
        """What is served; None while no engine is ready."""
        return self._holdings.served

    @property
    def incarnation(self) -> int:
        """The worker's: its engine's life; 0 while no engine is ready."""
        return self._holdings.incarnation

    @property
    def held(self) -> int:
        """Requests here, ended ones included until their owners have all of them."""
        return len(self._holdings.held)

    @property
    def gateway_count(self) -> int:
        """Gateway lives with a stream or something to deliver."""
        return len(self._outlets.gateways)

    @property
    def fences(self) -> Fences:
        """Marks of requests that are not held."""
        return self._fences

    @property
    def retained_bytes(self) -> int:
        """Bytes kept until gateways acknowledge them."""
        return sum(gateway.retained for gateway in self._outlets.gateways)

    def engine_up(self, served: Served, capacity: Capacity, send: Send) -> None:
        """An engine is ready and empty."""
        self.engine.up(served, capacity, send)

    def engine_down(self, message: str) -> None:
        """The engine is gone, and with it the incarnation."""
        self.engine.down(message)

    def leave(self) -> None:
        """Tells routers to send no more; takes what comes from those who have not heard."""
        self.draining = True
        self.loads.changed()

    def drain(self) -> None:
        """Refuses new work from now on."""
        self._admission.draining = True
        self.leave()

    def release(self) -> None:
        """Hands what runs back to its owners, who go on elsewhere."""
        for delivery in self._holdings.live:
            event = events.released(worker_pb2.Released.WHY_DRAINING, "the worker drains")
            self._holdings.end(delivery, event, "released")

    def close(self) -> None:
        """Everything is settled: streams end, to gateways and routers alike."""
        self.closed = True
        self._outlets.clear(TrunklineError(Reason.DRAINING, "the worker has drained"))
        self.loads.changed()

    def tick(self) -> None:
        """What happens by time alone."""
        for delivery in self._outlets.orphans():
            self._holdings.drop(delivery)
        for gateway in self._outlets.gateways:
            self._pressure.judge(gateway)
        self._outlets.sweep()
        self._fences.sweep()
