"""What goes down a stream, when, and what happens to it when the reader is slow, gone, replaced or confused."""

from __future__ import annotations

import pytest

from shared.errors import Reason, TrunklineError
from tests.fakes.door_world import Gateway, World, request_id
from tests.fakes.engine import Shape
from tests.fakes.owner import encode_submission, submission
from trunkline.worker.v1 import worker_pb2
from workers.door.batch import EVENT_MOST, TOKEN_MOST, Batch
from workers.door.door import Limits
from workers.door.execution import EngineBroken
from workers.door.stream import FLUSH_S, Window
from workers.engine import messages as m

ONE, TWO = request_id(1), request_id(2)


def opened(world: World, *subs: worker_pb2.Submission) -> Gateway:
    """A gateway with a stream, that has submitted `subs`."""
    gateway = Gateway(world)
    gateway.connect()
    gateway.read()
    for sub in subs:
        gateway.expect(sub)
        world.submit(sub)
    return gateway


def test_the_first_token_goes_at_once_and_others_wait_for_the_flush_time() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=50))
    gateway.read()
    world.step(took_s=0.0001)
    gateway.read()
    assert len(gateway.books[ONE].choices[0]) == 1
    world.step(took_s=0.0001)
    gateway.read()
    assert len(gateway.books[ONE].choices[0]) == 1
    assert gateway.stream is not None
    assert gateway.stream.due == pytest.approx(world.clock.monotonic() - 0.0001 + FLUSH_S)
    world.clock.advance(FLUSH_S)
    gateway.read()
    assert len(gateway.books[ONE].choices[0]) == 2


def test_a_step_longer_than_the_flush_time_is_sent_at_its_end() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=50))
    for count in range(1, 6):
        world.step()
        gateway.read()
        assert len(gateway.books[ONE].choices[0]) == count


def test_opened_comes_before_runs_and_the_finish_with_the_last_token() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=2))
    gateway.pull()
    world.step(2)
    gateway.pull()
    batches = [message.batch for message in gateway.wire if message.HasField("batch")]
    assert [len(batch.opened) for batch in batches] == [1, 0]
    (last,) = batches[1:]
    assert (list(last.count), list(last.finish)) == ([2], [2])
    assert last.events[-1].HasField("finished")
    assert last.events[-1].finished.decode_ms == pytest.approx(10)


def test_what_else_is_new_of_a_request_goes_with_its_one_new_token() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=50), submission(TWO, max_tokens=50))
    gateway.read()  # both are opened, and nothing else is known of them
    world.step()
    gateway.read()
    assert [gateway.books[each].scheduled for each in (ONE, TWO)] == [1, 1]
    world.step()
    world.step()
    epoch, attempt = gateway.books[ONE].stamp
    gateway.say(stop=worker_pb2.StopOutput(request_id=ONE, epoch=epoch, attempt=attempt, choice=0, at_index=2))
    gateway.pull()
    (message,) = gateway.wire
    ended = dict(zip(message.batch.handle, zip(message.batch.count, message.batch.finish, strict=True), strict=True))
    assert ended == {1: (1, 1), 2: (2, 0)}


def test_the_end_of_a_request_is_said_with_its_one_new_token() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=50))
    world.step()
    gateway.read()
    world.step()
    world.kill_engine()
    gateway.pull()
    assert [len(message.batch.handle) for message in gateway.wire] == [1]
    assert gateway.wire[-1].batch.events[-1].HasField("released")


def test_single_tokens_stop_where_the_batch_has_no_room() -> None:
    world = World()
    gateway = opened(world, *(submission(request_id(number), max_tokens=50) for number in range(1, 5)))
    world.step()
    gateway.read()
    world.step()
    assert gateway.stream is not None
    batch = Batch(EVENT_MOST + 2 * TOKEN_MOST)
    assert [batch.token(delivery) for delivery in gateway.stream.outlet.deliveries.values()] == [True, True] + [
        False
    ] * 2


def test_heartbeats_come_every_half_second_and_every_two_when_nothing_runs() -> None:
    world = World()
    gateway = opened(world)
    start = world.clock.monotonic()
    assert gateway.stream is not None
    assert gateway.stream.due == pytest.approx(start + 2.0)
    sub = submission(ONE)
    gateway.expect(sub)
    world.submit(sub)
    gateway.read()
    assert gateway.stream.due == pytest.approx(start + 0.5)
    world.clock.advance(0.5)
    world.door.engine.stalled(0.0)  # its age counts up to the last look
    gateway.pull()
    assert gateway.wire[-1].heartbeat.engine_tick_age_ms == 500


