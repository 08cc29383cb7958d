"""The door on gRPC: each call is check → door → answer.

Owns the tasks of the streams. The one rule: all state is the door's; what is here ends with its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.wire import HEARTBEAT_S, PROTOCOL, Liveness, LoopLag, PeerState
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc
from workers.assets import Assets
from workers.door.door import Door
from workers.door.stream import Stream
from workers.door.watch import Versions, Watch

HELLO_S = 5.0  # how long a stream may take to say Hello
CLOSING_S = 2.0  # how long a stream that ends may take to send what is left
LAST_WRITE_S = 1.0  # and one that has ended, for the write under way

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[worker_pb2.OutputsRequest]
Sent = TypeVar("Sent", bound=Message, covariant=True)


class Source(Protocol[Sent]):
    """What has messages at times of its own: `Stream`, `Watch`."""

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        ...

    @property
    def due(self) -> float:
        """When to ask next, in seconds on the clock."""
        ...

    def next(self) -> Sent | None:
        """A message if one is due."""
        ...


async def pump(
    source: Source[Sent], write: Callable[[Sent], Awaitable[None]], wake: asyncio.Event, clock: Clock
) -> None:
    """Writes what `source` has until it is done; `wake` says that its `due` may have come nearer."""
    loop = asyncio.get_running_loop()
    while not source.done:
        wake.clear()
        message = source.next()
        if message is not None:
            await write(message)
            continue
        timer = loop.call_later(max(0.0, source.due - clock.monotonic()), wake.set)
        try:
            await wake.wait()
        finally:
            timer.cancel()


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """See `protos/trunkline/worker/v1/worker.proto`."""

    def __init__(
        self,
        door: Door,
        assets: Assets,
        clock: Clock,
        lag: LoopLag,
        *,
        worker_id: str,
        versions: Versions,
        describe: Callable[[], worker_pb2.DescribeResponse],
        drain: Callable[[worker_pb2.DrainRequest], None],
    ) -> None:
        self._door = door
        self._assets = assets
        self._clock = clock
        self._lag = lag
        self._worker_id = worker_id
        self._versions = versions
        self._describe = describe
        self._drain = drain

    async def SubmitBatch(
        self, request: worker_pb2.SubmitBatchRequest, context: Context
    ) -> worker_pb2.SubmitBatchResponse:
        """Answers per item."""
        if not request.router_incarnation:
            raise TrunklineError(Reason.BAD_FIELD, "the router must have an incarnation")
        return self._door.routers.submit(request)

    async def Outputs(self, requests: Requests, context: Context) -> None:  # type: ignore[override]  # writes itself
        """One gateway's stream."""
        hello = await _hello(requests)
        wake = asyncio.Event()
        stream = self._door.gateways.connect(hello, wake.set)
        liveness = Liveness(self._clock, hello.heartbeat_ms / 1e3 or HEARTBEAT_S)
        try:
            async with asyncio.TaskGroup() as group:
                hearing = group.create_task(self._listen(stream, requests, liveness))
                guarding = group.create_task(self._guard(stream, liveness))
                writing = group.create_task(pump(stream, context.write, wake, self._clock))
                await asyncio.wait((hearing, guarding, writing), return_when=asyncio.FIRST_COMPLETED)
                hearing.cancel()
                guarding.cancel()
                wake.set()
                await asyncio.wait((writing,), timeout=LAST_WRITE_S)  # grpc sends no status while a write is under way
                writing.cancel()
        finally:
            self._door.gateways.disconnect(stream)
        if stream.closing is not None:
            raise stream.closing

    async def Watch(  # type: ignore[override]  # writes itself
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> None:
        """One router's reports."""
        if request.protocol_major != PROTOCOL.major:
            raise TrunklineError(Reason.PROTOCOL_MISMATCH, f"protocol {request.protocol_major} is not spoken here")
        wake = asyncio.Event()
        watch = Watch(self._door, self._clock, self._worker_id, self._versions, request.router_incarnation, wake.set)
        self._door.loads.listeners[watch.changed] = None
        try:
            await pump(watch, context.write, wake, self._clock)
        finally:
            del self._door.loads.listeners[watch.changed]

    async def Cancel(self, request: worker_pb2.CancelRequest, context: Context) -> worker_pb2.CancelResponse:
        """Ends a request at ≤ (e, a)."""
        known = self._door.routers.cancel(request.request_id, (request.epoch, request.attempt))
        return worker_pb2.CancelResponse(known=known)

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeResponse:
        """What the worker is."""
        return self._describe()

    async def GetAsset(self, request: worker_pb2.GetAssetRequest, context: Context) -> worker_pb2.GetAssetResponse:
        """A piece of a file."""
        data, total = self._assets.piece(request.sha256, request.offset, request.max_bytes)
        return worker_pb2.GetAssetResponse(data=data, total=total)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        """Draining begins."""
        self._drain(request)
        return worker_pb2.DrainResponse()

    async def _listen(self, stream: Stream, requests: Requests, liveness: Liveness) -> None:
        """Hears the gateway until it ends its side or says what makes no sense."""
        try:
            async for request in requests:
                liveness.heard()
                self._door.gateways.hears(stream, request)
        except TrunklineError as error:
            stream.abandon(error)
        else:
            stream.abandon(TrunklineError(Reason.CLIENT_GONE, "the gateway has ended the stream"))

    async def _guard(self, stream: Stream, liveness: Liveness) -> None:
        """Returns when the gateway is lost, or takes too long to read what is left."""
        closing_at: float | None = None
        while closing_at is None or self._clock.monotonic() - closing_at < CLOSING_S:
            await asyncio.sleep(HEARTBEAT_S)
            if liveness.judge(self._lag.lag_s()) is PeerState.LOST:
                stream.abandon(TrunklineError(Reason.CLIENT_GONE, "the gateway was silent for too long"))
                return
            if stream.closing is not None and closing_at is None:
                closing_at = self._clock.monotonic()


async def _hello(requests: Requests) -> worker_pb2.Hello:
    try:
        async with asyncio.timeout(HELLO_S):
            first = await anext(requests, None)
    except TimeoutError:
        first = None
    if first is None or not first.HasField("hello"):
        raise TrunklineError(Reason.BAD_FIELD, "a stream must begin with Hello")
    return first.hello
