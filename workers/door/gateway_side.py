"""The side of the door that faces gateways: their Outputs streams, and what they say on them.

Owns the meaning of Hello, Ack, Cancel and Stop. The one rule: `disconnect` follows every `connect`, however the stream
ended.
"""

from __future__ import annotations

from collections.abc import Callable

from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.wire import HEARTBEAT_S, Stamp, Version
from trunkline.worker.v1 import worker_pb2
from workers.door import events
from workers.door.hello import reconcile
from workers.door.holdings import Holdings
from workers.door.intake import Served
from workers.door.pressure import Pressure
from workers.door.stream import Pulse, Stream, Window

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
LEAST_MESSAGE_BYTES = 16 * 1024


class GatewaySide:
    """See the module."""

    def __init__(
        self,
        holdings: Holdings,
        pressure: Pressure,
        clock: Clock,
        pulse: Callable[[], Pulse],
        *,
        worker_id: str,
        build: str,
        protocol: Version,
        window: Window,
    ) -> None:
        self._holdings = holdings
        self._pressure = pressure
        self._clock = clock
        self._pulse = pulse
        self._worker_id = worker_id
        self._build = build
        self._protocol = protocol
        self._window = window

    def connect(self, hello: worker_pb2.Hello, wake: Callable[[], None]) -> Stream:
        """A gateway's stream begins: first connect, late open and reconnect alike. Raises if it cannot."""
        served = self._check(hello)
        outlet = self._holdings.outlets.outlet(hello.id, hello.incarnation, hello.lane)
        stream = Stream(
            self._hello(hello, served),
            outlet,
            self._clock,
            self._pulse,
            wake,
            window=self._window,
            max_bytes=hello.max_message_bytes or MAX_MESSAGE_BYTES,
        )
        self._holdings.outlets.connect(stream)
        done = reconcile(hello, list(outlet.deliveries.values()), self._stamp)
        for delivery in done.open:
            stream.open(delivery)
        for delivery, choice, at_index in done.stop:
            self._holdings.stop(delivery, choice, at_index)
        for delivery in done.drop:
            self._holdings.drop(delivery)
        for request_id, event in done.say:
            stream.notice_id(event, request_id)
        return stream

    def hears(self, stream: Stream, said: worker_pb2.OutputsRequest) -> None:
        """What a gateway says after its Hello. Raises BAD_FIELD if it makes no sense."""
        match said.WhichOneof("message"):
            case "ack":
                self._ack(stream, said.ack.seq)
            case "cancel":
                self._cancel(stream, said.cancel)
            case "stop":
                self._stop(stream, said.stop)
            case "heartbeat":
                pass
            case other:
                raise TrunklineError(Reason.BAD_FIELD, f"{other or 'an empty message'} is not expected here")

    def disconnect(self, stream: Stream) -> None:
        """A stream has ended; if no newer one took its place, what it carried waits for the next."""
        self._holdings.outlets.disconnect(stream)

    def _check(self, hello: worker_pb2.Hello) -> Served:
        if hello.protocol_major != self._protocol.major:
            raise TrunklineError(Reason.PROTOCOL_MISMATCH, f"protocol {hello.protocol_major} is not spoken here")
        if not (hello.id and hello.incarnation and hello.stream_generation):
            raise TrunklineError(Reason.BAD_FIELD, "Hello must have id, incarnation and stream_generation")
        if hello.lane not in (worker_pb2.LANE_TOKENS, worker_pb2.LANE_BULK):
            raise TrunklineError(Reason.BAD_FIELD, "Hello must name a lane")
        if 0 < hello.max_message_bytes < LEAST_MESSAGE_BYTES:
            raise TrunklineError(Reason.BAD_FIELD, f"messages of {LEAST_MESSAGE_BYTES} bytes must be taken")
        if self._holdings.served is None:
            raise TrunklineError(Reason.WORKER_LOST, "no engine is ready")
        return self._holdings.served

    def _hello(self, hello: worker_pb2.Hello, served: Served) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            protocol_major=self._protocol.major,
            protocol_minor=self._protocol.minor,
            build=self._build,
            id=self._worker_id,
            incarnation=served.incarnation,
            stream_generation=hello.stream_generation,
            features=sorted(served.features),
            heartbeat_ms=int(HEARTBEAT_S * 1e3),
            max_message_bytes=MAX_MESSAGE_BYTES,
            lane=hello.lane,
        )

    def _stamp(self, request_id: bytes) -> Stamp | None:
        delivery = self._holdings.held.get(request_id)
        return delivery.stamp if delivery is not None else None

    def _ack(self, stream: Stream, seq: int) -> None:
        for delivery in stream.acknowledge(seq):
            self._holdings.retire(delivery)
        gateway = stream.outlet.gateway
        if gateway.pressed:
            self._pressure.judge(gateway)

    def _cancel(self, stream: Stream, order: worker_pb2.CancelOutput) -> None:
        known = order.request_id in self._holdings.held
        self._holdings.cancel(order.request_id, (order.epoch, order.attempt))
        if not known:
            stream.notice_id(events.freed(self._holdings.step), order.request_id)

    def _stop(self, stream: Stream, order: worker_pb2.StopOutput) -> None:
        stamp = (order.epoch, order.attempt)
        delivery = self._holdings.held.get(order.request_id)
        self._holdings.fences.ended(order.request_id, stamp)
        if delivery is None:
            stream.notice_id(events.freed(self._holdings.step), order.request_id)
        elif delivery.stamp <= stamp:
            self._holdings.stop(delivery, order.choice, order.at_index)
