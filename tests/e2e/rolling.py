"""A mesh on the engine without a model, whose processes speak the protocol minor that a test gives them, and clients as
gRPC offers them: one channel over all gateways, round robin with health checks, retries before the first answer.

The one rule: a request has failed if its client saw an error that it had no way to go on from, or other tokens than the
formula's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
import yaml
from rich.console import Console

from gateway.tokens import Tokenizer
from shared.clock import SYSTEM_CLOCK
from shared.errors import TrunklineError, from_rpc
from tests.chaos.asks import Ask, FormulaAsks, Kind
from tests.e2e.harness import Mesh, trunkctl
from tests.fakes.artefact import write_artefact
from tests.fakes.mesh import EOS, TEXT_TOKENS, tokenizer_json
from trunkctl.home import Home, write_private
from trunkctl.keys import ensure_dev_key
from trunkctl.plan import Plan, Wish, make_plan
from trunkctl.start import start_supervisor, wait_ready
from trunkctl.stop import end_mesh
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.inference.v1 import inference_pb2_grpc

MODEL: Final = "formula"
STEP_MS: Final = 15
HIDDEN: Final = 64
LONG: Final = 700  # tokens
AT_ONCE: Final = 5  # requests of one worker: while the other one is away, requests wait at routers
FIRST_PORT: Final = 29_000
SERVICE: Final = "trunkline.inference.v1.InferenceService"
SERVICE_CONFIG: Final = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": SERVICE},
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "waitForReady": True,
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
OPTIONS: Final = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)


class FormulaMesh(Mesh):
    """Use as `async with`; `roll` restarts processes as a user would."""

    def __init__(self, home: Path, plan: Plan, supervisor: subprocess.Popen[bytes]) -> None:
        super().__init__(home)
        self.plan = plan
        self._home = Home(home)
        self._supervisor = supervisor

    @classmethod
    def lay_out(cls, home: Path, counts: dict[str, int], minor: int) -> FormulaMesh:
        """Starts the supervisor of so many workers, routers, gateways, which speak this minor."""
        write_artefact(
            home / "models" / MODEL, vocab_size=TEXT_TOKENS, hidden_size=HIDDEN, eos=EOS, tokenizer=tokenizer_json()
        )
        own, first = Home(home), FIRST_PORT + 40 * (os.getpid() % 50)
        wish = Wish(
            model=MODEL, workers=counts["worker"], routers=counts["router"], gateways=counts["gateway"],
            http_port=first, grpc_port=first + 1, redis_url=None,
        )  # fmt: skip
        plan = make_plan(own, wish, first + 2)
        ensure_dev_key(own)
        write_private(own.plan, msgspec.json.encode(plan))
        for spec in plan.specs:
            if spec.role == "worker":
                engine = {"module": "tests.fakes.engine", "flags": {"step-ms": STEP_MS}, "kv_blocks": 4096}
                rewrite(own, spec.name, engine=engine, door={"max_requests": AT_ONCE})
            if spec.role != "redis":
                rewrite(own, spec.name, protocol_minor=minor)
        return cls(home, plan, start_supervisor(own, attached=True))

    async def __aenter__(self) -> FormulaMesh:
        try:
            console = Console(quiet=True)
            await asyncio.to_thread(wait_ready, self._home, self.plan, self._supervisor, SYSTEM_CLOCK, 60.0, console)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        await asyncio.to_thread(end_mesh, self._home, SYSTEM_CLOCK)
        await asyncio.to_thread(self._supervisor.wait, 60)

    def speak(self, names: Sequence[str], minor: int) -> None:
        """From their next life on these processes speak this minor."""
        for name in names:
            rewrite(self._home, name, protocol_minor=minor)

    async def roll(self, *names: str) -> str:
        """Restarts them one after the other; what the command said."""
        done = await asyncio.to_thread(trunkctl, self.home, "mesh", "roll", *names, timeout=150.0)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    @asynccontextmanager
    async def channel(self, *names: str) -> AsyncIterator[grpc.aio.Channel]:
        """One channel over these gateways, or all."""
        gateways = [process for process in self.processes("gateway") if not names or process.name in names]
        target = ",".join(f"127.0.0.1:{gateway.ports['grpc']}" for gateway in gateways)
        async with grpc.aio.insecure_channel(f"ipv4:{target}", options=OPTIONS) as channel:
            yield channel


def rewrite(home: Home, name: str, **settings: Any) -> None:
    """Changes a configuration file: mappings are merged."""
    path = home.run / f"{name}.yaml"
    config = yaml.safe_load(path.read_text())
    for key, value in settings.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(config, sort_keys=False))


class Load:
    """Requests at random moments, until the scope of `offered` ends. `failures` names those that failed."""

    def __init__(self, channel: grpc.aio.Channel, key: str, seed: int, *, logprobs: bool = False) -> None:
        self.failures: list[str] = []
        self.done: Counter[str] = Counter()  # requests by kind
        self.moved = 0  # times that a client went on from a cursor
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._rng = random.Random(seed)
        self._numbers = itertools.count(seed * 100_000)  # which keys are made of: two loads share none
        self._asks = FormulaAsks(self._rng, MODEL, Tokenizer(tokenizer_json()), (16, 96))
        self._logprobs = logprobs
        self._group: asyncio.TaskGroup

    @asynccontextmanager
    async def offered(self, rate: float) -> AsyncIterator[Load]:
        """So many requests a second inside the scope; it ends when all of them have."""
        async with asyncio.TaskGroup() as self._group:
            offering = self._group.create_task(self._offer(rate))
            yield self
            offering.cancel()

    async def begin_long(self, channel: grpc.aio.Channel, count: int) -> None:
        """So many resumable streams, long enough to outlive what follows, are under way over this channel."""
        places: list[list[str]] = []
        asks = FormulaAsks(self._rng, MODEL, Tokenizer(tokenizer_json()), (LONG, LONG))
        while len(places) < count:
            ask = asks.draw(next(self._numbers))
            if ask.kind is Kind.RESUMABLE and not ask.spec.stop_token_ids:
                places.append(["", ""])
                self._group.create_task(self._one(ask, first=channel, place=places[-1]))
        async with asyncio.timeout(30):
            while not all(cursor for _, cursor in places):  # noqa: ASYNC110 - streams say it, each by itself
                await asyncio.sleep(0.05)

    async def _offer(self, rate: float) -> None:
        for number in self._numbers:
            if self._rng.random() < 0.1:
                self._group.create_task(self._embed(number))
            else:
                self._group.create_task(self._one(self._asks.draw(number), whole=self._rng.random() < 0.2))
            await asyncio.sleep(self._rng.expovariate(rate))

    async def _one(
        self, ask: Ask, *, whole: bool = False, first: grpc.aio.Channel | None = None, place: list[str] | None = None
    ) -> None:
        kind = f"{ask.kind}{', whole' if whole else ''}"
        if self._logprobs:
            ask.spec.sampling.logprobs = 1
        try:
            async with asyncio.timeout(60):
                ids = await (self._complete(ask) if whole else self._stream(ask, first, place or ["", ""]))
        except (TrunklineError, TimeoutError) as exc:
            self.failures.append(f"{ask.number} {kind}: {exc!r}")
            return
        expected = {index: list(choice.ids) for index, choice in ask.expected.items()}
        if ids != expected:
            self.failures.append(f"{ask.number} {kind}: {ids} instead of {expected}"[:300])
        self.done[kind] += 1

    async def _embed(self, number: int) -> None:
        """Its vector depends on its ids alone."""
        ids = [number % TEXT_TOKENS, 1, 2]
        request = pb.EmbedRequest(model=MODEL, inputs=[pb.EmbedInput(token_ids=pb.TokenIds(ids=ids))])
        try:
            answer = await self._stub.Embed(request, metadata=self._metadata, timeout=60)
        except grpc.aio.AioRpcError as exc:
            self.failures.append(f"{number} embed: {from_rpc(exc)!r}")
            return
        if [len(each.values) for each in answer.embeddings] != [HIDDEN]:
            self.failures.append(f"{number} embed: {answer}"[:300])
        self.done["embed"] += 1

    async def _complete(self, ask: Ask) -> dict[int, list[int]]:
        try:
            answer = await self._stub.Complete(pb.CompleteRequest(spec=ask.spec), metadata=self._metadata, timeout=60)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc(exc) from exc
        return {choice.index: list(choice.token_ids) for choice in answer.choices}

    async def _stream(self, ask: Ask, first: grpc.aio.Channel | None, place: list[str]) -> dict[int, list[int]]:
        """Tokens by choice, over as many streams as it takes; `place`: request id and cursor."""
        ids: dict[int, list[int]] = {index: [] for index in ask.expected}
        stub = inference_pb2_grpc.InferenceServiceStub(first) if first is not None else self._stub
        call: Any = stub.Generate(pb.GenerateRequest(spec=ask.spec), metadata=self._metadata, timeout=60)
        while True:
            try:
                await _read(call, ids, place)
                return ids
            except TrunklineError as error:
                if ask.kind is Kind.ORDINARY or not (error.row.retryable and place[0]):
                    raise
                await asyncio.sleep(error.retry_after_s or 0.05)
            finally:
                call.cancel()
            self.moved += 1
            request = pb.ResumeRequest(request_id=place[0], cursor=place[1])
            call = self._stub.Resume(request, metadata=self._metadata, timeout=60)


async def _read(call: Any, ids: dict[int, list[int]], place: list[str]) -> None:
    """Read a stream to its end. Raises TrunklineError."""
    try:
        async for event in call:
            match event.WhichOneof("event"):
                case "started":
                    place[0] = event.started.request_id
                case "delta":
                    ids[event.delta.choice].extend(event.delta.token_ids)
                    place[1] = event.delta.cursor
                case "finished":
                    return
    except grpc.aio.AioRpcError as exc:
        raise from_rpc(exc) from exc
    raise AssertionError("the stream ended without Finished")
