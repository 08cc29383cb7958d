"""A door and an engine of `tests.fakes.engine` in one process, on a hand-driven clock, and gateways that keep books."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.clock import Clock
from tests.fakes.clock import FakeClock
from tests.fakes.engine import Formula, Pace, Shape, token, vector
from tests.fakes.owner import ARTEFACT, TOKENIZER, Owner
from trunkline.worker.v1 import worker_pb2
from workers.door.door import Door, Limits
from workers.door.execution import Execution
from workers.door.holdings import Observer
from workers.door.intake import Served, token_bytes
from workers.door.ledger import Capacity
from workers.door.stream import Stream
from workers.engine import messages as m

PACE = Pace(step_ms=10)
FEATURES = frozenset({"generate", "encode", "logprobs"})


def request_id(number: int) -> bytes:
    """16 bytes."""
    return number.to_bytes(16, "big")


def expected(sub: worker_pb2.Submission, shape: Shape) -> list[list[int]]:
    """All tokens of each choice."""
    work = sub.generate
    prompt = token_bytes(work.prompt)
    ends = set() if work.ignore_eos else set(shape.eos_token_ids)
    choices: list[list[int]] = []
    for choice in work.choices:
        drawn = (
            token(prompt, work.sampling.seed, choice.index, place, shape.vocab_size) for place in range(work.max_tokens)
        )
        choices.append(list(itertools.takewhile(lambda each: each not in ends, drawn)))
    return choices


def expected_bytes(sub: worker_pb2.Submission, shape: Shape) -> bytes:
    """The embeddings."""
    return b"".join(vector(token_bytes(each.ids), shape.hidden_size) for each in sub.encode.inputs)


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


class World:
    """The door and its engine."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        shape: Shape | None = None,
        requests: int = 64,
        observe: Callable[[Clock], Observer] | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.witness = Witness()
        observer = observe(self.clock) if observe is not None else self.witness
        self.door = Door("w1", "test", self.clock, observer, limits or Limits())
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
        return expected(sub, self.shape)

    def expected_bytes(self, sub: worker_pb2.Submission) -> bytes:
        """The embeddings."""
        return expected_bytes(sub, self.shape)


class Gateway(Owner):
    """An owner beside the door: what it hears has been under way until it reads it."""

    def __init__(self, world: World, incarnation: int = 7, lane: worker_pb2.Lane = worker_pb2.LANE_TOKENS) -> None:
        super().__init__(incarnation, lane)
        self.world = world
        self.stream: Stream | None = None
        self.wire: deque[worker_pb2.OutputsResponse] = deque()  # sent by the door, not arrived yet

    def connect(self, hello: worker_pb2.Hello | None = None) -> Stream:
        """A new stream; the old one just breaks, and what is under way on it is lost."""
        self.begin()
        self.wire.clear()
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
            self.take(self.wire.popleft())
        if ack and self.stream is not None and self.seq:
            self.say(ack=worker_pb2.Ack(seq=self.seq))

    def say(self, **message: object) -> None:
        """One message up."""
        assert self.stream is not None
        self.world.door.gateways.hears(self.stream, worker_pb2.OutputsRequest(**message))  # type: ignore[arg-type]
