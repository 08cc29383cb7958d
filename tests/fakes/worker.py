"""A worker without an engine: a real server on a loopback port that keeps the wire's rules for routers, and misbehaves
when told to.

It holds what it admits until `finish`. `answers` are canned replies for the next items (one left over fails the test);
`hold` keeps batches unanswered; `cut` breaks calls after they were read.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc

from shared.lifecycle import bind
from shared.rpc import INTERNAL_SERVER_OPTIONS
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

Result = worker_pb2.ItemResult
Answer = Callable[[worker_pb2.Submission], Result]
Context = grpc.aio.ServicerContext[Any, Any]
Mismatch = worker_pb2.Mismatch

ASSET = b"a tokenizer, or so it seems\n" * 100_000


def version(model: str = "m", artefact: str = "artefact", number: str = "1") -> common_pb2.ModelVersion:
    return common_pb2.ModelVersion(
        model=model,
        version=number,
        artefact_hash=artefact,
        tokenizer_hash="tok",
        assets={"tokenizer.json": hashlib.sha256(ASSET).hexdigest()},
        max_context=2048,
        vocab_size=1000,
        features=["generate"],
        weight=1.0,
    )


def rejected(item: worker_pb2.Submission) -> Result:
    return Result(rejected=worker_pb2.Rejected(message="full"))


def draining(item: worker_pb2.Submission) -> Result:
    return Result(rejected=worker_pb2.Rejected(message="draining", draining=True))


def fenced(item: worker_pb2.Submission) -> Result:
    return Result(fenced=worker_pb2.Fenced(epoch=item.epoch, attempt=item.attempt + 1))


def silent(item: worker_pb2.Submission) -> Result:
    return Result()


def mismatch(what: Mismatch.What) -> Answer:
    return lambda item: Result(mismatch=Mismatch(what=what))


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """`async with FakeWorker("w1") as worker`: serves at `worker.address` inside the scope."""

    def __init__(
        self, worker_id: str = "w1", *versions: common_pb2.ModelVersion, max_requests: int = 8, heartbeat_s: float = 0.1
    ) -> None:
        self.worker_id = worker_id
        self.versions = versions or (version(),)
        self.max_requests = max_requests
        self.incarnation = int(hashlib.sha256(worker_id.encode()).hexdigest()[:8], 16)
        self.address = "127.0.0.1:0"
        self.batches: list[worker_pb2.SubmitBatchRequest] = []
        self.held: dict[bytes, worker_pb2.Submission] = {}
        self.cancelled: list[tuple[bytes, int, int]] = []
        self.admitted: set[bytes] = set()
        self.answers: deque[Answer] = deque()
        self.decide: Answer = self.admit  # where there is no canned answer
        self.assets = {hashlib.sha256(ASSET).hexdigest(): ASSET}
        self.asset_reads = 0
        self.draining = False
        self.reporting = True
        self.tick_age_ms = 0
        self._heartbeat_s = heartbeat_s
        self._free = asyncio.Event()
        self._free.set()
        self._cut = False
        self._changed = asyncio.Event()
        self._echoes: dict[int, int] = {}
        self._read = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        await self.stop()
        assert exc_type is not None or not self.answers, f"{len(self.answers)} canned answers were not asked for"

    async def start(self) -> None:
        """Serve, at the same address as before."""
        self._cut = False
        self._server = grpc.aio.server(options=INTERNAL_SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = await bind(self._server, self.address)
        await self._server.start()

    async def stop(self, grace_s: float | None = None) -> None:
        """Close the port at once, and what is connected after the grace."""
        if self._server is not None:
            await self._server.stop(grace_s)

    def hold(self) -> None:
        """Answer no batch before `let_go`."""
        self._free.clear()

    def let_go(self) -> None:
        self._free.set()

    def cut(self) -> None:
        """Break the next batch's call after it was read."""
        self._cut = True

    def finish(self) -> None:
        """All that is held ends."""
        self.held.clear()
        self.changed()

    def finish_some(self, rng: random.Random) -> None:
        """About half of what is held ends."""
        self.held = {request_id: item for request_id, item in self.held.items() if rng.random() < 0.5}
        self.changed()

    def changed(self) -> None:
        """Report now."""
        change, self._changed = self._changed, asyncio.Event()
        change.set()

    def reborn(self) -> None:
        """The engine restarts."""
        self.incarnation += 1
        self.finish()

    async def read(self, batches: int = 1) -> None:
        """Returns when so many batches have been read."""
        async with self._read:
            await self._read.wait_for(lambda: len(self.batches) >= batches)

    @property
    def load(self) -> common_pb2.Load:
        return common_pb2.Load(
            artefact_hash=self.versions[0].artefact_hash,
            running=len(self.held),
            kv_tokens_free=100_000,
            kv_tokens_total=100_000,
            requests=len(self.held),
            max_requests=self.max_requests,
        )

    async def SubmitBatch(
        self, request: worker_pb2.SubmitBatchRequest, context: Context
    ) -> worker_pb2.SubmitBatchResponse:
        async with self._read:
            self.batches.append(request)
            self._read.notify_all()
        await self._free.wait()
        if self._cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        results = [self._answer(item) for item in request.items]
        self._echoes[request.router_incarnation] = request.batch_seq
        self.changed()
        return worker_pb2.SubmitBatchResponse(incarnation=self.incarnation, results=results)

    def _answer(self, item: worker_pb2.Submission) -> Result:
        return self.answers.popleft()(item) if self.answers else self.decide(item)

    def admit(self, item: worker_pb2.Submission) -> Result:
        """Admitted while there is room."""
        if len(self.held) >= self.max_requests:
            return rejected(item)
        self.held[item.request_id] = item
        self.admitted.add(item.request_id)
        return Result(admitted=worker_pb2.Admitted())

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        first = True
        while True:
            change = self._changed
            if self.reporting:
                yield self._report(request.router_incarnation, first)
                first = False
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await change.wait()
            except TimeoutError:
                pass  # a heartbeat is due

    def _report(self, router: int, first: bool) -> worker_pb2.WatchResponse:
        return worker_pb2.WatchResponse(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            loads=[self.load],
            echo_batch_seq=self._echoes.get(router, 0),
            engine_tick_age_ms=self.tick_age_ms,
            heartbeat_ms=round(self._heartbeat_s * 1000),
            draining=self.draining,
            versions=self.versions if first else (),
        )

    async def Cancel(self, request: worker_pb2.CancelRequest, context: Context) -> worker_pb2.CancelResponse:
        self.cancelled.append((request.request_id, request.epoch, request.attempt))
        known = self.held.pop(request.request_id, None) is not None
        self.changed()
        return worker_pb2.CancelResponse(known=known)

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            versions=self.versions,
            max_requests=self.max_requests,
        )

    async def GetAsset(self, request: worker_pb2.GetAssetRequest, context: Context) -> worker_pb2.GetAssetResponse:
        self.asset_reads += 1
        data = self.assets[request.sha256]
        return worker_pb2.GetAssetResponse(
            data=data[request.offset : request.offset + request.max_bytes], total=len(data)
        )
