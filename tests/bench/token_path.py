"""What a token costs on its way from the engine's frame to the gateway's transcript, in CPU time of either side.

A real door and a real gateway core in one process, joined by a transport without sockets. The one rule: each side is
timed alone and on the bytes that the other side made, so that a number names one side's work and nothing else.
`python -m tests.bench.token_path` prints the table and the rows as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec
import uvloop
from opentelemetry import trace

from gateway import app
from gateway.auth import Limits, Principal
from gateway.config import GatewayConfig
from gateway.generation import Generation
from gateway.transport import PeerLost
from shared.clock import SYSTEM_CLOCK
from shared.ids import Identity, new_incarnation
from shared.lifecycle import Lifecycle
from shared.peers import Peers
from shared.state import Store
from shared.wire import LoopLag
from tests.bench.facts import machine_facts
from tests.fakes import mesh as fake
from tests.fakes.clock import FakeClock
from tests.fakes.door_world import Witness
from trunkline.gateway.v1 import gateway_pb2
from trunkline.inference.v1 import inference_pb2
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2
from workers.door import door as doors
from workers.door.intake import Served
from workers.door.ledger import Capacity
from workers.door.stream import Stream
from workers.engine import messages as m

SEQUENCES: Final = 256
STEPS: Final = 64  # timed, of one token for every sequence each
ROUND: Final = 16  # steps after which the gateway has acknowledged
WORKER: Final = "worker"
_LOAD: Final = m.Load(SEQUENCES, 0, 0, 1000, 0, 1000, 0.0, 5.0, 0)
_PRINCIPAL: Final = Principal(
    "k", "t", frozenset({"generate"}), frozenset({"*"}), Limits(rpm=10**6, tpm=10**9, concurrency=10**6)
)


@dataclass
class Cost:
    """CPU seconds by stage."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        """What happens inside."""
        began = time.process_time()
        yield
        self.spent[stage] = self.spent.get(stage, 0.0) + time.process_time() - began


class Worker:
    """A door whose engine says what it is told to, as frames."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.door = doors.Door(WORKER, "bench", self.clock, Witness(), doors.Limits())
        self.stream: Stream | None = None
        self._said: list[m.ToEngine] = []
        self._steps = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(m.FromEngine).decode
        shape = fake.version()
        served = Served(1, shape.artefact_hash, shape.tokenizer_hash, frozenset({"generate"}), shape.vocab_size,
                        shape.max_context, 16, 10**7, 0, 10**4)  # fmt: skip
        self.door.engine_up(served, Capacity(10**4, 10**4, 10**7), self._said.append)

    def submit(self, sub: worker_pb2.Submission) -> None:
        """It must be admitted."""
        batch = worker_pb2.SubmitBatchRequest(router_id="r", router_incarnation=1, batch_seq=1, items=[sub])
        (result,) = self.door.routers.submit(batch).results
        assert result.HasField("admitted"), result

    def frame(self, rng: random.Random) -> bytes:
        """What the engine says after a step: a token of every request."""
        keys = [said.key for said in self._said if isinstance(said, m.Admit)]
        runs = [m.Run(key, 0, self._steps, (rng.randrange(fake.TEXT_TOKENS),)) for key in keys]
        first: list[m.Event] = [m.Scheduled(key, 1.0, 0) for key in keys] if not self._steps else []
        self._steps += 1
        return self._encode(m.StepOut(self._steps, 5.0, runs, first, _LOAD, 0, len(keys)))

    def step(self, frame: bytes) -> list[bytes]:
        """The door hears the engine and sends what is due."""
        self.door.engine.says(cast(m.StepOut, self._decode(frame)))
        self.clock.advance(0.01)
        return self.due()

    def due(self) -> list[bytes]:
        """What the stream has to say now."""
        made = []
        while self.stream is not None and (message := self.stream.next()) is not None:
            made.append(message.SerializeToString())
        return made

    def hear(self, said: bytes) -> None:
        """What the gateway says."""
        message = worker_pb2.OutputsRequest.FromString(said)
        if message.HasField("hello"):
            self.stream = self.door.gateways.connect(message.hello, lambda: None)
        elif self.stream is not None:
            self.door.gateways.hears(self.stream, message)


class Outputs:
    """The gateway's end of the stream: it reads what it is given, and what it writes is kept."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._waiting: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._dry = asyncio.Event()

    async def deliver(self, messages: list[bytes]) -> None:
        """Return when the gateway has taken all of them."""
        self._waiting.extend(messages)
        self._dry.clear()
        self._news.set()
        await self._dry.wait()

    async def read(self) -> worker_pb2.OutputsResponse:
        """As a call's."""
        while not self._waiting:
            self._dry.set()
            self._news.clear()
            await self._news.wait()
        return worker_pb2.OutputsResponse.FromString(self._waiting.popleft())

    async def write(self, message: worker_pb2.OutputsRequest) -> None:
        """As a call's."""
        self.heard.append(message.SerializeToString())

    def cancel(self) -> None:
        """Nothing is left to break off."""


