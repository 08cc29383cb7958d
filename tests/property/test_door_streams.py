"""Whatever connections do, an owner's transcript is exactly what the engine produced, once."""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.wire import Stamp
from tests.fakes.door_world import Gateway, World, request_id
from tests.fakes.engine import Shape
from tests.fakes.owner import encode_submission, submission
from trunkline.worker.v1 import worker_pb2
from workers.door.door import Limits
from workers.door.stream import Window

SEEDS = st.integers(0, 2**32 - 1)
ENDS = tuple(range(40))  # one token in 25 ends a choice


class Trial:
    """A gateway that submits, loses streams, re-submits elsewhere and here, cancels and stops, as chance has it."""

    def __init__(self, seed: int, window: Window) -> None:
        self.rng = random.Random(seed)
        self.world = World(
            limits=Limits(window=window), shape=Shape(max_seqs=4, max_batch_tokens=16, eos_token_ids=ENDS)
        )
        self.gateway = Gateway(self.world)
        self.subs: dict[bytes, worker_pb2.Submission] = {}
        self.stopped: dict[tuple[bytes, int], int] = {}

    def submit(self) -> None:
        if len(self.subs) >= 12:
            return
        sub = submission(
            request_id(len(self.subs) + 1),
            prompt=[self.rng.randrange(900) + 1 for _ in range(self.rng.randrange(1, 40))],
            emitted=[()] * self.rng.choice((1, 1, 3)),
            max_tokens=self.rng.randrange(1, 30),
            seed=self.rng.getrandbits(32),
            logprobs=self.rng.choice((None, None, 2)),
            ignore_eos=self.rng.random() < 0.5,
        )
        self.subs[sub.request_id] = sub
        self.gateway.expect(sub)
        self.send(sub)

    def send(self, sub: worker_pb2.Submission) -> None:
        for _ in range(self.rng.choice((1, 1, 2))):
            (result,) = self.world.submit(sub)
            assert result.HasField("admitted"), result

    def resubmit(self) -> None:
        """The owner gives up on an attempt and asks for the next one, with the transcript it has."""
        running = [each for each, book in self.gateway.books.items() if not book.ending]
        if not running:
            return
        chosen = self.rng.choice(running)
        book, sub = self.gateway.books[chosen], self.subs[chosen]
        sub.attempt += 1
        book.stamp, book.opened = (sub.epoch, sub.attempt), False
        for choice, ids, finish in zip(sub.generate.choices, book.choices, book.finishes, strict=True):
            del choice.emitted[:]
            choice.emitted.extend(ids)
            choice.finish = finish  # type: ignore[assignment]
        self.gateway.handles = {h: r for h, r in self.gateway.handles.items() if r != chosen}
        self.send(sub)

    def cancel(self) -> None:
        running = [each for each, book in self.gateway.books.items() if not book.ending]
        if running and self.gateway.stream is not None:
            chosen = self.rng.choice(running)
            stamp: Stamp = self.gateway.books[chosen].stamp
            del self.gateway.books[chosen]
            self.gateway.handles = {h: r for h, r in self.gateway.handles.items() if r != chosen}
            self.gateway.cancel(chosen, stamp)

    def stop(self) -> None:
        """A stop string at a token that the owner has."""
        open_ = [
            (each, choice)
            for each, book in self.gateway.books.items()
            for choice, ids in enumerate(book.choices)
            if book.opened and not book.ending and not book.finishes[choice] and ids
        ]
        if open_ and self.gateway.stream is not None:
            chosen, choice = self.rng.choice(open_)
            book = self.gateway.books[chosen]
            at = self.rng.randrange(len(book.choices[choice])) + 1
            self.stopped[(chosen, choice)] = at
            book.stop(choice, at)
            self.gateway.stop(chosen, book.stamp, choice, at)

    def reconnect(self) -> None:
        if self.rng.random() < 0.5:
            self.gateway.lose()
            self.world.step(self.rng.randrange(3))
        self.gateway.connect()

    def reconnect_late(self) -> None:
        """A Hello that was written before a submission arrives after it."""
        hello = self.gateway.hello()
        self.submit()
        self.gateway.connect(hello)

    def turn(self) -> None:
        self.world.step()
        self.gateway.pull(self.rng.randrange(4))
        self.gateway.read(self.rng.randrange(4), ack=self.rng.random() < 0.6)

    def run(self, turns: int, acts: list[Callable[[], None]]) -> None:
        self.gateway.connect()
        for _ in range(turns):
            self.rng.choice(acts)()
            self.world.door.tick()
        while any(not book.ending for book in self.gateway.books.values()):
            assert self.world.clock.monotonic() < 1000 + 600, "it does not end"
            if self.gateway.stream is None:
                self.gateway.connect()
            self.world.step()
            self.gateway.read()
        self.world.step()
        self.gateway.read()

    def check(self) -> None:
        for chosen, book in self.gateway.books.items():
            assert book.ending == "finished", book.event
            expected = self.world.expected(self.subs[chosen])
            for number, ids in enumerate(book.choices):
                stop = self.stopped.get((chosen, number))
                assert ids == expected[number][:stop]
                assert book.finishes[number] in (1, 2)
        assert self.world.door.held == 0
        assert self.world.door.loads.current().requests == 0
        assert self.world.door.loads.current().kv_tokens_reserved == 0
        assert not self.world.formula.jobs


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.sampled_from([Window(), Window(messages=2), Window(bytes=600)]))
def test_reconnects_and_lost_acknowledgements_lose_and_double_nothing(seed: int, window: Window) -> None:
    trial = Trial(seed, window)
    trial.run(60, [trial.submit, trial.turn, trial.turn, trial.turn, trial.reconnect, trial.reconnect_late])
    trial.check()


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_attempts_that_come_back_with_a_transcript_continue_it_exactly(seed: int) -> None:
    trial = Trial(seed, Window())
    acts = [trial.submit, trial.turn, trial.turn, trial.resubmit, trial.reconnect, trial.cancel]
    trial.run(80, acts)
    trial.check()


