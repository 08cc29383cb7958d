"""Files that gateways need (tokenizer, template, generation settings), by their hash: fetched from a worker once, kept.

Owns the cache. The one rule: what leaves here has the hash that was asked for, whatever a worker sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from typing import Final

import grpc

from router.config import AssetsConfig
from router.fleet import SERVING, Fleet
from shared.errors import Reason, TrunklineError, from_rpc
from shared.rpc import Channels
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

READ_BYTES: Final = 2 << 20
READ_TIMEOUT_S: Final = 10.0


class _Unfit(Exception):
    """What a worker sent is not the file; the text says why."""


class Assets:
    """See the module."""

    def __init__(self, fleet: Fleet, channels: Channels, config: AssetsConfig) -> None:
        self._fleet = fleet
        self._channels = channels
        self._capacity = config.cache_mb << 20
        self._largest = config.max_file_mb << 20
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._fetching = asyncio.Lock()  # one file at a time: many gateways ask for the same one at once

    async def get(self, sha256: str) -> bytes:
        """The file. Raises VERSION_GONE if no worker that can be reached has it."""
        if sha256 not in self._cache:
            async with self._fetching:
                if sha256 not in self._cache:
                    self._keep(sha256, await self._fetch(sha256))
        self._cache.move_to_end(sha256)
        return self._cache[sha256]

    def _keep(self, sha256: str, data: bytes) -> None:
        self._cache[sha256] = data
        self._size += len(data)
        while self._size > self._capacity and len(self._cache) > 1:
            self._size -= len(self._cache.popitem(last=False)[1])

    async def _fetch(self, sha256: str) -> bytes:
        for address in self._holders(sha256):
            try:
                return await self._read(address, sha256)
            except grpc.aio.AioRpcError as exc:
                _log.warning("asset %s from %s failed: %s", sha256[:16], address, from_rpc(exc).reason)
            except _Unfit as exc:
                _log.error("asset %s from %s was refused: %s", sha256[:16], address, exc)
        raise TrunklineError(Reason.VERSION_GONE, "no replica has this file")

    def _holders(self, sha256: str) -> list[str]:
        return [
            worker.address
            for worker in self._fleet.distinct()
            if worker.state in SERVING and any(sha256 in v.assets.values() for v in worker.versions.values())
        ]

    async def _read(self, address: str, sha256: str) -> bytes:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.get(address))
        digest, data, total = hashlib.sha256(), bytearray(), 1
        while len(data) < total:
            request = worker_pb2.GetAssetRequest(sha256=sha256, offset=len(data), max_bytes=READ_BYTES)
            piece = await stub.GetAsset(request, timeout=READ_TIMEOUT_S)
            total = piece.total
            if total > self._largest:
                raise _Unfit(f"it has {total} bytes, the limit is {self._largest}")
            if not piece.data and total:
                raise _Unfit(f"it ends at {len(data)} of {total} bytes")
            digest.update(piece.data)
            data += piece.data
        if digest.hexdigest() != sha256:
            raise _Unfit("its hash is another")
        return bytes(data)
