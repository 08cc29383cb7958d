"""Clients that come back, and a gateway in a process of its own, to kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml

from shared.errors import TrunklineError, from_rpc
from shared.ports import address_of, listen
from tests.fakes.gateway_client import SECRETS, Client, Said, keys_file
from tests.fakes.mesh import FakeRouter
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.inference.v1 import inference_pb2_grpc


class Remote(Client):
    """A client of a gateway by its address."""

    def __init__(self, address: str, http: str = "", key: str = "k1") -> None:
        self.http = http
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {SECRETS[key]}"),)


def last_cursor(said: Said) -> str:
    """Where a client would resume from."""
    return said.deltas[-1].cursor if said.deltas else ""


def resumed(client: Client, request_id: str, cursor: str, timeout_s: float = 20) -> Any:
    """The bare call."""
    request = pb.ResumeRequest(request_id=request_id, cursor=cursor)
    return client.stub.Resume(request, metadata=client.metadata, timeout=timeout_s)


async def resume(client: Client, request_id: str, cursor: str = "", said: Said | None = None) -> Said:
    """Read a generation to its end, after what `said` has. Raises TrunklineError."""
    said = said if said is not None else Said()
    said.started = None
    call = resumed(client, request_id, cursor or last_cursor(said))
    try:
        async for event in call:
            said.take(event)
    except grpc.aio.AioRpcError as exc:
        raise from_rpc(exc) from exc
    finally:
        call.cancel()
    assert said.finished is not None, "the stream ended without Finished"
    return said


async def come_back(client: Client, said: Said, patience_s: float = 15.0) -> Said:
    """Resume, again and again while the mesh says that it may work later."""
    assert said.started is not None
    request_id = said.started.request_id
    async with asyncio.timeout(patience_s):
        while True:
            try:
                return await resume(client, request_id, said=said)
            except TrunklineError as error:
                if not error.row.retryable:
                    raise
                await asyncio.sleep(error.retry_after_s or 0.1)


async def read_on(call: Any, said: Said, deltas: int) -> None:
    """Read so many deltas in all."""
    while len(said.deltas) < deltas:
        event = await call.read()
        assert event is not grpc.aio.EOF, "the stream ended early"
        said.take(event)


async def broken(call: Any, said: Said) -> TrunklineError:
    """Read until the stream breaks; the error."""
    try:
        while (event := await call.read()) is not grpc.aio.EOF:
            said.take(event)
    except grpc.aio.AioRpcError as exc:
        return from_rpc(exc)
    raise AssertionError("the stream ended well")


class Process:
    """A gateway as a process."""

    def __init__(self, process: asyncio.subprocess.Process, client: Remote) -> None:
        self.process = process
        self.client = client

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def gateway_process(
    *routers: FakeRouter, directory: Path, store: str, gateway_id: str = "g0", **settings: Any
) -> AsyncIterator[Process]:
    """`python -m gateway` before these routers, ready."""
    grpc_socket, http_socket = listen("127.0.0.1:0"), listen("127.0.0.1:0")
    address, http = address_of(grpc_socket), address_of(http_socket)
    grpc_socket.close()
    http_socket.close()
    config = {
        "id": gateway_id, "keys_file": str(keys_file(directory)), "grpc_listen": address, "http_listen": http,
        "redis_url": store, "routers": [router.address for router in routers], **settings,
    }  # fmt: skip
    path = directory / f"{gateway_id}.yaml"
    path.write_text(yaml.safe_dump(config))
    with (directory / f"{gateway_id}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "--config", str(path), stdout=log, stderr=log, env=dict(os.environ)
        )
    client = Remote(address, http)
    running = Process(process, client)
    try:
        await _ready(client)
        yield running
    finally:
        await running.kill()
        await client.channel.close()


async def _ready(client: Remote) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                models = await client.call("ListModels", pb.ListModelsRequest())
                if models.models:
                    return
            except TrunklineError:
                pass  # not yet
            await asyncio.sleep(0.1)
