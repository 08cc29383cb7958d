"""A client that keeps receipts: what the engine took is known for each request, so what the mesh added is, too.

The one rule: `run` is how measures enter a loop. All share one, since gRPC's clients do not outlive theirs in peace.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc
import uvloop

from tests.bench import language
from tests.bench.fleet import MODEL, Fleet
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc


@dataclass
class Told:
    """What one stream said. Times are readings of the monotonic clock."""

    began: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    request_id: str = ""
    receipt: common_pb2.Receipt = field(default_factory=common_pb2.Receipt)

    @property
    def first_s(self) -> float:
        """To the first token."""
        return self.times[0] - self.began

    @property
    def added_s(self) -> float:
        """To the first token, without what the engine took: its queue and its prefill."""
        return self.first_s - (self.receipt.worker_queue_ms + self.receipt.prefill_ms) / 1e3

    @property
    def gaps_s(self) -> list[float]:
        """Between pieces."""
        return [after - before for before, after in itertools.pairwise(self.times)]


class Asker:
    """A gRPC client of one gateway."""

    def __init__(self, address: str, key: str) -> None:
        options = (("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1))
        self.channel = grpc.aio.insecure_channel(address, options=options)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {key}"),)

    async def stream(
        self, spec: inference_pb2.GenerationSpec, on_first: Callable[[Told], None] = lambda _: None
    ) -> Told:
        """Runs one generation to its end. Raises AioRpcError."""
        told = Told(time.monotonic())
        call: Any = self.stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=self.metadata, timeout=300)
        try:
            async for event in call:
                kind = event.WhichOneof("event")
                if kind == "delta":
                    told.times.append(time.monotonic())
                    told.counts.append(len(event.delta.token_ids))
                    if len(told.times) == 1:
                        on_first(told)
                elif kind == "started":
                    told.request_id = event.started.request_id
                elif kind == "finished":
                    told.receipt = event.finished.receipt
        finally:
            call.cancel()
        return told

    async def complete(self, spec: inference_pb2.GenerationSpec) -> inference_pb2.CompleteResponse:
        """One whole answer."""
        request = inference_pb2.CompleteRequest(spec=spec)
        answer: inference_pb2.CompleteResponse = await self.stub.Complete(request, metadata=self.metadata, timeout=300)
        return answer


_runner: Final = asyncio.Runner(loop_factory=uvloop.new_event_loop)
_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`."""
    return _runner.run(work)


@asynccontextmanager
async def askers(fleet: Fleet) -> AsyncIterator[list[Asker]]:
    """One per gateway."""
    opened = [Asker(address, fleet.key) for address in fleet.grpc]
    try:
        yield opened
    finally:
        for asker in opened:
            await asker.channel.close(None)


def spec(prompt: str | Sequence[int], max_tokens: int) -> inference_pb2.GenerationSpec:
    """A greedy generation of exactly so many tokens."""
    made = inference_pb2.GenerationSpec(model=MODEL, max_tokens=max_tokens, ignore_eos=True, return_token_ids=True)
    made.min_tokens = max_tokens
    made.sampling.temperature = 0.0
    if isinstance(prompt, str):
        made.prompt = prompt
    else:
        made.prompt_token_ids.ids.extend(prompt)
    return made


def ids(seed: int, count: int) -> list[int]:
    """A prompt of so many token ids."""
    return random.Random(seed).choices(range(300, language.VOCAB - 300), k=count)
