"""Get and cancel any request of a tenant, whichever gateway owns it.

Owns the way from an id to its owner. The one rule: another tenant's request is not there. A request asked for is either
owned here, or by the gateway that its record names, or over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import grpc

from gateway.request import Request
from gateway.table import Table
from gateway.transport import PeerLost, Transport
from shared.errors import Reason, TrunklineError
from shared.ids import Identity
from shared.peers import Peers
from shared.records import Records, terminal
from trunkline.common.v1 import common_pb2
from trunkline.gateway.v1 import gateway_pb2, gateway_pb2_grpc

SEAT_S: Final = 2.0  # how long a request that was taken over waits for its worker before it is cancelled
CONFIRM_S: Final = 5.0  # how long a cancel waits for the engine


class Lookup:
    """See the module. Also what this gateway answers to others (`GatewayService`)."""

    def __init__(
        self,
        table: Table,
        records: Records,
        gateways: Peers,
        transport: Transport,
        identity: Identity,
        take_over: Callable[[str, str], Awaitable[Request | None]],
    ) -> None:
        """`take_over` (tenant, id): own a resumable request whose owner is gone; None if it cannot be."""
        self._table = table
        self._records = records
        self._gateways = gateways
        self._transport = transport
        self._identity = identity
        self._take_over = take_over

    async def resolve(self, tenant: str, client_id: str) -> str:
        """The request id behind a client's own id. Raises REQUEST_UNKNOWN, STATE_AWAY."""
        found = self._table.alias(tenant, client_id) or await self._records.alias(tenant, client_id)
        if found is None:
            raise unknown()
        return found

    async def get(self, tenant: str, request_id: str) -> common_pb2.RequestRecord:
        """The record, from the owner while it runs. Raises REQUEST_UNKNOWN, STATE_AWAY."""
        own = self._own_record(tenant, request_id)
        if own is not None:
            return own
        record = await self._stored(tenant, request_id)
        owner = self._owner(record)
        if owner is None:
            return record
        try:
            answer = await self._transport.get(owner, gateway_pb2.GetRequest(request_id=request_id, tenant=tenant))
        except (PeerLost, TrunklineError):
            return record  # the owner cannot say more than what it wrote
        return answer.record

    async def cancel(self, tenant: str, request_id: str) -> gateway_pb2.CancelResponse:
        """Cancel it at its owner. Raises REQUEST_UNKNOWN, STATE_AWAY, OWNER_LOST."""
        if self._own_record(tenant, request_id) is not None:
            return await self.cancel_own(tenant, request_id)
        record = await self._stored(tenant, request_id)
        if terminal(record.state):
            return gateway_pb2.CancelResponse(confirmed=True, state=record.state)
        owner = self._owner(record)
        if owner is not None:
            try:
                return await self._transport.cancel(
                    owner, gateway_pb2.CancelRequest(request_id=request_id, tenant=tenant)
                )  # fmt: skip
            except (PeerLost, TrunklineError):
                owner = None  # gone, or it is not its own any more
        return await self._cancel_left(tenant, request_id)

    async def _cancel_left(self, tenant: str, request_id: str) -> gateway_pb2.CancelResponse:
        """Cancel what a lost gateway has left: own it first, so that its worker hears of it."""
        request = await self._take_over(tenant, request_id)
        if request is None:
            record = await self._stored(tenant, request_id)
            if terminal(record.state):
                return gateway_pb2.CancelResponse(confirmed=True, state=record.state)
            raise _owner_lost()
        with suppress(TimeoutError):  # then no worker has it, or it is freed for want of a stream
            async with asyncio.timeout(SEAT_S):
                await request.seated.wait()
        return await self.cancel_own(tenant, request_id)

    def get_own(self, tenant: str, request_id: str) -> common_pb2.RequestRecord:
        """The record of a request owned here. Raises OWNER_MOVED, REQUEST_UNKNOWN."""
        record = self._own_record(tenant, request_id)
        if record is None:
            raise TrunklineError(Reason.OWNER_MOVED, "this gateway does not own the request")
        return record

    async def cancel_own(self, tenant: str, request_id: str) -> gateway_pb2.CancelResponse:
        """Cancel a request owned here, and wait for its engine. Raises OWNER_MOVED, REQUEST_UNKNOWN."""
        record = self.get_own(tenant, request_id)
        request = self._table.live(request_id)
        if request is None:
            return gateway_pb2.CancelResponse(confirmed=True, state=record.state)
        request.cancel(Reason.CLIENT_CANCEL)
        confirmed = await request.gone(CONFIRM_S)
        return gateway_pb2.CancelResponse(confirmed=confirmed, state=request.state)

    def _own_record(self, tenant: str, request_id: str) -> common_pb2.RequestRecord | None:
        live: Request | None = self._table.live(request_id)
        record = live.record() if live is not None else self._table.ended(request_id)
        if record is not None and record.tenant != tenant:
            raise unknown()
        return record

    async def _stored(self, tenant: str, request_id: str) -> common_pb2.RequestRecord:
        record = await self._records.get(request_id)
        if record is None or record.tenant != tenant:
            raise unknown()
        return record

    def _owner(self, record: common_pb2.RequestRecord) -> str | None:
        """Internal address of the gateway that owns it; None if it is over, or there is no such gateway."""
        info = self._gateways.snapshot().get(record.gateway_id)
        if info is None or terminal(record.state) or info.id == self._identity.id:
            return None
        return info.address


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):
    """What other gateways ask of this one; see the proto."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    async def Cancel(
        self, request: gateway_pb2.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gateway_pb2.CancelResponse:
        """Cancels a request that this gateway owns."""
        return await self._lookup.cancel_own(request.tenant, request.request_id)

    async def Get(
        self, request: gateway_pb2.GetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gateway_pb2.GetResponse:
        """Reports a request that this gateway owns."""
        return gateway_pb2.GetResponse(record=self._lookup.get_own(request.tenant, request.request_id))


def unknown() -> TrunklineError:
    """No such request of this tenant."""
    return TrunklineError(Reason.REQUEST_UNKNOWN, "no such request")


def _owner_lost() -> TrunklineError:
    return TrunklineError(Reason.OWNER_LOST, "the gateway that owns the request cannot be reached", retry_after_s=1.0)
