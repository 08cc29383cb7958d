"""Clients of the mesh: what they ask, what they hear, and whether that is what the model says.

Owns the judgement of transcripts (INV-2, INV-10). The one rule: a client knows the model's law, so whatever reaches it
is compared token by token, however the request ended.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np

from shared.errors import Reason, from_rpc
from tests.fakes import mesh as fake
from tests.fakes.gateway_client import TOKENIZER, Said
from tests.sim.engine import completion, states, token
from tests.sim.loop import Process
from tests.sim.net import SimChannel
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.inference.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from tests.sim.world import World

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
FINISHED: Final = "FINISHED"
LEFT: Final = "LEFT"
BROKEN: Final = "BROKEN"  # the connection to the gateway broke
MOST_TURNS: Final = 40
COME_BACK: Final = frozenset({
    BROKEN,
    *(reason.value for reason in (
        Reason.MOVED, Reason.OWNER_MOVED, Reason.STATE_AWAY, Reason.DRAINING, Reason.SLOW_READER
    )),
})  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request, and what its client does besides reading."""

    gateway: str = "g1"
    tenant: str = "a"
    prompt: tuple[int, ...] = (72, 101, 108)
    max_tokens: int = 16
    choices: int = 1
    seed: int = 1
    stops: tuple[str, ...] = ()
    logprobs: bool = False
    deadline_s: float = 60.0
    client_id: str = ""
    leaves_s: float | None = None  # after which the client goes away
    cancels_s: float | None = None  # after which somebody cancels it, through `cancels_at`
    cancels_at: str = "g1"
    pauses_s: float = 0.0  # between two events
    window_s: float = 0.0  # for which it can be resumed; its client then comes back
    key: str = ""  # for idempotency; its client then asks again where it cannot resume
    breaks_s: float | None = None  # after which its client breaks off, to come back
    others: tuple[str, ...] = ()  # gateways to come back to, in turn
    resumes: str = ""  # a request id: the client has asked before
    embeds: tuple[tuple[int, ...], ...] = ()  # inputs: it is an embedding that is asked for
    seedless: bool = False  # the gateway is to draw the seed; `seed` is for who judges
    dozes_s: float = 0.0  # for which its client takes nothing, once, early in its first stream

    @property
    def resumable(self) -> bool:
        """Another gateway may go on with it."""
        return bool(self.window_s or self.key) and not self.embeds

    def spec(self) -> pb.GenerationSpec:
        """As it is sent."""
        spec = pb.GenerationSpec(
            model=fake.MODEL, max_tokens=self.max_tokens, n=self.choices, stop=self.stops,
            return_token_ids=True, client_request_id=self.client_id, deadline_ms=round(self.deadline_s * 1000),
            resume_window_ms=round(self.window_s * 1000), idempotency_key=self.key,
        )  # fmt: skip
        spec.prompt_token_ids.ids.extend(self.prompt)
        if not self.seedless:
            spec.sampling.seed = self.seed
        if self.logprobs:
            spec.sampling.logprobs = 0
        return spec


def vectors(ask: Ask, salt: int) -> list[list[float]]:
    """What an embedding is by the model's law."""
    return [states(salt, ids).mean(axis=0, dtype=np.float64).astype(np.float32).tolist() for ids in ask.embeds]


@dataclass(frozen=True)
class Expected:
    """One choice."""

    ids: list[int]
    finish: int
    text: str


def expected(ask: Ask, choice: int, salt: int = 0) -> Expected:
    """What the model's law says."""
    ids, ended = completion(salt, ask.seed, choice, ask.prompt, ask.max_tokens)
    finish = STOP if ended else LENGTH
    for count in range(1, len(ids) + 1) if ask.stops else ():
        text = TOKENIZER.decode(ids[:count], after_text=True)
        at = min((text.find(stop) for stop in ask.stops if stop in text), default=-1)
        if at >= 0:
            return Expected(ids[:count], STOP, text[:at])
    return Expected(ids, finish, TOKENIZER.decode(ids, after_text=True))


