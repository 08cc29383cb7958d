"""Batches to workers: one RPC each, and a sound word on whether it was written when it fails.

Owns the calls SubmitBatch and Cancel. The one rule: `Unwritten` is raised only when no byte can have left (the channel
never became ready, so the call was never made); every other failure is `OutcomeUnknown`, whatever its code says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import grpc

from shared.channels import task_cancelled
from shared.ids import Identity
from shared.rpc import Channels
from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

CANCEL_TRIES = 3
CANCEL_TIMEOUT_S = 2.0


class Unwritten(Exception):
    """The batch was certainly never written."""


class OutcomeUnknown(Exception):
    """The batch may or may not have reached the worker."""


class Batcher:
    """Sends batches and cancels to worker addresses."""

    def __init__(self, channels: Channels, identity: Identity, *, connect_s: float, timeout_s: float) -> None:
        self._channels = channels
        self._identity = identity
        self._connect_s = connect_s
        self._timeout_s = timeout_s

    async def send(
        self, address: str, seq: int, items: Iterable[worker_pb2.Submission]
    ) -> worker_pb2.SubmitBatchResponse:
        """The worker's answer. Raises Unwritten or OutcomeUnknown."""
        batch = worker_pb2.SubmitBatchRequest(
            router_id=self._identity.id, router_incarnation=self._identity.incarnation, batch_seq=seq, items=items
        )
        try:
            await self._connect(address)
            call = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address)).SubmitBatch(
                batch, timeout=self._timeout_s
            )
        except (TimeoutError, grpc.aio.UsageError) as exc:  # the latter: closed, since the worker has been forgotten
            raise Unwritten from exc
        try:
            return await call
        except grpc.aio.AioRpcError as exc:
            _log.warning("batch %d to %s failed: %s", seq, address, exc.code().name)
            raise OutcomeUnknown from exc
        except asyncio.CancelledError as exc:
            if task_cancelled():
                raise
            raise OutcomeUnknown from exc  # the channel was closed under the call, which grpc tells in this way

    async def cancel(self, address: str, request_id: bytes, stamp: Stamp) -> bool:
        """Cancels at ≤ stamp; False if the worker could not be told (its tombstones and the gateway are the backup)."""
        request = worker_pb2.CancelRequest(request_id=request_id, epoch=stamp[0], attempt=stamp[1])
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        for _ in range(CANCEL_TRIES):
            try:
                await stub.Cancel(request, timeout=CANCEL_TIMEOUT_S, wait_for_ready=True)
            except grpc.aio.AioRpcError as exc:
                _log.warning("cancel at %s failed: %s", address, exc.code().name)
            else:
                return True
        return False

    async def _connect(self, address: str) -> None:
        async with asyncio.timeout(self._connect_s):
            await self._channels.get(address).channel_ready()
