"""A door with an engine of `tests.fakes.engine` in one process, on a hand-driven clock, and gateways that keep books.

A `Gateway` here follows the wire's rules as a real one does, and asserts them on everything it hears.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.wire import Stamp, spec_hash
from tests.fakes.clock import FakeClock
from tests.fakes.engine import Formula, Pace, Shape, token, vector
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2
from workers.door.door import Door, Limits
from workers.door.execution import Execution
from workers.door.intake import Served, token_bytes
from workers.door.ledger import Capacity
from workers.door.stream import Stream
from workers.engine import messages as m

ARTEFACT, TOKENIZER = "a" * 64, "b" * 64
PACE = Pace(step_ms=10)
FEATURES = frozenset({"generate", "encode", "logprobs"})


@dataclass
class Witness:
    """Observer that counts."""

    admitted_count: int = 0
    adopted_count: int = 0
    outcomes: list[str] = field(default_factory=list)

    def answered(self, kind: str) -> None: ...

    def admitted(self, execution: Execution, *, adopted: bool) -> None:
        self.admitted_count += not adopted
        self.adopted_count += adopted

    def scheduled(self, execution: Execution) -> None: ...

    def first_token(self, execution: Execution) -> None: ...

    def ended(self, execution: Execution, outcome: str) -> None:
        self.outcomes.append(outcome)

    def stepped(self, step: m.StepOut) -> None: ...


def submission(
    request_id: bytes,
    stamp: Stamp = (1, 1),
    *,
    gateway: int = 7,
    prompt: Iterable[int] = (5, 6, 7),
    emitted: Iterable[Iterable[int]] = ((),),
    finishes: Iterable[int] = (),
    max_tokens: int = 6,
    min_tokens: int = 0,
    seed: int = 11,
    logprobs: int | None = None,
    ignore_eos: bool = True,
    features: Iterable[str] = (),
    **fields: object,
) -> worker_pb2.Submission:
    """A well-formed generation, one choice per entry of `emitted`."""
    ends = [*finishes, *[0] * 128]
    work = worker_pb2.GenerateWork(
        prompt=prompt,
        choices=[
            worker_pb2.ChoiceProgress(index=i, emitted=ids, finish=ends[i])  # type: ignore[arg-type]
            for i, ids in enumerate(emitted)
        ],
        sampling=common_pb2.Sampling(temperature=0.0, top_p=1.0, repetition_penalty=1.0, seed=seed, logprobs=logprobs),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
    )
    return _sealed(worker_pb2.Submission(request_id=request_id, generate=work), stamp, gateway, features, fields)


def encode_submission(
    request_id: bytes, stamp: Stamp = (1, 1), *, gateway: int = 7, inputs: Iterable[Iterable[int]], **fields: object
) -> worker_pb2.Submission:
    """A well-formed encode."""
    work = worker_pb2.EncodeWork(inputs=[worker_pb2.TokenList(ids=ids) for ids in inputs], normalize=True)
    return _sealed(worker_pb2.Submission(request_id=request_id, encode=work), stamp, gateway, (), fields)


def _sealed(
    sub: worker_pb2.Submission, stamp: Stamp, gateway: int, features: Iterable[str], fields: dict[str, object]
) -> worker_pb2.Submission:
    sub.epoch, sub.attempt = stamp
    sub.gateway_id, sub.gateway_incarnation = f"g{gateway}", gateway
    sub.artefact_hash, sub.tokenizer_hash = ARTEFACT, TOKENIZER
    sub.required_features.extend(features)
    sub.budget_ms = 60_000
    for name, value in fields.items():
        setattr(sub, name, value)
    sub.spec_hash = spec_hash(sub)
    return sub


def request_id(number: int) -> bytes:
    """16 bytes."""
    return number.to_bytes(16, "big")


class World:
    """The door and its engine."""

    def __init__(self, *, limits: Limits | None = None, shape: Shape | None = None, requests: int = 64) -> None:
        self.clock = FakeClock()
        self.witness = Witness()
        self.door = Door("w1", "test", self.clock, self.witness, limits or Limits())
        self.shape = shape or Shape()
        self.capacity = Capacity(requests, 4 * requests, 2 * self.shape.kv_blocks * 16)
        self.formula = Formula(self.shape, PACE)
        self.inbox: deque[m.ToEngine] = deque()  # said to the engine, not read yet
        self.incarnation = 100
        self.start_engine()

    def start_engine(self) -> None:
        """A new engine, empty."""
        self.incarnation += 1
        self.formula, self.inbox = Formula(self.shape, PACE), deque()
        served = Served(
            incarnation=self.incarnation,
            artefact_hash=ARTEFACT,
            tokenizer_hash=TOKENIZER,
            features=FEATURES,
            vocab_size=self.shape.vocab_size,
            max_context=self.shape.max_context,
            block_size=16,
            kv_tokens=self.shape.kv_blocks * 16,
            vector_bytes=4 * self.shape.hidden_size,
            sequences=64,
        )
        self.door.engine_up(served, self.capacity, self.inbox.append)

    def kill_engine(self) -> None:
        """It is gone."""
        self.door.engine_down("the engine ended")

    def submit(self, *items: worker_pb2.Submission, router: int = 3, seq: int = 1) -> list[worker_pb2.ItemResult]:
        """One batch; the answers."""
        batch = worker_pb2.SubmitBatchRequest(router_id="r", router_incarnation=router, batch_seq=seq, items=items)
        return list(self.door.routers.submit(batch).results)

    def step(self, count: int = 1, *, took_s: float = 0.010) -> None:
        """The engine reads its messages and makes steps of 10 ms, or another time."""
        for _ in range(count):
            self.formula.now = self.clock.monotonic()
            while self.inbox:
                self.formula.take(self.inbox.popleft())
            said = self.formula.step()
            self.clock.advance(took_s)
            self.door.engine.says(said or m.Tick(self.formula.steps, self.formula.load()))

    def expected(self, sub: worker_pb2.Submission) -> list[list[int]]:
        """All tokens of each choice."""
        work = sub.generate
        prompt = token_bytes(work.prompt)
        ends = set() if work.ignore_eos else set(self.shape.eos_token_ids)
        choices: list[list[int]] = []
        for choice in work.choices:
            drawn = (
                token(prompt, work.sampling.seed, choice.index, place, self.shape.vocab_size)
                for place in range(work.max_tokens)
            )
            choices.append(list(itertools.takewhile(lambda each: each not in ends, drawn)))
        return choices

    def expected_bytes(self, sub: worker_pb2.Submission) -> bytes:
        """The embeddings."""
        return b"".join(vector(token_bytes(each.ids), self.shape.hidden_size) for each in sub.encode.inputs)


@dataclass
class Book:
    """What a gateway knows of one request."""

    stamp: Stamp
    choices: list[list[int]]
    finishes: list[int]
    opened: bool = False
    ending: str = ""
    event: worker_pb2.RequestEvent | None = None
    freed: bool = False
    scheduled: int = 0
    bulk: bytearray = field(default_factory=bytearray)
    logprobs: list[list[common_pb2.TokenLogprob]] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)

    def stop(self, choice: int, at_index: int) -> None:
        """A stop string ended a choice: tokens past it count no more."""
        del self.choices[choice][at_index:]
        self.finishes[choice] = 1
        self.stopped.add(choice)


class Gateway:
    """One life of a gateway, on one lane."""

    def __init__(self, world: World, incarnation: int = 7, lane: worker_pb2.Lane = worker_pb2.LANE_TOKENS) -> None:
        self.world = world
        self.incarnation = incarnation
        self.lane = lane
        self.books: dict[bytes, Book] = {}
        self.stream: Stream | None = None
        self.handles: dict[int, bytes] = {}
        self.generation = 0
        self.seq = 0
        self.wire: deque[worker_pb2.OutputsResponse] = deque()  # sent by the door, not arrived yet
        self.unknown: list[worker_pb2.RequestEvent] = []
        self.strays: list[Stamp] = []

    def expect(self, sub: worker_pb2.Submission) -> Book:
        """A submission of ours is pending."""
        emitted = [list(choice.emitted) for choice in sub.generate.choices]
        book = Book((sub.epoch, sub.attempt), emitted, [c.finish for c in sub.generate.choices])
        book.logprobs = [[] for _ in emitted]
        self.books[sub.request_id] = book
        return book

    def hello(self, *, held: bool = True) -> worker_pb2.Hello:
        """The next Hello."""
        self.generation += 1
        hello = worker_pb2.Hello(
            protocol_major=1,
            id=f"g{self.incarnation}",
            incarnation=self.incarnation,
            stream_generation=self.generation,
            heartbeat_ms=500,
            lane=self.lane,
        )
        for request_id, book in self.books.items():
            if held and book.opened and not book.ending:
                places = [worker_pb2.NextIndex(choice=i, index=len(ids)) for i, ids in enumerate(book.choices)]
                if self.lane == worker_pb2.LANE_BULK:
                    places = [worker_pb2.NextIndex(choice=0, index=len(book.bulk))]
                hello.held.add(request_id=request_id, epoch=book.stamp[0], attempt=book.stamp[1], next=places)
            elif held and not book.ending:
                hello.pending.add(request_id=request_id, epoch=book.stamp[0], attempt=book.stamp[1])
        return hello

    def connect(self, hello: worker_pb2.Hello | None = None) -> Stream:
        """A new stream; the old one just breaks, and what is under way on it is lost."""
        self.handles.clear()
        self.wire.clear()
        self.seq = 0
        self.stream = self.world.door.gateways.connect(hello or self.hello(), lambda: None)
        return self.stream

    def lose(self) -> None:
        """The stream breaks."""
        if self.stream is not None:
            self.world.door.gateways.disconnect(self.stream)
            self.wire.clear()
            self.stream = None

    def pull(self, most: int = 1_000) -> None:
        """The door sends up to `most` messages that are due; they are under way until read, or lost."""
        while self.stream is not None and most > 0 and (message := self.stream.next()) is not None:
            self.wire.append(message)
            most -= 1

    def read(self, most: int = 1_000, *, ack: bool = True) -> None:
        """Reads up to `most` messages, and acknowledges the last."""
        self.pull(most - len(self.wire))
        for _ in range(min(most, len(self.wire))):
            self._take(self.wire.popleft())
        if ack and self.stream is not None and self.seq:
            self.say(ack=worker_pb2.Ack(seq=self.seq))

    def say(self, **message: object) -> None:
        """One message up."""
        assert self.stream is not None
        self.world.door.gateways.hears(self.stream, worker_pb2.OutputsRequest(**message))  # type: ignore[arg-type]

    def cancel(self, request_id: bytes, stamp: Stamp) -> None:
        self.say(cancel=worker_pb2.CancelOutput(request_id=request_id, epoch=stamp[0], attempt=stamp[1]))

    def stop(self, request_id: bytes, stamp: Stamp, choice: int, at_index: int) -> None:
        self.say(
            stop=worker_pb2.StopOutput(
                request_id=request_id, epoch=stamp[0], attempt=stamp[1], choice=choice, at_index=at_index
            )
        )

    def _take(self, message: worker_pb2.OutputsResponse) -> None:
        match message.WhichOneof("message"):
            case "hello":
                assert self.seq == 0
                assert message.hello.incarnation == self.world.incarnation
            case "batch":
                assert message.ByteSize() <= 256 * 1024
                self._batch(message.batch)
            case "bulk":
                self._piece(message.bulk)

    def _next(self, seq: int) -> None:
        assert seq == self.seq + 1, "a gap in the numbers"
        self.seq = seq

    def _piece(self, piece: worker_pb2.BulkPiece) -> None:
        self._next(piece.seq)
        if piece.handle not in self.handles:
            return  # opened though it had ended here; the cancel is on its way
        book = self.books[self.handles[piece.handle]]
        assert not book.ending
        assert len(piece.data) <= 256 * 1024
        assert piece.offset == len(book.bulk), "bytes were lost or doubled"
        book.bulk += piece.data

    def _batch(self, batch: worker_pb2.OutputBatch) -> None:
        self._next(batch.seq)
        for opened in batch.opened:
            self._opened(opened)
        columns = (batch.handle, batch.choice, batch.index, batch.count, batch.finish)
        assert len({len(column) for column in columns}) == 1
        place = 0
        for run, (handle, choice, index, count, finish) in enumerate(zip(*columns, strict=True)):
            ids = list(batch.token_ids[place : place + count])
            place += count
            logprobs = [list(each.tokens) for each in batch.logprobs if each.run == run]
            if handle in self.handles:
                self._run(self.books[self.handles[handle]], choice, index, ids, finish, logprobs)
        assert place == len(batch.token_ids)
        for event in batch.events:
            self._event(event)

    def _opened(self, opened: worker_pb2.Opened) -> None:
        assert opened.handle > max(self.handles, default=0), "handles ascend"
        book = self.books.get(opened.request_id)
        stamp = (opened.epoch, opened.attempt)
        if book is None or book.ending or book.stamp != stamp:
            self.strays.append(stamp)
            self.cancel(opened.request_id, stamp)
            return
        self.handles[opened.handle] = opened.request_id
        book.opened = True

    def _run(
        self,
        book: Book,
        choice: int,
        index: int,
        ids: list[int],
        finish: int,
        logprobs: list[list[common_pb2.TokenLogprob]],
    ) -> None:
        assert not book.ending, "a run after the terminal event"
        if choice in book.stopped:
            return  # its owner saw the stop string first
        assert index == len(book.choices[choice]), "tokens were lost or doubled"
        assert not (book.finishes[choice] and ids), "a token after the finish"
        book.choices[choice] += ids
        book.finishes[choice] = book.finishes[choice] or finish
        for entries in logprobs:
            assert len(entries) == len(ids)
            book.logprobs[choice] += entries

    def _event(self, event: worker_pb2.RequestEvent) -> None:
        request = self.handles.get(event.handle) if event.handle else event.request_id
        kind = event.WhichOneof("event")
        book = self.books.get(request) if request else None
        if book is None:
            self.unknown.append(event)
        elif kind == "freed":
            book.freed = True
        elif kind == "scheduled":
            book.scheduled += 1
        else:
            assert not book.ending, "two endings"
            book.ending, book.event = str(kind), event
            if event.handle:
                del self.handles[event.handle]
