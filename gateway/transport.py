"""How the gateway reaches routers, workers and other gateways: the few calls it makes, behind one interface.

Owns the translation of transport failures. The one rule: a peer that answers with a reason raises `TrunklineError`; one
that cannot be reached, or breaks off without saying why, raises `PeerLost`: what became of the call is unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol, cast

import grpc

from shared.channels import refused, task_cancelled
from shared.errors import Reason, TrunklineError, from_rpc
from shared.rpc import Channels
from trunkline.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from trunkline.router.v1 import router_pb2, router_pb2_grpc
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc


class PeerLost(Exception):
    """The peer did not say what became of the call. `refused`: what was sought there is gone; no use asking again."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class OutputsStream(Protocol):
    """One open Outputs stream. `read` and `write` raise PeerLost once it is broken or cancelled."""

    async def read(self) -> worker_pb2.OutputsResponse:
        """The next message."""
        ...

    async def write(self, message: worker_pb2.OutputsRequest) -> None:
        """Send a message; waits while the peer takes none."""
        ...

    def cancel(self) -> None:
        """Break it off. Idempotent."""
        ...


class Transport(Protocol):
    """The calls. Cancelling a waiting call cancels it at the peer."""

    async def submit(
        self, address: str, request: router_pb2.SubmitRequest, timeout_s: float
    ) -> router_pb2.SubmitResponse:
        """RouterService.Submit, never repeated."""
        ...

    def outputs(self, address: str, lane: worker_pb2.Lane) -> OutputsStream:
        """Open WorkerService.Outputs; lanes use separate connections."""
        ...

    def watch_models(
        self, address: str, request: router_pb2.WatchModelsRequest
    ) -> AsyncGenerator[router_pb2.WatchModelsResponse]:
        """RouterService.WatchModels. Close the iterator to end it."""
        ...

    def asset(self, address: str, sha256: str) -> AsyncGenerator[router_pb2.GetAssetResponse]:
        """RouterService.GetAsset. Close the iterator to end it."""
        ...

    async def cancel(self, address: str, request: gateway_pb2.CancelRequest) -> gateway_pb2.CancelResponse:
        """GatewayService.Cancel at the owner."""
        ...

    async def get(self, address: str, request: gateway_pb2.GetRequest) -> gateway_pb2.GetResponse:
        """GatewayService.Get at the owner."""
        ...

    async def forget(self, address: str) -> None:
        """Connect to this address afresh the next time, without back-off. Calls on the way are not touched."""
        ...


# Without a reason of ours these codes come from a broken connection or a dying peer; it may have done the work.
_BROKEN: Final = frozenset({"UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL"})
_ASK_OWNER_S: Final = 7.0  # a cancel waits 5 s for the engine
_LANES: Final = {worker_pb2.LANE_TOKENS: "tokens", worker_pb2.LANE_BULK: "bulk"}


def failure(exc: grpc.aio.AioRpcError) -> TrunklineError | PeerLost:
    """What a failed call means."""
    error = from_rpc(exc)
    if error.metadata.get("grpc") not in _BROKEN:
        return error
    return PeerLost(f"{exc.code().name}: {exc.details() or ''}"[:300], refused=refused(exc))


class GrpcTransport:
    """The calls over gRPC."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def submit(
        self, address: str, request: router_pb2.SubmitRequest, timeout_s: float
    ) -> router_pb2.SubmitResponse:
        """RouterService.Submit."""
        stub = router_pb2_grpc.RouterServiceStub(self._channels.get(address))
        return cast(router_pb2.SubmitResponse, await _unary(stub.Submit(request, timeout=timeout_s)))

    def outputs(self, address: str, lane: worker_pb2.Lane) -> OutputsStream:
        """WorkerService.Outputs."""
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address, _LANES[lane]))
        return _GrpcOutputs(cast(Any, stub).Outputs())

    def watch_models(
        self, address: str, request: router_pb2.WatchModelsRequest
    ) -> AsyncGenerator[router_pb2.WatchModelsResponse]:
        """RouterService.WatchModels."""
        return _messages(router_pb2_grpc.RouterServiceStub(self._channels.get(address)).WatchModels(request))

    def asset(self, address: str, sha256: str) -> AsyncGenerator[router_pb2.GetAssetResponse]:
        """RouterService.GetAsset."""
        stub = router_pb2_grpc.RouterServiceStub(self._channels.get(address))
        return _messages(stub.GetAsset(router_pb2.GetAssetRequest(sha256=sha256)))

    async def cancel(self, address: str, request: gateway_pb2.CancelRequest) -> gateway_pb2.CancelResponse:
        """GatewayService.Cancel."""
        stub = gateway_pb2_grpc.GatewayServiceStub(self._channels.get(address))
        return cast(gateway_pb2.CancelResponse, await _unary(stub.Cancel(request, timeout=_ASK_OWNER_S)))

    async def get(self, address: str, request: gateway_pb2.GetRequest) -> gateway_pb2.GetResponse:
        """GatewayService.Get."""
        stub = gateway_pb2_grpc.GatewayServiceStub(self._channels.get(address))
        return cast(gateway_pb2.GetResponse, await _unary(stub.Get(request, timeout=_ASK_OWNER_S)))

    async def forget(self, address: str) -> None:
        """Connect to `address` afresh the next time."""
        await self._channels.drop(address)


async def _unary(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as exc:
        raise failure(exc) from exc


async def _messages(call: Any) -> AsyncGenerator[Any]:
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as exc:
        raise failure(exc) from exc
    finally:
        call.cancel()


class _GrpcOutputs:
    """An Outputs call. grpc raises CancelledError at readers of a call that was cancelled here; it becomes PeerLost."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._cancelled = False

    async def read(self) -> worker_pb2.OutputsResponse:
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as exc:
            raise _lost(exc) from exc
        except asyncio.CancelledError:
            if self._cancelled and not task_cancelled():
                raise PeerLost("the stream was broken off here") from None
            raise
        if message is cast(Any, grpc.aio).EOF:
            raise PeerLost("the peer ended the stream")
        return cast(worker_pb2.OutputsResponse, message)

    async def write(self, message: worker_pb2.OutputsRequest) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as exc:
            raise _lost(exc) from exc
        except asyncio.InvalidStateError as exc:
            raise PeerLost("the stream has ended") from exc
        except asyncio.CancelledError:
            if self._cancelled and not task_cancelled():
                raise PeerLost("the stream was broken off here") from None
            raise

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()


def _lost(exc: grpc.aio.AioRpcError) -> PeerLost:
    """Any end of a stream is a loss: it carries no answer that could be a refusal. WORKER_LOST: its engine is gone."""
    lost = failure(exc)
    return lost if isinstance(lost, PeerLost) else PeerLost(lost.message, refused=lost.reason is Reason.WORKER_LOST)
