"""Routers and workers for tests of a gateway: real servers on loopback ports that keep the wire's rules for gateways,
and misbehave when told to.

Token k of choice c of a prompt is a function of (prompt, c, k) alone, so that every worker continues a request as any
other would. The one rule: what a test scripts and is never used fails the test.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import json
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import tokenizers
from grpc_status import rpc_status

from shared.errors import Reason, TrunklineError, to_status
from shared.lifecycle import bind
from shared.rpc import INTERNAL_SERVER_OPTIONS
from shared.wire import Stamp, spec_hash
from trunkline.common.v1 import common_pb2
from trunkline.router.v1 import router_pb2, router_pb2_grpc
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MODEL = "small"
TEXT_TOKENS = 286  # ids below it have text
EOS = 300
WIDTH = 8  # of an embedding
PIECE = 40  # bytes of a bulk piece
HEARTBEAT_S = 0.1

_WORDS = [" the", " quick", " brown", " fox", "é", "STOP", " jumps", "日本"]


@functools.cache
def tokenizer_json() -> bytes:
    """A byte-level tokenizer: 256 bytes, some words, and specials from `EOS` on."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        ((text, _),) = split.pre_tokenize_str(word)
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab:
                vocab[text[:end]] = len(vocab)
                merges.append((text[: end - 1], text[end - 1]))
    assert len(vocab) == TEXT_TOKENS
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = split
    made.decoder = tokenizers.decoders.ByteLevel()
    filler = [tokenizers.AddedToken(f"<|{index}|>", special=True) for index in range(len(vocab), EOS)]
    made.add_special_tokens([*filler, tokenizers.AddedToken("<|end|>", special=True)])
    return made.to_str().encode()


TEMPLATE = (
    b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    b"{% if add_generation_prompt %}assistant:{% endif %}"
)
FILES = {
    "tokenizer.json": tokenizer_json(),
    "chat_template.jinja": TEMPLATE,
    "tokenizer_config.json": json.dumps({"eos_token": "<|end|>"}).encode(),
    "generation_config.json": json.dumps({"temperature": 0.5}).encode(),
}


def version(number: str = "1", **fields: Any) -> common_pb2.ModelVersion:
    """A version of the one model."""
    values: dict[str, Any] = {
        "model": MODEL,
        "version": number,
        "artefact_hash": hashlib.sha256(number.encode()).hexdigest(),
        "tokenizer_hash": hashlib.sha256(FILES["tokenizer.json"]).hexdigest(),
        "assets": {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()},
        "max_context": 4096,
        "vocab_size": EOS + 1,
        "eos_token_ids": [EOS],
        "embedding_size": WIDTH,
        "features": ["encode", "generate", "logprobs"],
        "weight": 1.0,
        "ready_replicas": 1,
    }
    return common_pb2.ModelVersion(**(values | fields))


def token(prompt: Sequence[int], choice: int, index: int) -> int:
    """Token `index` of `choice`: letters, bytes of broken characters, words."""
    digest = hashlib.sha256(struct.pack(f"<{len(prompt)}I", *prompt) + bytes([choice]) + struct.pack("<I", index))
    return int.from_bytes(digest.digest()[:4], "little") % TEXT_TOKENS


def tokens(prompt: Sequence[int], choice: int, count: int) -> list[int]:
    """The first `count` tokens of `choice`."""
    return [token(prompt, choice, index) for index in range(count)]


def embedding(ids: Sequence[int]) -> list[float]:
    """The vector of an input."""
    return [float(token(ids, 0, index)) for index in range(WIDTH)]


