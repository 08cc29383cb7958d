"""An owner of requests, as a gateway is one: submissions, books of what came back, the rules of the wire as asserts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.wire import Stamp, spec_hash
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2

ARTEFACT, TOKENIZER = "a" * 64, "b" * 64


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


class Owner:
    """One life of a gateway, on one lane; how messages travel is its heirs' affair."""

    def __init__(self, incarnation: int, lane: worker_pb2.Lane = worker_pb2.LANE_TOKENS) -> None:
        self.incarnation = incarnation
        self.lane = lane
        self.books: dict[bytes, Book] = {}
        self.handles: dict[int, bytes] = {}
        self.generation = 0
        self.seq = 0
        self.worker: worker_pb2.Hello | None = None
        self.beats: list[worker_pb2.WorkerHeartbeat] = []
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

    def begin(self) -> None:
        """A new stream: numbers and handles start afresh."""
        self.handles.clear()
        self.seq = 0
        self.worker = None

    def say(self, **message: object) -> None:
        """One message up."""
        raise NotImplementedError

    def cancel(self, request_id: bytes, stamp: Stamp) -> None:
        """A request is to end."""
        self.say(cancel=worker_pb2.CancelOutput(request_id=request_id, epoch=stamp[0], attempt=stamp[1]))

    def stop(self, request_id: bytes, stamp: Stamp, choice: int, at_index: int) -> None:
        """A stop string was seen."""
        self.say(
            stop=worker_pb2.StopOutput(
                request_id=request_id, epoch=stamp[0], attempt=stamp[1], choice=choice, at_index=at_index
            )
        )

    def take(self, message: worker_pb2.OutputsResponse) -> None:
        """One message down."""
        match message.WhichOneof("message"):
            case "hello":
                assert self.worker is None
                assert self.seq == 0
                self.worker = message.hello
            case "heartbeat":
                self.beats.append(message.heartbeat)
            case "batch":
                assert message.ByteSize() <= 256 * 1024
                self._batch(message.batch)
            case "bulk":
                self._piece(message.bulk)
            case other:
                raise AssertionError(f"{other} is not expected")

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
