"""RouterService: each handler is check, call, answer. The one rule: errors are raised, the server's scope maps them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc

from router.assets import Assets
from router.catalog import Catalog
from router.dispatcher import Dispatcher
from router.policy import Verdict
from shared import rpc
from shared.errors import Reason, TrunklineError, Violation
from shared.lifecycle import Lifecycle
from shared.wire import PROTOCOL
from trunkline.router.v1 import router_pb2, router_pb2_grpc

PIECE_BYTES: Final = 1 << 20
_SHA256: Final = re.compile(r"[0-9a-f]{64}")

Context = grpc.aio.ServicerContext[Any, Any]


class RouterService(router_pb2_grpc.RouterServiceServicer):
    """See the proto."""

    def __init__(self, dispatcher: Dispatcher, catalog: Catalog, assets: Assets, lifecycle: Lifecycle) -> None:
        self._dispatcher = dispatcher
        self._catalog = catalog
        self._assets = assets
        self._lifecycle = lifecycle
        self._speaks = lifecycle.identity.protocol

    async def Submit(self, request: router_pb2.SubmitRequest, context: Context) -> router_pb2.SubmitResponse:
        """Takes one submission; pending while queued."""
        call = rpc.current()
        peer = (call.peer if call else None) or PROTOCOL
        return await self._dispatcher.submit(request, hands_back=self._speaks.hands_back and peer.hands_back)

    async def WatchModels(
        self, request: router_pb2.WatchModelsRequest, context: Context
    ) -> AsyncIterator[router_pb2.WatchModelsResponse]:
        """Reports the models served."""
        if request.protocol_major not in (0, PROTOCOL.major):
            raise TrunklineError(Reason.PROTOCOL_MISMATCH, f"protocol {PROTOCOL.text} is understood")
        async with aclosing(self._catalog.watch()) as messages:
            async for message in messages:
                yield message

    async def GetAsset(
        self, request: router_pb2.GetAssetRequest, context: Context
    ) -> AsyncIterator[router_pb2.GetAssetResponse]:
        """Reads a file that gateways need."""
        if not _SHA256.fullmatch(request.sha256):
            raise _bad("sha256", "must be 64 hexadecimal digits")
        data = await self._assets.get(request.sha256)
        for start in range(0, max(len(data), 1), PIECE_BYTES):
            yield router_pb2.GetAssetResponse(data=data[start : start + PIECE_BYTES], total=len(data))

    async def Lookup(self, request: router_pb2.LookupRequest, context: Context) -> router_pb2.LookupResponse:
        """Says where a request is in the queue."""
        if len(request.request_id) != 16:
            raise _bad("request_id", "must be 16 bytes")
        ahead = self._dispatcher.ahead(request.request_id)
        return router_pb2.LookupResponse(
            queued=ahead is not None, position=ahead or 0, queue_length=len(self._dispatcher)
        )

    async def Explain(self, request: router_pb2.ExplainRequest, context: Context) -> router_pb2.ExplainResponse:
        """Says how the router would place a request now."""
        verdicts, chosen = self._dispatcher.explain(request.request)
        return router_pb2.ExplainResponse(candidates=map(_candidate, verdicts), chosen=chosen)

    async def Drain(self, request: router_pb2.DrainRequest, context: Context) -> router_pb2.DrainResponse:
        """Refuses new work, then answers what is queued."""
        self._lifecycle.drain(request.grace_ms)
        return router_pb2.DrainResponse()


def _candidate(verdict: Verdict) -> router_pb2.Candidate:
    return router_pb2.Candidate(
        worker_id=verdict.candidate.worker_id,
        incarnation=verdict.candidate.incarnation,
        filtered_by=verdict.filtered_by,
        scores=verdict.scores,
        total=verdict.total,
    )


def _bad(field: str, description: str) -> TrunklineError:
    return TrunklineError(Reason.BAD_FIELD, "the request is not valid", violations=[Violation(field, description)])