@dataclass
class Held:
    """A request at a worker."""

    sub: worker_pb2.Submission
    lengths: Sequence[int]  # tokens of each choice before its end of sequence
    made: list[list[int]] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    scheduled: bool = False
    admitted_at: float = field(default_factory=time.monotonic)
    first_at: float = 0.0
    released: worker_pb2.RequestEvent | None = None
    failed: worker_pb2.RequestEvent | None = None

    @property
    def stamp(self) -> Stamp:
        return self.sub.epoch, self.sub.attempt

    @property
    def bulk(self) -> bytes:
        vectors = [embedding(item.ids) for item in self.sub.encode.inputs]
        return b"".join(struct.pack(f"<{WIDTH}f", *vector) for vector in vectors)

    @property
    def over(self) -> bool:
        return all(self.finish) if self.sub.HasField("generate") else self.scheduled

    def begin(self) -> None:
        for choice in self.sub.generate.choices:
            self.made.append(list(choice.emitted))
            self.finish.append(choice.finish)
            if not choice.finish and len(choice.emitted) >= self.sub.generate.max_tokens:
                self.finish[-1] = common_pb2.FINISH_REASON_LENGTH

    def step(self) -> None:
        """One token for every choice that goes on."""
        if not self.scheduled:
            self.scheduled, self.first_at = True, time.monotonic()
        work = self.sub.generate
        for choice, made in enumerate(self.made):
            if self.finish[choice]:
                continue
            if len(made) >= self.lengths[choice] and not work.ignore_eos:
                self.finish[choice] = common_pb2.FINISH_REASON_STOP
                continue
            made.append(token(work.prompt, choice, len(made)))
            if len(made) >= work.max_tokens:
                self.finish[choice] = common_pb2.FINISH_REASON_LENGTH


class Stream:
    """One Outputs stream at a worker."""

    def __init__(self, hello: worker_pb2.Hello) -> None:
        self.hello = hello
        self.seq = 0
        self.handles = itertools.count(1)
        self.carried: dict[bytes, tuple[Stamp, int]] = {}
        self.sent: dict[bytes, list[tuple[int, bool]]] = {}  # per choice: tokens, finish; for bulk: bytes
        self.ended: set[bytes] = set()
        self.said: deque[worker_pb2.OutputsResponse] = deque()  # scripted
        self.notices: list[worker_pb2.RequestEvent] = []
        self.broken = False


Mutator = Callable[[worker_pb2.OutputBatch], list[worker_pb2.OutputBatch]]


