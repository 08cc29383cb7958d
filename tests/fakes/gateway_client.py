"""A gateway in this process over real sockets, and a client of it that checks the public stream's state machine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec

from gateway.app import Gateway, running
from gateway.config import GatewayConfig, LimitsConfig
from gateway.tokens import Tokenizer
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import from_rpc
from tests.fakes import mesh as fake
from tests.fakes.mesh import FakeRouter, MeshWorker, fake_mesh
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.inference.v1 import inference_pb2_grpc

SECRETS = {"k1": "tl_k1_0123456789abcdefghijABCDEFGHIJ01", "k2": "tl_k2_0123456789abcdefghijABCDEFGHIJ02"}
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
NO_STORE = "redis://127.0.0.1:1/0"  # nothing listens there


def keys_file(directory: Path) -> Path:
    """Two tenants, a and b, with one key each."""
    path = directory / "keys.json"
    keys = [
        {"id": key, "sha256": hashlib.sha256(secret.encode()).hexdigest(), "tenant": tenant,
         "scopes": ["generate", "embed", "cancel"], "models": ["*"]}
        for (key, secret), tenant in zip(SECRETS.items(), "ab", strict=True)
    ]  # fmt: skip
    path.write_text(json.dumps({"keys": keys}))
    return path


@dataclass
class Said:
    """What one stream said, as far as it got."""

    started: pb.Started | None = None
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, int] = field(default_factory=dict)
    matched: dict[int, str] = field(default_factory=dict)
    deltas: list[pb.Delta] = field(default_factory=list)
    finished: pb.Finished | None = None
    heartbeats: int = 0

    def take(self, event: pb.GenerateResponse) -> None:
        """Check the order, and keep it."""
        assert self.finished is None, "an event after Finished"
        match event.WhichOneof("event"):
            case "started":
                assert self.started is None, "two Started"
                self.started = event.started
            case "delta":
                self._delta(event.delta)
            case "heartbeat":
                assert self.started is not None, "a heartbeat before Started"
                self.heartbeats += 1
            case "finished":
                assert all(self.finishes.values()), "Finished before a choice's end"
                self.finished = event.finished

    def _delta(self, delta: pb.Delta) -> None:
        assert self.started is not None, "a delta before Started"
        assert not self.finishes.get(delta.choice), "a delta after the choice's end"
        assert delta.cursor, "a delta without a cursor"
        self.deltas.append(delta)
        self.texts[delta.choice] = self.texts.get(delta.choice, "") + delta.text
        self.ids.setdefault(delta.choice, []).extend(delta.token_ids)
        self.finishes[delta.choice] = delta.finish_reason
        self.matched[delta.choice] = delta.matched_stop


class Client:
    """A client of one gateway."""

    def __init__(self, gateway: Gateway, key: str = "k1") -> None:
        self.gateway = gateway
        self.channel = grpc.aio.insecure_channel(gateway.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {SECRETS[key]}"),)

    async def stream(self, spec: pb.GenerationSpec, said: Said | None = None, timeout_s: float | None = 20) -> Said:
        """Run one generation to its end. Raises TrunklineError."""
        said = said if said is not None else Said()
        call = self.generate(spec, timeout_s)
        try:
            async for event in call:
                said.take(event)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc(exc) from exc
        finally:
            call.cancel()
        assert said.finished is not None, "the stream ended without Finished"
        return said

    def generate(self, spec: pb.GenerationSpec, timeout_s: float | None = 20) -> Any:
        """The bare call."""
        return self.stub.Generate(pb.GenerateRequest(spec=spec), metadata=self.metadata, timeout=timeout_s)

    async def call(self, method: str, request: Any, timeout_s: float = 20) -> Any:
        """A unary call. Raises TrunklineError."""
        try:
            return await getattr(self.stub, method)(request, metadata=self.metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc(exc) from exc


@asynccontextmanager
async def serving(
    *routers: FakeRouter,
    directory: Path,
    store: str = NO_STORE,
    gateway_id: str = "g1",
    seed: int = 5,
    clock: Clock = SYSTEM_CLOCK,
    **settings: Any,
) -> AsyncIterator[Client]:
    """A gateway before these routers. When the scope ends well it owns nothing any more."""
    limits = msgspec.convert(settings.pop("limits", {}), LimitsConfig)
    config = GatewayConfig(
        id=gateway_id,
        keys_file=str(keys_file(directory)),
        grpc_listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        redis_url=store,
        routers=[router.address for router in routers],
        limits=limits,
        **{"drain_settle_ms": 0, "drain_grace_ms": 2000, **settings},
    )
    async with running(config, clock=clock, rng=random.Random(seed)) as gateway:
        while routers and not gateway.lifecycle.ready:
            await gateway.lifecycle.changed()
        client = Client(gateway)
        try:
            yield client
        finally:
            await client.channel.close()
    assert len(gateway.core.table) == 0
    assert not gateway.core.links.attempts
    assert gateway.core.links.open_streams == 0


@asynccontextmanager
async def world(
    store: str,
    directory: Path,
    *,
    workers: int = 1,
    routers: int = 1,
    fakes: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Client, list[FakeRouter], list[MeshWorker]]]:
    """A gateway before fake routers and workers."""
    async with (
        fake_mesh(workers=workers, routers=routers, **(fakes or {})) as (fronts, own),
        serving(*fronts, directory=directory, store=store, **settings) as client,
    ):
        yield client, fronts, own


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Return once it holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for belongs to someone else
            await asyncio.sleep(0.002)


async def first_token(call: Any) -> Said:
    """Read up to the first delta."""
    said = Said()
    while not said.deltas:
        said.take(await call.read())
    return said


async def rest(call: Any, said: Said) -> None:
    """Read to the end."""
    while (event := await call.read()) is not grpc.aio.EOF:
        said.take(event)


def spec(prompt: Sequence[int] | str = (5, 6, 7), **fields: Any) -> pb.GenerationSpec:
    """A generation of the one model."""
    made = pb.GenerationSpec(model=fake.MODEL, **fields)
    if isinstance(prompt, str):
        made.prompt = prompt
    else:
        made.prompt_token_ids.ids.extend(prompt)
    return made


TOKENIZER = Tokenizer(fake.tokenizer_json())


def text(ids: Sequence[int]) -> str:
    """The text of a completion's ids."""
    return TOKENIZER.decode(ids, after_text=True)


def expected(prompt: Sequence[int], choice: int, count: int) -> str:
    """The text of the first `count` tokens of a choice."""
    return text(fake.tokens(prompt, choice, count))
