"""Which submissions the door takes, adopts and refuses, and what refusals leave behind."""

from __future__ import annotations

import pytest

from tests.fakes.door_world import Gateway, World, request_id
from tests.fakes.engine import Shape
from tests.fakes.owner import encode_submission, submission
from trunkline.worker.v1 import worker_pb2
from workers.door.door import Limits
from workers.engine import messages as m

ONE, TWO = request_id(1), request_id(2)
Mismatch = worker_pb2.Mismatch


def kind(result: worker_pb2.ItemResult) -> str:
    return result.WhichOneof("result") or ""


def test_the_same_item_again_is_admitted_and_starts_nothing_twice() -> None:
    world = World()
    sub = submission(ONE)
    assert [kind(each) for each in world.submit(sub, sub)] == ["admitted", "admitted"]
    assert kind(world.submit(sub, router=4)[0]) == "admitted"
    assert world.witness.admitted_count == 1
    assert [type(each) for each in world.inbox] == [m.Admit]


def test_a_lower_stamp_than_any_seen_is_fenced_with_the_highest() -> None:
    world = World()
    world.submit(submission(ONE, (2, 3)))
    for stamp in ((2, 2), (1, 9)):
        (result,) = world.submit(submission(ONE, stamp))
        assert (result.fenced.epoch, result.fenced.attempt) == (2, 3)


@pytest.mark.parametrize("lane", ["router", "gateway"])
def test_a_cancel_that_overtakes_its_submission_keeps_it_out_for_a_minute(lane: str) -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    if lane == "router":
        assert world.door.routers.cancel(ONE, (1, 2)) is False
    else:
        gateway.cancel(ONE, (1, 2))
        gateway.read()
        (freed,) = gateway.unknown
        assert freed.request_id == ONE
        assert freed.HasField("freed")
    world.clock.advance(59)
    world.door.tick()
    assert kind(world.submit(submission(ONE, (1, 1)))[0]) == "fenced"
    assert kind(world.submit(submission(ONE, (1, 2)))[0]) == "fenced"
    assert kind(world.submit(submission(ONE, (1, 3)))[0]) == "admitted"


def test_a_mark_lapses_after_its_time() -> None:
    world = World()
    world.door.routers.cancel(ONE, (1, 1))
    world.clock.advance(61)
    world.door.tick()
    assert kind(world.submit(submission(ONE))[0]) == "admitted"


def test_a_stop_that_overtakes_its_submission_keeps_it_out() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    gateway.stop(ONE, (1, 1), 0, 3)
    assert kind(world.submit(submission(ONE))[0]) == "fenced"


def test_a_finished_attempt_refuses_its_own_stamp_once_acknowledged() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    sub = submission(ONE, max_tokens=2)
    gateway.expect(sub)
    world.submit(sub)
    world.step(3)
    assert kind(world.submit(sub)[0]) == "admitted"  # held until acknowledged
    gateway.read()
    assert kind(world.submit(sub)[0]) == "fenced"


def test_a_rejected_item_may_come_back_at_its_stamp_and_raises_the_fence_for_lower_ones() -> None:
    world = World(requests=1)
    world.submit(submission(TWO))
    (result,) = world.submit(submission(ONE, (1, 2)))
    assert (result.rejected.load.requests, result.rejected.load.max_requests) == (1, 1)
    world.door.routers.cancel(TWO, (1, 1))
    assert kind(world.submit(submission(ONE, (1, 1)))[0]) == "fenced"
    assert kind(world.submit(submission(ONE, (1, 2)))[0]) == "admitted"


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"artefact_hash": "c" * 64}, Mismatch.WHAT_ARTEFACT),
        ({"tokenizer_hash": "c" * 64}, Mismatch.WHAT_TOKENIZER),
        ({"adapter_hash": "c" * 64}, Mismatch.WHAT_ADAPTER),
        ({"features": ["generate", "telepathy"]}, Mismatch.WHAT_FEATURE),
        ({"prompt": [1] * 512}, Mismatch.WHAT_TOO_LARGE),
        ({"prompt": [1000]}, Mismatch.WHAT_MALFORMED),
        ({"prompt": [2**32 - 1]}, Mismatch.WHAT_MALFORMED),
        ({"prompt": []}, Mismatch.WHAT_MALFORMED),
        ({"emitted": [[1] * 7]}, Mismatch.WHAT_MALFORMED),
        ({"emitted": []}, Mismatch.WHAT_MALFORMED),
        ({"max_tokens": 0}, Mismatch.WHAT_MALFORMED),
        ({"min_tokens": 7}, Mismatch.WHAT_MALFORMED),
        ({"logprobs": 21}, Mismatch.WHAT_MALFORMED),
        ({"budget_ms": 0}, Mismatch.WHAT_MALFORMED),
        ({"gateway_id": ""}, Mismatch.WHAT_MALFORMED),
        ({"cache_scope": b"x"}, Mismatch.WHAT_MALFORMED),
        ({"epoch": 0}, Mismatch.WHAT_MALFORMED),
    ],
)
def test_what_cannot_be_served_says_what_does_not_agree(fields: dict[str, object], what: Mismatch.What) -> None:
    world = World()
    (result,) = world.submit(submission(ONE, **fields))  # type: ignore[arg-type]
    assert result.mismatch.what == what, result
    assert result.mismatch.message
    assert world.door.held == 0
    assert not world.inbox