class MeshWorker(worker_pb2_grpc.WorkerServiceServicer):
    """`async with MeshWorker("w1") as worker`: admits what `FakeRouter` gives it and makes a token a step.

    `lengths` are the tokens of each choice before its end of sequence. `stepped` is called after each step with its
    number; `resets` holds numbers of batches after which the stream breaks; `mutators` change the next batches.
    """

    def __init__(
        self, worker_id: str = "w1", *, lengths: Sequence[int] = (8,) * 16, step_s: float = 0.001, serves: str = "1"
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = int(hashlib.sha256(worker_id.encode()).hexdigest()[:15], 16)
        self.lengths = lengths
        self.step_s = step_s
        self.serves = version(serves)
        self.address = "127.0.0.1:0"
        self.held: dict[bytes, Held] = {}
        self.submissions: list[worker_pb2.Submission] = []
        self.cancels: list[tuple[bytes, int, int]] = []
        self.stops: list[tuple[int, int]] = []  # choice, at_index
        self.acks: list[int] = []
        self.hellos: list[worker_pb2.Hello] = []
        self.stepped: Callable[[int], None] = lambda _step: None
        self.resets: set[int] = set()
        self.mutators: deque[Mutator] = deque()
        self.batches = 0
        self.steps = 0
        self.silent = False
        self.tick_age_ms = 0
        self.alive = False
        self._paused = False
        self._streams: list[Stream] = []
        self._news = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._engine: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        await self.kill()
        assert exc_type is not None or not (self.resets or self.mutators), "a scripted fault did not happen"

    async def start(self) -> None:
        """Serve, at the same address as before."""
        self._server = grpc.aio.server(options=INTERNAL_SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = await bind(self._server, self.address)
        await self._server.start()
        self._engine = asyncio.create_task(self._run())
        self.alive = True

    async def kill(self) -> None:
        """End at once, as by SIGKILL."""
        self.alive = False
        if self._engine is not None:
            self._engine.cancel()
            await asyncio.wait([self._engine])
        if self._server is not None:
            await self._server.stop(None)

    async def reborn(self) -> None:
        """The engine is started anew behind the door: another life, all streams closed."""
        self.incarnation += 1
        self.held.clear()
        self.break_streams()

    def pause(self, paused: bool = True) -> None:
        """Make no token."""
        self._paused = paused

    def break_streams(self) -> None:
        """Reset every stream."""
        for stream in self._streams:
            stream.broken = True
        self._wake()

    def say(self, *messages: worker_pb2.OutputsResponse) -> None:
        """Say this on every stream, as it is; batches get their number."""
        for stream in self._streams:
            stream.said.extend(messages)
        self._wake()

    def release(self, why: worker_pb2.Released.Why, message: str = "told to") -> None:
        """Hold nothing any longer."""
        for held in self.held.values():
            held.released = worker_pb2.RequestEvent(released=worker_pb2.Released(why=why, message=message))
        self._wake()

    def fail(self, reason: Reason, *, retryable: bool) -> None:
        """End everything with an error."""
        for held in self.held.values():
            failed = worker_pb2.Failed(reason=reason.value, message="told to", retryable=retryable, work_done=True)
            held.failed = worker_pb2.RequestEvent(failed=failed)
        self._wake()

    def admit(self, sub: worker_pb2.Submission) -> None:
        """What SubmitBatch would do."""
        assert sub.spec_hash == spec_hash(sub), "the spec hash is not that of the submission"
        self.submissions.append(sub)
        held = self.held.get(sub.request_id)
        assert held is None or held.stamp < (sub.epoch, sub.attempt), "an attempt came twice"
        fresh = Held(sub, self.lengths)
        fresh.begin()
        self.held[sub.request_id] = fresh
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            live = [held for held in self.held.values() if not held.over]
            if self._paused or not live:
                continue
            for held in live:
                held.step()
            self.steps += 1
            self._wake()
            self.stepped(self.steps)

    # Outputs.

    async def Outputs(
        self, requests: AsyncIterator[worker_pb2.OutputsRequest], context: Context
    ) -> AsyncIterator[worker_pb2.OutputsResponse]:
        stream = Stream((await anext(requests)).hello)
        self.hellos.append(stream.hello)
        self._streams.append(stream)
        hearing = asyncio.create_task(self._hear(stream, requests))
        try:
            yield worker_pb2.OutputsResponse(hello=self._hello(stream))
            self._reconcile(stream)
            while not stream.broken:
                news = self._news
                for message in self._messages(stream):
                    if not self.silent:
                        yield message
                    if stream.broken:
                        break
                if stream.broken:
                    break
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await news.wait()
                except TimeoutError:
                    if not self.silent:
                        beat = worker_pb2.WorkerHeartbeat(engine_tick_age_ms=self.tick_age_ms)
                        yield worker_pb2.OutputsResponse(heartbeat=beat)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was reset")
        finally:
            self._streams.remove(stream)
            hearing.cancel()

    def _hello(self, stream: Stream) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            protocol_major=1,
            id=self.worker_id,
            incarnation=self.incarnation,
            stream_generation=stream.hello.stream_generation,
            heartbeat_ms=round(HEARTBEAT_S * 1000),
            lane=stream.hello.lane,
        )

    def _reconcile(self, stream: Stream) -> None:
        listed = {held.request_id: held for held in stream.hello.held}
        for request_id, held in listed.items():
            own = self.held.get(request_id)
            if own is None or own.stamp != (held.epoch, held.attempt):
                event = worker_pb2.Released(why=worker_pb2.Released.WHY_UNSPECIFIED, message="not held")
                stream.notices.append(worker_pb2.RequestEvent(request_id=request_id, released=event))
            else:
                places = {place.choice: place.index for place in held.next}
                stream.sent[request_id] = [(places[choice], False) for choice in sorted(places)]

    async def _hear(self, stream: Stream, requests: AsyncIterator[worker_pb2.OutputsRequest]) -> None:
        with suppress(grpc.aio.UsageError):
            async for said in requests:
                match said.WhichOneof("message"):
                    case "ack":
                        self.acks.append(said.ack.seq)
                    case "cancel":
                        self._cancel(stream, said.cancel)
                    case "stop":
                        self.stops.append((said.stop.choice, said.stop.at_index))
                        held = self.held.get(said.stop.request_id)
                        if held is not None and not held.finish[said.stop.choice]:
                            held.finish[said.stop.choice] = common_pb2.FINISH_REASON_STOP
                            self._wake()

    def _cancel(self, stream: Stream, order: worker_pb2.CancelOutput) -> None:
        self.cancels.append((order.request_id, order.epoch, order.attempt))
        held = self.held.get(order.request_id)
        event = worker_pb2.RequestEvent(freed=worker_pb2.Freed(step=self.steps), request_id=order.request_id)
        if held is not None and held.stamp <= (order.epoch, order.attempt):
            del self.held[order.request_id]
            carried = stream.carried.pop(order.request_id, None)
            if carried is not None:
                event.handle, event.request_id = carried[1], b""
        stream.notices.append(event)
        self._wake()

    def _messages(self, stream: Stream) -> Iterable[worker_pb2.OutputsResponse]:
        """What is due on a stream, numbered; it breaks where a reset is scripted."""
        while stream.said:
            message = stream.said.popleft()
            if message.HasField("batch"):
                message.batch.seq = stream.seq = stream.seq + 1
            yield message
        if stream.hello.lane == worker_pb2.LANE_BULK:
            yield from self._bulk(stream)
            return
        batch = self._batch(stream)
        if batch is None:
            return
        for part in self.mutators.popleft()(batch) if self.mutators else [batch]:
            part.seq = stream.seq = stream.seq + 1
            self.batches += 1
            yield worker_pb2.OutputsResponse(batch=part)
            if self.batches in self.resets:
                self.resets.discard(self.batches)
                stream.broken = True
                return

    def _batch(self, stream: Stream) -> worker_pb2.OutputBatch | None:
        batch = worker_pb2.OutputBatch()
        for request_id, held in list(self.held.items()):
            if not held.sub.HasField("generate"):
                continue
            if held.sub.gateway_incarnation != stream.hello.incarnation:
                self._fence(stream, batch, held)
                continue
            self._open(stream, batch, held)
            self._runs(stream, batch, held)
            self._events(stream, batch, held)
            if request_id in stream.ended:
                del self.held[request_id]
        batch.events.extend(stream.notices)
        stream.notices.clear()
        return batch if batch.opened or batch.handle or batch.events else None

    def _fence(self, stream: Stream, batch: worker_pb2.OutputBatch, held: Held) -> None:
        """Another gateway has it now."""
        stream.sent.pop(held.sub.request_id, None)
        carried = stream.carried.pop(held.sub.request_id, None)
        if carried is not None:
            fenced = worker_pb2.FencedOut(epoch=held.stamp[0], attempt=held.stamp[1])
            batch.events.add(handle=carried[1], fenced=fenced)

    def _open(self, stream: Stream, batch: worker_pb2.OutputBatch, held: Held) -> None:
        request_id = held.sub.request_id
        if stream.carried.get(request_id, ((0, 0), 0))[0] == held.stamp:
            return
        handle = next(stream.handles)
        if request_id in stream.carried or request_id not in stream.sent:
            sizes = [(len(choice.emitted), bool(choice.finish)) for choice in held.sub.generate.choices]
            stream.sent[request_id] = sizes or [(0, False)]
        stream.carried[request_id] = (held.stamp, handle)
        batch.opened.add(request_id=request_id, epoch=held.stamp[0], attempt=held.stamp[1], handle=handle, admit_ms=0.1)

    def _runs(self, stream: Stream, batch: worker_pb2.OutputBatch, held: Held) -> None:
        request_id = held.sub.request_id
        sent, handle = stream.sent[request_id], stream.carried[request_id][1]
        for choice, made in enumerate(held.made):
            start, told = sent[choice]
            new, finish = made[start:], held.finish[choice]
            if told or not (new or finish):
                continue
            batch.handle.append(handle)
            batch.choice.append(choice)
            batch.index.append(start)
            batch.count.append(len(new))
            batch.finish.append(finish)
            batch.stop_token.append(
                EOS + 1 if finish == common_pb2.FINISH_REASON_STOP and len(made) == held.lengths[choice] else 0
            )
            batch.token_ids.extend(new)
            if held.sub.generate.sampling.HasField("logprobs"):
                best = range(1, held.sub.generate.sampling.logprobs + 1)
                entry = common_pb2.TokenLogprob(chosen=-0.5, top_ids=best, top_logprobs=[-0.5 * each for each in best])
                batch.logprobs.add(run=len(batch.handle) - 1, tokens=[entry] * len(new))
            sent[choice] = (len(made), bool(finish))

    def _events(self, stream: Stream, batch: worker_pb2.OutputBatch, held: Held) -> None:
        request_id = held.sub.request_id
        event = held.released or held.failed
        if event is None and held.over:
            event = worker_pb2.RequestEvent(
                finished=worker_pb2.Finished(
                    prefill_ms=(held.first_at - held.admitted_at) * 1000,
                    decode_ms=(time.monotonic() - held.first_at) * 1000,
                    steps=self.steps,
                    cached_tokens=1,
                )
            )
        if event is not None:
            event.handle = stream.carried.pop(request_id)[1]
            batch.events.append(event)
            stream.ended.add(request_id)

    def _bulk(self, stream: Stream) -> Iterable[worker_pb2.OutputsResponse]:
        opened = worker_pb2.OutputBatch()
        for held in self.held.values():
            if held.sub.HasField("encode"):
                self._open(stream, opened, held)
        opened.events.extend(stream.notices)
        stream.notices.clear()
        if opened.opened or opened.events:
            yield self._numbered(stream, opened)
        for request_id, held in list(self.held.items()):
            if held.sub.HasField("encode") and held.scheduled:
                yield from self._pieces(stream, request_id, held)

    def _pieces(self, stream: Stream, request_id: bytes, held: Held) -> Iterable[worker_pb2.OutputsResponse]:
        data, handle = held.bulk, stream.carried[request_id][1]
        while stream.sent[request_id][0][0] < len(data):
            start = stream.sent[request_id][0][0]
            stream.sent[request_id] = [(start + PIECE, False)]
            stream.seq += 1
            self.batches += 1
            yield worker_pb2.OutputsResponse(
                bulk=worker_pb2.BulkPiece(
                    seq=stream.seq,
                    handle=handle,
                    kind=worker_pb2.BulkPiece.KIND_EMBEDDING,
                    offset=start,
                    total=len(data),
                    data=data[start : start + PIECE],
                )
            )
            if self.batches in self.resets:
                self.resets.discard(self.batches)
                stream.broken = True
                return
        finished = worker_pb2.OutputBatch()
        self._events(stream, finished, held)
        del self.held[request_id]
        yield self._numbered(stream, finished)

    def _numbered(self, stream: Stream, batch: worker_pb2.OutputBatch) -> worker_pb2.OutputsResponse:
        batch.seq = stream.seq = stream.seq + 1
        return worker_pb2.OutputsResponse(batch=batch)


class RouterDies(Exception):
    """Scripted: the router is killed here."""


Script = Callable[[router_pb2.SubmitRequest], Any]


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """`async with FakeRouter(w1, w2) as router`: gives submissions to the first living worker that serves the version
    and is not excluded.

    `before` and `after` are scripted steps for the next submissions, run before and after the worker has admitted: they
    may wait, or raise TrunklineError (a refusal) or RouterDies (the connection breaks without an answer).
    """

    def __init__(self, *workers: MeshWorker, router_id: str = "r1") -> None:
        self.workers = list(workers)
        self.versions = [version()]
        self.address = "127.0.0.1:0"
        self.requests: list[router_pb2.SubmitRequest] = []
        self.left: list[tuple[bytes, int]] = []  # (id, attempt) whose call was cancelled
        self.place: Callable[[router_pb2.SubmitRequest], Sequence[MeshWorker]] = lambda _request: self.workers
        self.before: deque[Script] = deque()
        self.after: deque[Script] = deque()
        self.draining = False
        self.frozen = False  # says nothing and answers nothing, like a stopped process
        self.assets = {hashlib.sha256(data).hexdigest(): data for data in FILES.values()}
        self._router_id = router_id
        self._news = asyncio.Event()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, exc_type: object, *exc: object) -> None:
        await self.kill()
        assert exc_type is not None or not (self.before or self.after), "a scripted step was not used"

    async def start(self) -> None:
        """Serve, at the same address as before."""
        self._server = grpc.aio.server(options=INTERNAL_SERVER_OPTIONS)
        router_pb2_grpc.add_RouterServiceServicer_to_server(self, self._server)
        self.address = await bind(self._server, self.address)
        await self._server.start()

    async def kill(self) -> None:
        """End at once, as by SIGKILL."""
        if self._server is not None:
            await self._server.stop(None)

    def changed(self) -> None:
        """Tell the models again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def Submit(self, request: router_pb2.SubmitRequest, context: Context) -> router_pb2.SubmitResponse:
        self.requests.append(request)
        sub = request.submission
        try:
            await self._thaw()
            if self.before:
                await _done(self.before.popleft()(request))
            worker = self._pick(request)
            worker.admit(sub)
            if self.after:
                await _done(self.after.popleft()(request))
        except TrunklineError as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))
            raise
        except RouterDies:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            raise
        except asyncio.CancelledError:
            self.left.append((sub.request_id, sub.attempt))
            raise
        return router_pb2.SubmitResponse(
            incarnation=worker.incarnation,
            worker_id=worker.worker_id,
            address=worker.address,
            queue_ms=0.1,
            dispatch_ms=0.1,
        )

    async def _thaw(self) -> None:
        while self.frozen:  # noqa: ASYNC110 - a plain flag is easier to read in tests
            await asyncio.sleep(0.01)

    def _pick(self, request: router_pb2.SubmitRequest) -> MeshWorker:
        wanted = request.submission.artefact_hash
        living = [
            worker for worker in self.place(request) if worker.alive and worker.incarnation not in request.excluded
        ]
        if not living:
            raise TrunklineError(Reason.NO_REPLICA, "no replica of the model is available", retry_after_s=1.0)
        serving = [worker for worker in living if worker.serves.artefact_hash == wanted]
        if not serving:
            raise TrunklineError(Reason.VERSION_GONE, "no replica serves this version")
        return serving[0]

    async def WatchModels(
        self, request: router_pb2.WatchModelsRequest, context: Context
    ) -> AsyncIterator[router_pb2.WatchModelsResponse]:
        while True:
            await self._thaw()
            news = self._news
            yield self._told(heartbeat=False)
            while not news.is_set():
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await news.wait()
                except TimeoutError:
                    await self._thaw()
                    yield self._told(heartbeat=True)

    def _told(self, *, heartbeat: bool) -> router_pb2.WatchModelsResponse:
        return router_pb2.WatchModelsResponse(
            router_id=self._router_id,
            versions=() if heartbeat else self.versions,
            heartbeat=heartbeat,
            heartbeat_ms=round(HEARTBEAT_S * 1000),
            draining=self.draining,
        )

    async def GetAsset(
        self, request: router_pb2.GetAssetRequest, context: Context
    ) -> AsyncIterator[router_pb2.GetAssetResponse]:
        data = self.assets[request.sha256]
        for start in range(0, max(1, len(data)), 1 << 14):
            yield router_pb2.GetAssetResponse(data=data[start : start + (1 << 14)], total=len(data))


def fails_with(error: Exception) -> Script:
    """A step that raises."""

    def step(_request: router_pb2.SubmitRequest) -> None:
        raise error

    return step


async def _done(result: Any) -> None:
    if asyncio.iscoroutine(result):
        await result


@asynccontextmanager
async def fake_mesh(
    *, workers: int = 1, routers: int = 1, **worker: Any
) -> AsyncIterator[tuple[list[FakeRouter], list[MeshWorker]]]:
    """So many routers before so many workers, all serving."""
    made = [MeshWorker(f"w{number}", **worker) for number in range(1, workers + 1)]
    fronts = [FakeRouter(*made, router_id=f"r{number}") for number in range(1, routers + 1)]
    for each in (*made, *fronts):
        await each.start()
    try:
        yield fronts, made
    finally:
        for each in (*fronts, *made):
            await each.kill()
    assert not any(front.before or front.after for front in fronts), "a scripted step was not used"
    assert not any(own.resets or own.mutators for own in made), "a scripted fault did not happen"
