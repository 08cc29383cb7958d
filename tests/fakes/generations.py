"""A gateway core for tests of its faces: generations that play scripts, and the HTTP faces over them on a real socket.

The one rule: a script is a list of steps per prompt: text to say, seconds to wait, HEARTBEAT, an error to fail with, or
STUCK, which finds after a moment that the client takes nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import tokenizers
import uvicorn
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers, processors
from uvicorn.server import ServerState

from gateway.auth import Principal
from gateway.chat import ChatTemplate
from gateway.kit import Kit
from gateway.ledger import Headroom
from gateway.tokens import Tokenizer
from shared.clock import SYSTEM_CLOCK
from shared.errors import Reason, TrunklineError
from shared.ports import address_of, listen
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

HEARTBEAT = object()
STUCK = object()
HEADROOM = Headroom(100, 99, 0.6, 10_000, 9_000, 6.0)
Step = str | float | TrunklineError | object
MODEL = "small"
VERSION = common_pb2.ModelVersion(
    model=MODEL, version="v1", max_context=100, vocab_size=1000, features=["generate", "logprobs"]
)


@dataclass
class Call:
    """One start, and what became of it."""

    spec: inference_pb2.GenerationSpec
    principal: Principal
    operation: str
    budget_ms: int | None
    trace_parent: tuple[str, str]
    left: asyncio.Event = field(default_factory=asyncio.Event)
    finished: bool = False


@dataclass
class FakeGeneration:
    """What a face sees of a call."""

    call: Call
    script: Sequence[Step]
    number: int
    on_stuck: Callable[[], object] = lambda: None
    resumable: bool = False
    opened: dict[int, int] = field(default_factory=dict)
    trace_id: str = "ab" * 16
    headroom: Headroom | None = HEADROOM

    @property
    def id(self) -> str:
        """Different for every call."""
        return f"{self.number:032x}"

    async def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The script for every choice, then the end."""
        spec, tokens = self.call.spec, 0
        yield inference_pb2.GenerateResponse(
            started=inference_pb2.Started(
                request_id=self.id,
                model=spec.model,
                version="v1",
                trace_id=self.trace_id,
                created_ms=1_700_000_000_999,
            )
        )
        choices = spec.n if spec.HasField("n") else 1
        texts = [step for step in self.script if isinstance(step, str)]
        for step in self.script:
            if isinstance(step, str):
                tokens += 1
                for choice in range(choices):
                    yield inference_pb2.GenerateResponse(delta=self._delta(choice, step, tokens == len(texts)))
            elif isinstance(step, int | float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            elif step is STUCK:
                asyncio.get_running_loop().call_later(0.1, self.on_stuck)
            else:
                yield inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat())
        self.call.finished = True
        usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=tokens * choices, cached_tokens=2)
        receipt = common_pb2.Receipt(total_ms=5.5, decode_ms=2.25, attempts=1, worker="w1")
        yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(usage=usage, receipt=receipt))

    def _delta(self, choice: int, text: str, last: bool) -> inference_pb2.Delta:
        spec = self.call.spec
        delta = inference_pb2.Delta(choice=choice, text=text)
        if spec.return_token_ids:
            delta.token_ids.extend(range(len(text)))
        if spec.sampling.HasField("logprobs"):
            chosen = inference_pb2.Candidate(token_id=7, token=text.encode(), logprob=-0.5)
            other = inference_pb2.Candidate(token_id=8, token=b"\xff", logprob=float("-inf"))
            delta.logprobs.add(chosen=chosen, top=[chosen, other][: spec.sampling.logprobs])
        if last:
            delta.finish_reason = common_pb2.FINISH_REASON_STOP
            delta.matched_stop = "</s>"
        return delta


class FakeGenerations:
    """Starts what `script` says for a spec; `refuse` fails the admission."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.script: Callable[[inference_pb2.GenerationSpec], Sequence[Step]] = lambda _spec: ["Hello", " world", "!"]
        self.refuse: Exception | None = None
        self._called = asyncio.Event()

    async def called(self) -> Call:
        """The last call, once there is one."""
        await self._called.wait()
        return self.calls[-1]

    @asynccontextmanager
    async def start(
        self,
        spec: inference_pb2.GenerationSpec,
        principal: Principal,
        *,
        operation: str,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> AsyncIterator[FakeGeneration]:
        """One generation's scope."""
        call = Call(spec, principal, operation, budget_ms, trace_parent)
        self.calls.append(call)
        if self.refuse is not None:
            raise self.refuse
        self._called.set()
        try:
            yield FakeGeneration(call, self.script(spec), len(self.calls))
        finally:
            call.left.set()


class FakeEmbeddings:
    """Embeds every input as its place and its size, three numbers wide."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.EmbedRequest] = []

    @asynccontextmanager
    async def start(
        self,
        request: inference_pb2.EmbedRequest,
        principal: Principal,
        *,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> AsyncIterator[FakeEmbedding]:
        """One request's scope."""
        self.requests.append(request)
        yield FakeEmbedding(request)


@dataclass
class FakeEmbedding:
    """What a face sees of it."""

    request: inference_pb2.EmbedRequest

    async def answer(self) -> inference_pb2.EmbedResponse:
        """At once."""
        made = inference_pb2.EmbedResponse(request_id="cd" * 16, usage=common_pb2.Usage(prompt_tokens=9))
        for place, item in enumerate(self.request.inputs):
            made.embeddings.add(values=[place, len(item.text) or len(item.token_ids.ids), 0.1])
        return made


class FakeModels:
    """One model, whose tokens are bytes."""

    def __init__(self) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        model = tokenizers.Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        model.add_special_tokens(["<s>"])
        model.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
        )
        template = ChatTemplate("{{ messages[0].content }}:", {}, SYSTEM_CLOCK)
        self._kit = Kit(Tokenizer(model.to_str().encode()), template, {})

    def versions(self, model: str | None = None) -> Sequence[common_pb2.ModelVersion]:
        """It."""
        return [VERSION] if model in (None, MODEL) else []

    def choose(self, model: str) -> common_pb2.ModelVersion:
        """It, or MODEL_UNKNOWN."""
        if model != MODEL:
            raise TrunklineError(Reason.MODEL_UNKNOWN, f"The model {model} is not known.")
        return VERSION

    async def kit(self, version: common_pb2.ModelVersion) -> Kit:
        """Its own."""
        return self._kit


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """The application behind uvicorn's own protocol on a free loopback port; its address."""
    config = uvicorn.Config(app, log_config=None, http="httptools", ws="none", lifespan="off")
    config.load()
    state = ServerState()
    make = functools.partial(config.http_protocol_class, config=config, server_state=state, app_state={})
    sock = listen("127.0.0.1:0")
    server = await asyncio.get_running_loop().create_server(make, sock=sock)
    try:
        yield address_of(sock)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.gather(*state.tasks, return_exceptions=True)