@dataclass
class Client:
    """One request's life at its client."""

    world: World
    ask: Ask
    number: int
    said: Said = field(default_factory=Said)
    outcome: str = ""  # FINISHED, LEFT, BROKEN, or a reason
    message: str = ""
    began: float = 0.0
    ended: float = 0.0
    confirmed: bool | None = None
    returns: int = 0
    refusals: int = 0  # STATE_AWAY
    dozed: bool = False
    vectors: list[list[float]] = field(default_factory=list)
    request_id: str = ""
    _cursor: str = ""
    _unsent: bool = False  # the last call never left: no connection was to be had

    def start(self) -> asyncio.Task[None]:
        """Its process begins."""
        self.process = Process(self.world.loop, f"c{self.number}")
        return self.process.spawn(self._guarded())

    async def _guarded(self) -> None:
        try:
            await self._run()
        except Exception as error:
            self.world.loop.faults.append(error)
        self.ended = self.world.loop.now
        self.world.log(f"--- c{self.number} {self.outcome} {self.message} {self.said.ids}")

    async def _run(self) -> None:
        self.began = self.world.loop.now
        self.world.log(f"--- c{self.number} {self.ask}")
        async with asyncio.TaskGroup() as tasks:
            stream = tasks.create_task(self._stream())
            leaving = tasks.create_task(self._leave(stream))
            cancelling = tasks.create_task(self._cancel())
            await asyncio.wait([stream])
            leaving.cancel()
            await asyncio.wait([cancelling], timeout=None if self.ask.cancels_s is not None else 0.0)
            cancelling.cancel()

    async def _stream(self) -> None:
        """Ask; a client of a resumable request comes back until it is over or its time is, and so does one whose call
        never left: a connection may fail to come about for want of one packet."""
        try:
            self.request_id = self.ask.resumes
            await self._once(self.ask.gateway)
            for turn in range(MOST_TURNS):
                if not self._may_return():
                    return
                await asyncio.sleep(0.2 + 0.1 * turn)
                self.returns += 1
                gateway = self._gateways[(turn + 1) % len(self._gateways)]
                await self._once(gateway)
        except asyncio.CancelledError:
            self.outcome = LEFT
            raise

    def _may_return(self) -> bool:
        if self.world.loop.now - self.began > self.ask.deadline_s or self.outcome not in COME_BACK:
            return False
        refused = self.outcome in (Reason.STATE_AWAY.value, Reason.DRAINING.value)  # then asking again is safe
        known = self.ask.key or self.request_id or refused
        return self._unsent or bool(self.ask.resumable and known)

    async def _once(self, gateway: str) -> None:
        await (self._embed(gateway) if self.ask.embeds else self._call(self._again(gateway)))

    async def _embed(self, gateway: str) -> None:
        self.outcome, self._unsent = "", False
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(gateway))  # type: ignore[no-untyped-call]
        request = pb.EmbedRequest(model=fake.MODEL, normalize=False)
        for ids in self.ask.embeds:
            request.inputs.add().token_ids.ids.extend(ids)
        try:
            answer = await stub.Embed(request, metadata=self._metadata, timeout=self.ask.deadline_s)
        except grpc.aio.AioRpcError as error:
            self._failed(error)
        else:
            self.outcome, self.vectors = FINISHED, [[*each.values] for each in answer.embeddings]

    def _generate(self, gateway: str) -> Any:
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(gateway))  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(spec=self.ask.spec())
        return stub.Generate(request, metadata=self._metadata, timeout=self.ask.deadline_s + 5.0)

    def _again(self, gateway: str) -> Any:
        if not self.request_id:
            return self._generate(gateway)
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(gateway))  # type: ignore[no-untyped-call]
        self.said.started = None
        request = pb.ResumeRequest(request_id=self.request_id, cursor=self._cursor)
        return stub.Resume(request, metadata=self._metadata, timeout=self.ask.deadline_s)

    async def _call(self, call: Any) -> None:
        """One stream, to its end."""
        self.outcome, self._unsent = "", False
        breaking = self._breaking(call) if self.ask.breaks_s is not None and not self.returns else None
        try:
            async for event in call:
                self._take(event)
                if self.ask.pauses_s:
                    await asyncio.sleep(self.ask.pauses_s)
                if self.ask.dozes_s and self.said.ids and not self.dozed:
                    self.dozed = True
                    await asyncio.sleep(self.ask.dozes_s)
        except grpc.aio.AioRpcError as error:
            self._failed(error)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self.outcome = FINISHED if self.said.finished is not None else BROKEN  # by ourselves
        else:
            self.outcome = FINISHED
            assert self.said.finished is not None, "the stream ended without Finished"
        finally:
            call.cancel()
            if breaking is not None:
                breaking.cancel()

    def _breaking(self, call: Any) -> asyncio.TimerHandle:
        assert self.ask.breaks_s is not None
        return self.world.loop.call_later(self.ask.breaks_s, call.cancel)

    def _take(self, event: Any) -> None:
        self.said.take(event)
        if event.HasField("started"):
            assert self.request_id in ("", event.started.request_id), "INV-11: another request of the same key"
            self.request_id = event.started.request_id
        if event.HasField("delta"):
            self._cursor = event.delta.cursor

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        if self.said.finished is not None:  # the connection broke when all was said
            self.outcome = FINISHED
            return
        self._unsent = (error.details() or "").startswith("failed to connect")
        found = from_rpc(error)
        self.message = found.message
        self.refusals += found.reason is Reason.STATE_AWAY
        self.outcome = BROKEN if found.metadata.get("grpc") in ("UNAVAILABLE", "CANCELLED") else found.reason.value

    @property
    def _gateways(self) -> tuple[str, ...]:
        return self.ask.others or (self.ask.gateway,)

    async def _leave(self, stream: asyncio.Task[None]) -> None:
        if self.ask.leaves_s is not None:
            await asyncio.sleep(self.ask.leaves_s)
            stream.cancel()

    async def _cancel(self) -> None:
        if self.ask.cancels_s is None:
            return
        await asyncio.sleep(self.ask.cancels_s)
        stub = inference_pb2_grpc.InferenceServiceStub(self._channel(self.ask.cancels_at))  # type: ignore[no-untyped-call]
        request = pb.CancelGenerationRequest(client_request_id=self.ask.client_id)
        try:
            answer = await stub.CancelGeneration(request, metadata=self._metadata, timeout=15.0)
            self.confirmed = answer.confirmed
        except grpc.aio.AioRpcError as error:
            reason = from_rpc(error).reason
            assert reason is not Reason.INTERNAL, "a cancel failed inside"

    def _channel(self, gateway: str) -> Any:
        return SimChannel(self.world.net, self.process, f"{gateway}:1")

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.ask.tenant}"),)

    # Judgement.

    def check(self) -> None:
        """What it heard is the model's, whole if it finished, else a part of it from the start."""
        assert self.outcome, f"c{self.number} never came to an end"
        if self.ask.embeds:
            right = [vectors(self.ask, salt) for salt in set(self.world.salts)] if self.outcome == FINISHED else [[]]
            assert self.vectors in right, f"c{self.number}: {self.vectors} is none of {right}"
            return
        for choice in range(self.ask.choices):
            self._check_choice(choice)
        if self.outcome == FINISHED:
            assert self.said.finished is not None
            told = sum(len(ids) for ids in self.said.ids.values())
            assert self.said.finished.usage.completion_tokens == told, "the usage is not what was streamed"

    def _check_choice(self, choice: int) -> None:
        ids, text = self.said.ids.get(choice, []), self.said.texts.get(choice, "")
        finish = self.said.finishes.get(choice, 0)
        where = f"c{self.number} choice {choice}: "
        if self.world.plan.other_tokens:
            self._check_law(choice, ids, where)
        else:
            right = expected(self.ask, choice)
            assert ids == right.ids[: len(ids)], f"{where}{ids} is not {right.ids}"
            if finish:
                assert (ids, finish, text) == (right.ids, right.finish, right.text), f"{where}{text!r} is not {right}"
            assert right.text.startswith(text), f"{where}{text!r} is not {right.text!r}"
        if self.outcome == FINISHED:
            assert finish, f"{where}it has no end"

    def _check_law(self, choice: int, ids: list[int], where: str) -> None:
        """Every token is what some engine life says after those before it: nothing is spliced."""
        ask = self.ask
        for place, drawn in enumerate(ids):
            right = {token(salt, ask.seed, choice, ask.prompt, ids[:place]) for salt in self.world.salts}
            assert drawn in right, f"{where}token {place} is {drawn}, which follows in no engine"