def test_a_spec_hash_that_is_not_the_submissions_is_malformed_and_touches_nothing() -> None:
    world = World()
    world.submit(submission(ONE, (1, 1)))
    forged = submission(ONE, (1, 2))
    forged.generate.max_tokens += 1
    (result,) = world.submit(forged)
    assert result.mismatch.what == Mismatch.WHAT_MALFORMED
    assert kind(world.submit(submission(ONE, (1, 1)))[0]) == "admitted"


def test_what_can_never_fit_the_pool_is_too_large() -> None:
    world = World(shape=Shape(kv_blocks=4))
    (result,) = world.submit(submission(ONE, prompt=[1] * 60, max_tokens=20))
    assert result.mismatch.what == Mismatch.WHAT_TOO_LARGE
    assert kind(world.submit(submission(TWO, prompt=[1] * 60, max_tokens=4))[0]) == "admitted"


def test_more_kv_than_the_budget_is_admitted_alone_but_not_beside_others() -> None:
    world = World(shape=Shape(kv_blocks=8))
    wide = submission(ONE, prompt=[1] * 10, emitted=[()] * 8, max_tokens=100)
    assert kind(world.submit(submission(TWO), wide)[1]) == "rejected"
    world.door.routers.cancel(TWO, (1, 1))
    assert kind(world.submit(wide)[0]) == "admitted"


def test_encode_work_beyond_its_bounds_is_too_large() -> None:
    world = World(shape=Shape(hidden_size=2_000_000))
    (result,) = world.submit(encode_submission(ONE, inputs=[[1, 2]] * 5))
    assert result.mismatch.what == Mismatch.WHAT_TOO_LARGE
    (result,) = World().submit(encode_submission(ONE, inputs=[[1]] * 65))
    assert result.mismatch.what == Mismatch.WHAT_TOO_LARGE


def test_a_choice_at_max_tokens_finishes_by_length_without_a_token_and_without_the_engine() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    sub = submission(ONE, emitted=[[1, 2, 3, 4, 5, 6], [9, 8]], finishes=[0, 1])
    book = gateway.expect(sub)
    assert kind(world.submit(sub)[0]) == "admitted"
    gateway.read()
    assert not world.inbox
    assert book.choices == [[1, 2, 3, 4, 5, 6], [9, 8]]
    assert book.finishes == [2, 1]
    assert book.ending == "finished"
    assert world.door.held == 0


def test_only_choices_without_a_finish_are_run() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    full = world.expected(submission(ONE, emitted=[(), (), ()]))
    sub = submission(ONE, (1, 2), emitted=[full[0][:2], full[1][:3], ()], finishes=[0, 1, 0])
    book = gateway.expect(sub)
    world.submit(sub)
    (admit,) = world.inbox
    assert isinstance(admit, m.Admit)
    assert [choice.index for choice in admit.choices] == [0, 2]
    for _ in range(8):
        world.step()
        gateway.read()
    assert book.choices == [full[0], full[1][:3], full[2]]
    assert book.ending == "finished"


def test_a_higher_attempt_that_continues_the_transcript_is_adopted_and_the_old_handle_ends_fenced() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    first = submission(ONE, max_tokens=20)
    book = gateway.expect(first)
    world.submit(first)
    world.step(4)
    gateway.read()
    old = dict(gateway.handles)
    second = submission(ONE, (1, 2), max_tokens=20, emitted=[book.choices[0][:1]])
    gateway.books[TWO] = book  # the old attempt's, to hear its end
    gateway.handles = dict.fromkeys(old, TWO)
    again = gateway.expect(second)
    (result,) = world.submit(second)
    assert result.admitted.adopted
    for _ in range(20):
        world.step()
        gateway.read()
    assert book.ending == "fenced"
    assert book.event is not None
    assert (book.event.fenced.epoch, book.event.fenced.attempt) == (1, 2)
    assert again.choices == world.expected(second)
    assert again.ending == "finished"
    assert again.scheduled == 1
    assert world.witness.admitted_count == 1