def test_a_reader_that_acknowledges_nothing_gets_the_window_and_then_one_coalesced_batch() -> None:
    world = World(limits=Limits(window=Window(messages=3)))
    gateway = opened(world, submission(ONE, max_tokens=40))
    for _ in range(20):
        world.step()
        gateway.pull()
    batches = [message.batch for message in gateway.wire if message.HasField("batch")]
    assert len(batches) == 3
    gateway.read()
    gateway.pull()
    (message,) = gateway.wire
    assert list(message.batch.count) == [17]


def test_long_transcripts_are_cut_into_batches_within_the_peers_limit() -> None:
    world = World(shape=Shape(max_context=20_000, kv_blocks=4096))
    gateway = Gateway(world)
    sub = submission(ONE, max_tokens=9_000, logprobs=3)
    book = gateway.expect(sub)
    world.submit(sub)
    world.step(9_001)
    hello = gateway.hello()
    hello.max_message_bytes = 16 * 1024
    gateway.connect(hello)
    gateway.pull()
    assert len(gateway.wire) > 20
    assert max(message.ByteSize() for message in gateway.wire) <= 16 * 1024
    gateway.read()
    assert book.choices == world.expected(sub)
    assert len(book.logprobs[0]) == 9_000
    assert book.ending == "finished"


def test_embeddings_go_in_pieces_of_a_quarter_mebibyte_and_in_turns() -> None:
    world = World(shape=Shape(hidden_size=100_000))
    gateway = Gateway(world, lane=worker_pb2.LANE_BULK)
    gateway.connect()
    for number in (1, 2):
        sub = encode_submission(request_id(number), inputs=[[1, 2, number]] * 2)
        gateway.expect(sub)
        world.submit(sub)
    world.step(3)
    gateway.pull()
    pieces = [message.bulk for message in gateway.wire if message.HasField("bulk")]
    assert [piece.handle for piece in pieces[:4]] == [1, 2, 1, 2]
    assert max(message.ByteSize() for message in gateway.wire) <= 256 * 1024
    assert {(piece.total, piece.prompt_tokens) for piece in pieces} == {(800_000, 6)}
    for _ in range(4):
        gateway.read()
    assert [book.ending for book in gateway.books.values()] == ["finished", "finished"]


def test_an_equal_or_older_generation_is_refused_and_a_newer_one_ends_the_old_stream() -> None:
    world = World()
    gateway = Gateway(world)
    first = gateway.connect()
    hello = gateway.hello()
    hello.stream_generation = 1
    with pytest.raises(TrunklineError) as refusal:
        world.door.gateways.connect(hello, lambda: None)
    assert refusal.value.reason is Reason.OWNER_MOVED
    assert not first.done
    gateway.connect()
    assert first.done
    assert first.closing is not None
    assert first.closing.reason is Reason.OWNER_MOVED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol_major": 2}, Reason.PROTOCOL_MISMATCH),
        ({"incarnation": 0}, Reason.BAD_FIELD),
        ({"stream_generation": 0}, Reason.BAD_FIELD),
        ({"lane": worker_pb2.LANE_UNSPECIFIED}, Reason.BAD_FIELD),
        ({"max_message_bytes": 100}, Reason.BAD_FIELD),
    ],
)
def test_a_hello_that_cannot_be_served_is_refused(change: dict[str, int], reason: Reason) -> None:
    world = World()
    hello = Gateway(world).hello()
    for name, value in change.items():
        setattr(hello, name, value)
    with pytest.raises(TrunklineError) as refusal:
        world.door.gateways.connect(hello, lambda: None)
    assert refusal.value.reason is reason


def test_no_stream_begins_while_no_engine_is_ready() -> None:
    world = World()
    world.kill_engine()
    with pytest.raises(TrunklineError) as refusal:
        Gateway(world).connect()
    assert refusal.value.reason is Reason.WORKER_LOST


def test_what_a_hello_leaves_out_is_cancelled_once_its_owner_has_seen_it() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=400))
    world.step()
    gateway.read()
    gateway.lose()
    gateway.connect(gateway.hello(held=False))
    assert world.door.held == 0
    assert world.inbox[-1] == m.Cancel(1)
    world.step()
    gateway.read()
    assert gateway.books[ONE].freed


