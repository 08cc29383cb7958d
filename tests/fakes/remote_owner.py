"""An owner that speaks to a worker over gRPC, on a loopback port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from shared.rpc import Channels
from tests.fakes.owner import Owner
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

WAIT_S = 10.0


class RemoteOwner(Owner):
    """Reads its stream in a task of its own and acknowledges every message, unless told otherwise."""

    def __init__(
        self, channels: Channels, address: str, incarnation: int = 7, lane: worker_pb2.Lane = worker_pb2.LANE_TOKENS
    ) -> None:
        super().__init__(incarnation, lane)
        self.acknowledges = True
        self.messages = 0
        self.error: grpc.aio.AioRpcError | None = None
        self._stub = worker_pb2_grpc.WorkerServiceStub(channels.get(address, worker_pb2.Lane.Name(lane)))
        self._up: asyncio.Queue[worker_pb2.OutputsRequest | None] = asyncio.Queue()
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._limit: int | None = None

    async def connect(self, hello: worker_pb2.Hello | None = None, *, after: int | None = None) -> None:
        """A new stream. It breaks after `after` messages, if that is given."""
        hello = hello or self.hello()
        await self.lose()
        self.begin()
        self.error, self.messages, self._limit = None, 0, after
        self._up = asyncio.Queue()
        self.say(hello=hello)
        self._call = self._stub.Outputs(self._requests(self._up))
        self._task = asyncio.create_task(self._read(self._call, self._up))

    async def lose(self) -> None:
        """The stream breaks."""
        if self._task is not None and self._call is not None:
            self._call.cancel()
            await self._task
            self._task = None

    def say(self, **message: object) -> None:
        """One message up."""
        self._up.put_nowait(worker_pb2.OutputsRequest(**message))  # type: ignore[arg-type]

    async def until(self, what: Callable[[], object], most_s: float = WAIT_S) -> None:
        """Waits until something heard makes `what` true."""
        async with asyncio.timeout(most_s):
            while not what():
                self._news.clear()
                await self._news.wait()

    async def finished(self, *ids: bytes, most_s: float = WAIT_S) -> None:
        """Waits until these requests, or all, have ended."""
        await self.until(lambda: all(self.books[each].ending for each in ids or self.books), most_s)

    @property
    def broken(self) -> bool:
        """The stream has ended."""
        return self._task is None or self._task.done()

    async def _requests(self, up: asyncio.Queue[worker_pb2.OutputsRequest | None]) -> AsyncIterator[Any]:
        while (message := await up.get()) is not None:
            yield message

    async def _read(self, call: Any, up: asyncio.Queue[worker_pb2.OutputsRequest | None]) -> None:
        try:
            async for message in call:
                self.messages += 1
                self.take(message)
                if self.acknowledges and self.seq:
                    self.say(ack=worker_pb2.Ack(seq=self.seq))
                self._news.set()
                if self.messages == self._limit:
                    break
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        finally:
            call.cancel()
            up.put_nowait(None)
            self._news.set()