@settings(max_examples=100, deadline=None)
@given(SEEDS)
def test_stop_strings_end_choices_where_their_owner_says_whatever_else_happens(seed: int) -> None:
    trial = Trial(seed, Window())
    trial.run(80, [trial.submit, trial.turn, trial.turn, trial.stop, trial.resubmit, trial.reconnect])
    trial.check()


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_an_engine_that_dies_at_any_moment_releases_everything_and_leaves_nothing(seed: int) -> None:
    rng = random.Random(seed)
    trial = Trial(seed, Window())
    trial.gateway.connect()
    for _ in range(rng.randrange(60)):
        rng.choice([trial.submit, trial.turn, trial.turn, trial.reconnect, trial.cancel])()
    stream = trial.gateway.stream
    trial.world.kill_engine()
    while stream is not None and not (stream.done and not trial.gateway.wire):
        trial.gateway.read(ack=False)
    if stream is not None:
        for book in trial.gateway.books.values():
            assert book.ending in ("finished", "released")
    trial.world.start_engine()
    assert trial.world.door.held == 0
    assert trial.world.door.loads.current().requests == 0


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_bulk_results_arrive_whole_over_any_number_of_streams(seed: int) -> None:
    rng = random.Random(seed)
    world = World(shape=Shape(hidden_size=rng.choice((8, 40_000)), max_batch_tokens=16))
    gateway = Gateway(world, lane=worker_pb2.LANE_BULK)
    subs = [
        encode_submission(request_id(number), inputs=[[rng.randrange(900)] * rng.randrange(1, 9)] * rng.randrange(1, 6))
        for number in range(3)
    ]
    for sub in subs:
        gateway.expect(sub)
        assert world.submit(sub)[0].HasField("admitted")
    for _ in range(40):
        if rng.random() < 0.2:
            gateway.connect()
        world.step()
        gateway.pull(rng.randrange(4))
        gateway.read(rng.randrange(4), ack=rng.random() < 0.5)
    gateway.connect()
    for _ in range(60):
        world.step()
        gateway.read(2)
    for sub in subs:
        book = gateway.books[sub.request_id]
        assert book.ending == "finished"
        assert bytes(book.bulk) == world.expected_bytes(sub)
    assert world.door.held == 0