def test_what_a_hello_lists_and_the_worker_does_not_hold_is_released_or_fenced_by_id() -> None:
    world = World()
    gateway = opened(world, submission(ONE, (1, 1), max_tokens=400), submission(TWO, (1, 1), max_tokens=400))
    world.step()
    gateway.read()
    gateway.lose()
    world.door.routers.cancel(ONE, (1, 1))
    world.submit(submission(TWO, (2, 1), gateway=8, max_tokens=400))
    gateway.connect()
    gateway.read()
    assert (gateway.books[ONE].ending, gateway.books[TWO].ending) == ("released", "fenced")


def test_a_pending_attempt_above_what_is_held_keeps_the_copy_for_adoption_without_opening_it() -> None:
    world = World()
    gateway = Gateway(world)
    world.submit(submission(ONE, (1, 1), max_tokens=400))
    world.step(2)
    gateway.expect(submission(ONE, (1, 2), max_tokens=400))
    gateway.connect()
    gateway.read()
    assert not gateway.strays
    assert world.submit(submission(ONE, (1, 2), max_tokens=400))[0].admitted.adopted
    gateway.read()
    assert gateway.books[ONE].opened
    assert world.door.held == 1


def test_a_reconnect_within_the_grace_keeps_what_the_first_stream_left() -> None:
    world = World(limits=Limits(orphan_grace_s=10))
    sub = submission(ONE)
    gateway = opened(world, sub)
    world.step(2)
    gateway.read()
    gateway.lose()
    world.step(10)
    world.clock.advance(9)
    world.door.tick()
    gateway.connect()
    gateway.read()
    assert gateway.books[ONE].choices == world.expected(sub)
    assert gateway.books[ONE].ending == "finished"


def test_a_cancel_is_answered_by_freed_after_the_engine_let_go() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=400))
    world.step(2)
    gateway.read()
    gateway.cancel(ONE, (1, 1))
    gateway.cancel(ONE, (1, 1))
    gateway.read()
    assert not gateway.books[ONE].freed or world.inbox
    world.step()
    gateway.read()
    assert gateway.books[ONE].freed
    assert world.door.loads.current().requests == 0
    assert not gateway.books[ONE].ending


def test_a_cancel_that_crosses_the_finish_is_still_answered() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=2))
    world.step()
    gateway.read()
    said = world.formula.step()  # the last token, not heard yet
    assert said is not None
    gateway.cancel(ONE, (1, 1))
    world.door.engine.says(said)
    world.step()
    gateway.read()
    assert gateway.books[ONE].freed
    assert not gateway.books[ONE].ending


def test_a_cancel_below_what_is_held_changes_nothing() -> None:
    world = World()
    gateway = opened(world, submission(ONE, (2, 1), max_tokens=400))
    gateway.cancel(ONE, (1, 9))
    gateway.stop(ONE, (1, 9), 0, 0)
    world.step()
    gateway.read()
    assert world.door.held == 1
    assert not gateway.books[ONE].freed
    assert gateway.books[ONE].choices[0]


def test_a_stop_ends_its_choice_and_the_finish_comes_at_the_place_it_named() -> None:
    world = World()
    gateway = opened(world, submission(ONE, emitted=[(), ()], max_tokens=10))
    for _ in range(4):
        world.step()
        gateway.read()
    gateway.books[ONE].stop(0, 2)
    gateway.stop(ONE, (1, 1), 0, 2)
    gateway.stop(ONE, (1, 1), 0, 2)
    gateway.stop(ONE, (1, 1), 9, 2)
    for _ in range(10):
        world.step()
        gateway.read()
    book = gateway.books[ONE]
    assert [len(ids) for ids in book.choices] == [2, 10]
    assert book.ending == "finished"


def test_a_gateway_that_takes_nothing_has_its_requests_paused_and_resumed() -> None:
    limits = Limits(retained_bytes=200, window=Window(messages=1))
    world = World(limits=limits, shape=Shape(max_context=2_000))
    gateway = opened(world, submission(ONE, max_tokens=1_000), submission(TWO, gateway=8, max_tokens=100))
    other = Gateway(world, 8)
    other.expect(submission(TWO, gateway=8, max_tokens=100))
    other.connect()
    for _ in range(80):
        world.step()
        world.door.tick()
        gateway.pull()
        other.read()
    assert world.formula.jobs[1].paused
    assert not world.formula.jobs[2].paused
    assert 50 < world.formula.jobs[1].lines[0].output < 55
    assert world.door.engine.stalled(0.0) is False
    for _ in range(60):
        gateway.read()
        world.step()
    assert not world.formula.jobs[1].paused
    assert world.formula.jobs[1].lines[0].output > 100


