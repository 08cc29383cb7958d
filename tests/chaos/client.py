"""One client with one request: what it asks, how it comes back, and what it heard.

Owns the judgement of transcripts. The one rule: every token is compared as it comes with the only one it may be, so a
duplicate, a splice or a hole is seen however the request ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

from shared.errors import TrunklineError, from_rpc
from tests.chaos.asks import Ask, Kind
from tests.chaos.mesh import HEARTBEAT_S
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.inference.v1 import inference_pb2_grpc

PATIENCE_S = 120.0
SILENCE_S = 4 * HEARTBEAT_S  # after which a client that can come back does
CHANNELS = 4  # to each gateway
PAUSE_S = 0.3  # between two turns
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3000),  # also the least time to connect
    ("grpc.max_reconnect_backoff_ms", 1000),
]
Event = pb.GenerateResponse | pb.ResumeResponse


class Door:
    """One gateway, through several connections."""

    def __init__(self, name: str, address: str, key: str) -> None:
        self.name = name
        self._channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(CHANNELS)]
        self.stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self.metadata = (("authorization", f"Bearer {key}"),)

    async def close(self) -> None:
        """End the connections."""
        for channel in self._channels:
            await channel.close()


@dataclass(frozen=True)
class Turn:
    """One call that did not end well."""

    at: float  # seconds of the run
    gateway: str
    code: str  # of gRPC; SILENT: the client gave this gateway up
    reason: str  # ours; empty where the transport failed
    why: str = ""  # the text of either


@dataclass
class Story:
    """What became of one request."""

    ask: Ask
    began: float
    ended: float = 0.0
    end: Literal["", "finished", "cancelled", "failed"] = ""
    turns: list[Turn] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    gap: tuple[float, float] = (0.0, 0.0)  # when the longest wait for a token began, and its length
    tokens: int = 0
    migrations: int = 0
    resumes: int = 0
    request_id: str = ""


class Client:
    """Runs one request; `run` answers its story."""

    def __init__(self, ask: Ask, doors: list[Door], origin: float) -> None:
        self._ask, self._doors, self._origin = ask, doors, origin
        self._turn = ask.number
        self._cursor = ""
        self._deltas = 0
        self._ids: dict[int, int] = {}  # how many of each choice
        self._texts: dict[int, str] = {}
        self._finishes: dict[int, int] = {}
        self._finished = False
        self._started = False
        self.story = Story(ask, self._now())
        self._last = self.story.began

    async def run(self) -> Story:
        """To an end of some kind, within PATIENCE_S."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not self.story.end:
                    await self._one_turn()
        except TimeoutError:
            self._note(Turn(self._now(), self._door.name, "HUNG", ""))
            self.story.end = "failed"
        self.story.ended = self._now()
        return self.story

    @property
    def _door(self) -> Door:
        return self._doors[self._turn % len(self._doors)]

    @property
    def _stub(self) -> Any:
        return self._door.stubs[self._ask.number // len(self._doors) % CHANNELS]

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._origin

    def _note(self, turn: Turn) -> None:
        self.story.turns.append(turn)

    async def _one_turn(self) -> None:
        door = self._door.name
        try:
            await self._read()
            return
        except grpc.aio.AioRpcError as exc:
            error = from_rpc(exc)
            bare = "grpc" in error.metadata
            reason = "" if bare else error.reason.value
            self._note(Turn(self._now(), door, exc.code().name, reason, (exc.details() or "")[:200]))
            if self._finished and bare:  # all was said, and the connection broke before the status
                self._end()
                return
            again = self._comes_back(error) or _never_sent(exc)
        except TimeoutError:
            self._note(Turn(self._now(), door, "SILENT", ""))
            error, again = None, True
        if not again:
            self.story.end = "failed"
            return
        self._turn += 1
        await asyncio.sleep(PAUSE_S if error is None else error.retry_after_s or PAUSE_S)

    def _comes_back(self, error: TrunklineError) -> bool:
        if self._ask.kind is Kind.ORDINARY:  # only where it was refused, and told when to come again
            return error.row.retryable and error.retry_after_s is not None and not self._started
        return error.row.retryable

    def _call(self) -> Any:
        given = {"metadata": self._door.metadata, "timeout": PATIENCE_S}
        if self.story.request_id:
            self.story.resumes += 1
            request = pb.ResumeRequest(request_id=self.story.request_id, cursor=self._cursor)
            return self._stub.Resume(request, **given)
        return self._stub.Generate(pb.GenerateRequest(spec=self._ask.spec), **given)

    async def _read(self) -> None:
        """One stream. Raises AioRpcError, and TimeoutError where it is silent for too long."""
        call = self._call()
        silence_s = PATIENCE_S if self._ask.kind is Kind.ORDINARY else SILENCE_S
        self._started = False
        try:
            while True:
                async with asyncio.timeout(silence_s):
                    event = await call.read()
                if event is grpc.aio.EOF:
                    break
                self._take(event)
                if self._deltas == self._ask.cancel_after and not self._finished:
                    await self._cancel()
                    return
        finally:
            call.cancel()
        self._end()

    async def _cancel(self) -> None:
        """Have enough: an ordinary client leaves, another one says so."""
        if self._ask.kind is not Kind.ORDINARY:
            request = pb.CancelGenerationRequest(request_id=self.story.request_id)
            async with asyncio.timeout(3 * SILENCE_S):
                await self._stub.CancelGeneration(request, metadata=self._door.metadata, timeout=2 * SILENCE_S)
        self.story.end = "cancelled"

    def _take(self, event: Event) -> None:
        self._expect(not self._finished, "an event after Finished")
        match event.WhichOneof("event"):
            case "started":
                self._expect(not self._started, "two Started")
                self._expect(self.story.request_id in ("", event.started.request_id), "another request's id")
                self._started = True
                self.story.request_id = event.started.request_id if self._ask.kind is not Kind.ORDINARY else ""
            case "delta":
                self._expect(self._started, "a delta before Started")
                self._take_delta(event.delta)
            case "finished":
                self._finished = True
                self.story.migrations = event.finished.receipt.migrations
                self._expect(event.finished.usage.completion_tokens == self.story.tokens, "usage is not what was told")

    def _take_delta(self, delta: pb.Delta) -> None:
        self._deltas += 1
        choice, ids = delta.choice, tuple(delta.token_ids)
        self._expect(not self._finishes.get(choice), f"choice {choice}: a delta after its end")
        known, have = self._ask.expected[choice], self._ids.get(choice, 0)
        self._expect(known.ids[have : have + len(ids)] == ids, f"choice {choice}: other tokens at {have}")
        self._ids[choice] = have + len(ids)
        self._texts[choice] = self._texts.get(choice, "") + delta.text
        self._finishes[choice] = delta.finish_reason
        self._cursor = delta.cursor
        self.story.tokens += len(ids)
        self._measure()

    def _end(self) -> None:
        self.story.end = "finished"
        self._expect(self._finished, "OK without Finished")
        for choice, known in self._ask.expected.items():
            self._expect(self._ids.get(choice, 0) == len(known.ids), f"choice {choice}: tokens are missing")
            self._expect(self._texts.get(choice, "") == known.text, f"choice {choice}: other text")
            self._expect(self._finishes.get(choice) == known.finish, f"choice {choice}: another finish reason")

    def _measure(self) -> None:
        now = self._now()
        if now - self._last > self.story.gap[1]:
            self.story.gap = (self._last, now - self._last)
        self._last = now

    def _expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            self.story.flaws.append(f"{self._now():.2f} s: {otherwise}")


def _never_sent(exc: grpc.aio.AioRpcError) -> bool:
    """No connection could be made: balancing clients go on to the next gateway by themselves."""
    return (exc.details() or "").startswith("failed to connect to all addresses")