class Wire:
    """The gateway's transport: submissions reach the door at once, outputs when the bench delivers them."""

    def __init__(self, worker: Worker) -> None:
        self.stream = Outputs()
        self._worker = worker

    def hear(self) -> None:
        """The door hears what the gateway has said."""
        for said in self.stream.heard:
            self._worker.hear(said)
        self.stream.heard.clear()

    async def submit(
        self, address: str, request: router_pb2.SubmitRequest, timeout_s: float
    ) -> router_pb2.SubmitResponse:
        self._worker.submit(request.submission)
        return router_pb2.SubmitResponse(address=WORKER, incarnation=self._worker.door.incarnation)

    def outputs(self, address: str, lane: worker_pb2.Lane) -> Outputs:
        return self.stream

    async def watch_models(
        self, address: str, request: router_pb2.WatchModelsRequest
    ) -> AsyncGenerator[router_pb2.WatchModelsResponse]:
        yield router_pb2.WatchModelsResponse(versions=[fake.version()], heartbeat_ms=60_000)
        await asyncio.Event().wait()

    async def asset(self, address: str, sha256: str) -> AsyncGenerator[router_pb2.GetAssetResponse]:
        hashes = fake.version().assets
        (data,) = (data for name, data in fake.FILES.items() if hashes[name] == sha256)
        yield router_pb2.GetAssetResponse(data=data, total=len(data))

    async def cancel(self, address: str, request: gateway_pb2.CancelRequest) -> gateway_pb2.CancelResponse:
        raise PeerLost("there is no other gateway")

    async def get(self, address: str, request: gateway_pb2.GetRequest) -> gateway_pb2.GetResponse:
        raise PeerLost("there is no other gateway")

    async def forget(self, address: str) -> None:
        """There is no connection."""


class Bench:
    """One door and one gateway with `sequences` generations between them."""

    def __init__(self, sequences: int) -> None:
        self.cost = Cost()
        self.worker = Worker()
        self.wire = Wire(self.worker)
        self.generations: list[Generation] = []
        self._sequences = sequences
        self._rng = random.Random(0)
        rng = random.SystemRandom()
        identity = Identity("gateway", "bench", new_incarnation(rng))
        self._store = Store("redis://127.0.0.1:1/0", SYSTEM_CLOCK, name="bench")  # never started: it is away
        self._peers = Peers(self._store, "router", ["router"])
        self.core = app.make_core(
            GatewayConfig(id="bench", keys_file=""),
            clock=SYSTEM_CLOCK,
            rng=rng,
            lag=LoopLag(SYSTEM_CLOCK),
            store=self._store,
            transport=cast(Any, self.wire),
            routers=self._peers,
            gateways=Peers(self._store, "gateway"),
            lifecycle=Lifecycle(identity),
            tracer=trace.NoOpTracer(),
        )

    async def run(self, steps: int) -> None:
        """Begin, time `steps`, end."""
        async with AsyncExitStack() as scopes:
            catalog = asyncio.create_task(self.core.catalog.run())
            await _until(lambda: not self.core.catalog.problem)
            for number in range(self._sequences):
                self.generations.append(await scopes.enter_async_context(self._generation(number, 2 * steps)))
            await self._until_heard()
            await self._round(ROUND, Cost())  # the first tokens are not like the others
            for _ in range(steps // ROUND):
                await self._round(ROUND, self.cost)
            catalog.cancel()
        await self.core.close()

    def _generation(self, number: int, most: int) -> Any:
        spec = inference_pb2.GenerationSpec(
            model=fake.MODEL,
            prompt_token_ids=inference_pb2.TokenIds(ids=[number % 200 + 1, 2, 3]),
            max_tokens=most + 2 * ROUND,
            ignore_eos=True,
        )
        return self.core.generations.start(
            spec, _PRINCIPAL, operation="chat", budget_ms=None, trace_parent=("", "")
        )  # fmt: skip

    async def _until_heard(self) -> None:
        """All are submitted, and the gateway's Hello has come."""
        await _until(lambda: self.worker.door.held == self._sequences and bool(self.wire.stream.heard))
        self.wire.hear()
        await self.wire.stream.deliver(self.worker.due())

    async def _round(self, steps: int, cost: Cost) -> None:
        frames = [self.worker.frame(self._rng) for _ in range(steps)]
        with cost.of("door"):
            messages = [message for frame in frames for message in self.worker.step(frame)]
        with cost.of("gateway"):
            await self.wire.stream.deliver(messages)
        await asyncio.sleep(0.06)  # the acknowledgement
        with cost.of("door"):
            self.wire.hear()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


async def _once(sequences: int, steps: int) -> dict[str, float]:
    bench = Bench(sequences)
    await bench.run(steps)
    tokens = sequences * (steps // ROUND) * ROUND
    assert sum(generation.tokens for generation in bench.generations) == sequences * (steps // ROUND + 1) * ROUND
    return {stage: spent / tokens * 1e6 for stage, spent in bench.cost.spent.items()}


def measure(sequences: int = SEQUENCES, steps: int = STEPS, runs: int = 7) -> dict[str, Any]:
    """CPU µs per token by side: medians over `runs`, and the least, which is what a quiet machine would show."""
    made = [uvloop.run(_once(sequences, steps)) for _ in range(runs)]
    for each in made:
        each["both"] = each["door"] + each["gateway"]
    row: dict[str, Any] = {"workload": f"{sequences} sequences, a token each a step", "unit": "CPU us per token"}
    for side in ("door", "gateway", "both"):
        row[side] = round(statistics.median(each[side] for each in made), 3)
        row[f"{side}_least"] = round(min(each[side] for each in made), 3)
    return row


def main() -> None:
    """Prints a table and the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    row = measure(runs=parser.parse_args().runs)
    for name, value in row.items():
        print(f"{name:<16}{value:>36}")  # noqa: T201
    print(json.dumps({"machine": machine_facts(), "rows": [row]}))  # noqa: T201


if __name__ == "__main__":
    main()