def test_a_request_paused_too_long_ends_resource_exhausted() -> None:
    limits = Limits(retained_bytes=200, window=Window(messages=1), slow_reader_s=30)
    world = World(limits=limits)
    gateway = opened(world, submission(ONE, max_tokens=400))
    for _ in range(80):
        world.step()
        world.door.tick()
        gateway.pull()
    world.clock.advance(29)
    world.door.tick()
    assert world.door.loads.current().requests == 1
    world.clock.advance(2)
    world.door.tick()
    world.step()
    assert world.door.loads.current().requests == 0
    gateway.read()
    gateway.read()
    book = gateway.books[ONE]
    assert book.ending == "failed"
    assert book.event is not None
    assert (book.event.failed.reason, book.event.failed.retryable) == ("SLOW_READER", False)
    assert world.door.held == 0


def test_a_failure_of_the_engine_arrives_after_the_tokens_before_it() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=400))
    world.step(2)
    failed = m.Failed(1, "NAN_LOGITS", "not finite", False, True)
    world.door.engine.says(m.StepOut(9, 1.0, [], [failed], world.formula.load()))
    world.clock.advance(FLUSH_S)
    gateway.read()
    book = gateway.books[ONE]
    assert len(book.choices[0]) == 2
    assert book.event is not None
    assert (book.event.failed.reason, book.event.failed.work_done) == ("NAN_LOGITS", True)
    assert world.door.held == 0


def test_draining_by_release_hands_everything_back() -> None:
    world = World()
    gateway = opened(world, submission(ONE, max_tokens=400), submission(TWO, max_tokens=1))
    world.step()
    world.door.drain()
    world.door.release()
    gateway.read()
    book = gateway.books[ONE]
    assert book.event is not None
    assert book.event.released.why == worker_pb2.Released.WHY_DRAINING
    assert gateway.books[TWO].ending == "finished"
    assert world.inbox[-1] == m.Cancel(1)
    world.step()
    assert world.door.held == 0


@pytest.mark.parametrize(
    "said",
    [
        [m.Run(9, 0, 0, (1,))],
        [m.Run(1, 4, 0, (1,))],
        [m.Run(1, 0, 7, (1,))],
    ],
)
def test_an_engine_that_says_what_cannot_be_is_not_believed(said: list[m.Run]) -> None:
    world = World()
    opened(world, submission(ONE))
    with pytest.raises(EngineBroken):
        world.door.engine.says(m.StepOut(1, 1.0, said, [], world.formula.load()))


def test_an_engine_that_finishes_with_a_choice_open_is_not_believed() -> None:
    world = World()
    opened(world, submission(ONE))
    with pytest.raises(EngineBroken):
        world.door.engine.says(m.StepOut(1, 1.0, [], [m.Finished(1, 0, 0, 0, 0, 0, 0)], world.formula.load()))


def test_an_engine_that_makes_no_step_while_work_waits_is_stalled_after_two_seconds() -> None:
    world = World()
    world.clock.advance(100)
    assert not world.door.engine.stalled(0.0)
    world.submit(submission(ONE))
    world.clock.advance(1.9)
    assert not world.door.engine.stalled(0.0)
    world.clock.advance(0.2)
    assert world.door.engine.stalled(0.0)


def test_a_lag_of_the_doors_own_loop_is_not_held_against_the_engine() -> None:
    world = World()
    assert not world.door.engine.stalled(0.0)
    world.submit(submission(ONE))
    world.clock.advance(12)
    assert not world.door.engine.stalled(11.9)
    world.clock.advance(1)
    assert not world.door.engine.stalled(0.0)


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    world = World()
    gateway = opened(world)
    with pytest.raises(TrunklineError) as refusal:
        gateway.say(ack=worker_pb2.Ack(seq=1))
    assert refusal.value.reason is Reason.BAD_FIELD


def test_a_second_hello_is_refused() -> None:
    world = World()
    gateway = opened(world)
    with pytest.raises(TrunklineError):
        gateway.say(hello=gateway.hello())


def test_gateways_without_stream_and_requests_are_forgotten() -> None:
    world = World()
    for incarnation in range(1, 50):
        gateway = Gateway(world, incarnation)
        gateway.connect()
        gateway.lose()
    world.door.tick()
    assert not world.door._outlets.gateways