def test_another_gateway_adopts_a_finished_request_and_gets_its_tail_and_its_end() -> None:
    world = World()
    old, new = Gateway(world, 7), Gateway(world, 8)
    old.connect()
    first = submission(ONE)
    old.expect(first)
    world.submit(first)
    world.step(8)  # finished, nothing read: retained
    expected = world.expected(first)
    second = submission(ONE, (2, 1), gateway=8, emitted=[expected[0][:2]])
    book = new.expect(second)
    new.connect()
    assert world.submit(second)[0].admitted.adopted
    new.read()
    assert book.choices == expected
    assert book.ending == "finished"
    old.read()
    assert not old.books[ONE].opened
    assert world.door.held == 0


@pytest.mark.parametrize("change", ["emitted", "seed", "longer"])
def test_a_transcript_that_is_not_a_prefix_drops_the_copy_and_prefills(change: str) -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    first = submission(ONE)
    world.submit(first)
    world.step(3)
    right = world.expected(first)[0]
    changed = {
        "emitted": {"emitted": [[right[0], (right[1] + 1) % 1000]]},
        "seed": {"seed": 99, "emitted": [right[:1]]},
        "longer": {"emitted": [right[:5]]},
    }[change]
    second = submission(ONE, (1, 2), **changed)  # type: ignore[arg-type]
    (result,) = world.submit(second)
    assert not result.admitted.adopted
    assert [type(each) for each in world.inbox] == [m.Cancel, m.Admit]
    assert world.door.loads.current().requests == 1


def test_log_probabilities_that_were_let_go_cannot_be_adopted() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    first = submission(ONE, logprobs=1, max_tokens=20)
    book = gateway.expect(first)
    world.submit(first)
    world.step(5)
    gateway.read()
    assert len(book.logprobs[0]) == len(book.choices[0]) > 1
    shorter = submission(ONE, (1, 2), logprobs=1, max_tokens=20, emitted=[book.choices[0][:1]])
    assert not world.submit(shorter)[0].admitted.adopted


def test_an_adopter_that_knows_of_a_finish_ends_the_choice_here_too() -> None:
    world = World()
    gateway = Gateway(world)
    gateway.connect()
    first = submission(ONE, emitted=[(), ()], max_tokens=20)
    world.submit(first)
    world.step(4)
    full = world.expected(first)
    second = submission(ONE, (1, 2), emitted=[full[0][:2], full[1][:1]], finishes=[1, 0], max_tokens=20)
    book = gateway.expect(second)
    assert world.submit(second)[0].admitted.adopted
    for _ in range(25):
        world.step()
        gateway.read()
    assert book.choices == [full[0][:2], full[1]]
    assert book.ending == "finished"


def test_draining_refuses_what_is_new_and_still_adopts_what_is_held() -> None:
    world = World()
    world.submit(submission(ONE))
    world.door.drain()
    assert world.submit(submission(TWO))[0].rejected.draining
    assert world.submit(submission(ONE, (1, 2)))[0].admitted.adopted


def test_without_an_engine_everything_is_rejected_under_incarnation_zero() -> None:
    world = World()
    world.kill_engine()
    batch = worker_pb2.SubmitBatchRequest(router_incarnation=3, batch_seq=1, items=[submission(ONE)])
    answer = world.door.routers.submit(batch)
    assert answer.incarnation == 0
    assert kind(answer.results[0]) == "rejected"


def test_the_load_counts_an_admission_before_the_engine_has_read_it() -> None:
    world = World()
    world.submit(submission(ONE, prompt=[1] * 30, emitted=[(), ()]), seq=9)
    load = world.door.loads.current()
    assert (load.requests, load.waiting, load.queued_prefill_tokens, load.kv_tokens_reserved) == (1, 2, 60, 42)
    assert world.door.routers.echo(3) == 9
    assert world.door.routers.echo(4) == 0
    world.step(3)
    load = world.door.loads.current()
    assert (load.waiting, load.running, load.queued_prefill_tokens) == (0, 2, 2)


def test_an_orphan_is_dropped_after_the_grace_and_not_before() -> None:
    world = World(limits=Limits(orphan_grace_s=10))
    world.submit(submission(ONE, max_tokens=500))
    world.step()
    world.clock.advance(9.9)
    world.door.tick()
    assert world.door.held == 1
    world.clock.advance(0.2)
    world.door.tick()
    assert world.door.held == 0
    assert world.inbox[-1] == m.Cancel(1)
    assert kind(world.submit(submission(ONE))[0]) == "fenced"
