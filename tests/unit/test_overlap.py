"""One step in flight: what is launched when, what is thrown away, and that mistakes in it are noticed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.engine_rig import LateRunner, LateStep, Rig, admit
from tests.fakes.hash_model import END, POISON, scores, states
from workers.engine import messages as m
from workers.engine.batch import BLOCK_SIZE
from workers.engine.blocks import next_key
from workers.engine.sampler import Draw
from workers.engine.scheduler import Plan, Scheduler
from workers.engine.sequence import Sequence as Row

SHARED = b"s" * 32


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """What the model says, the end included."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(scores(states(tokens)[-1:]).argmax()))
    return tokens[len(prompt) :]


def ending(place: int) -> list[int]:
    """A prompt whose output's token at `place` is the first end."""
    prompts = ([2, n, k] for n in range(2, POISON) for k in range(2, POISON))
    return next(
        prompt for prompt in prompts if END in greedy(prompt, place + 1)[place:] and END not in greedy(prompt, place)
    )


def ids(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


def late(rig: Rig) -> LateRunner:
    assert isinstance(rig.runner, LateRunner)
    return rig.runner


def steps(rig: Rig) -> list[m.StepOut]:
    """What was said of steps that computed something."""
    said = [message for message in rig.notes.messages if isinstance(message, m.StepOut)]
    return [step for step in said if step.prefill_tokens or step.decode_tokens]


def test_a_step_is_launched_before_the_one_in_flight_is_read_and_none_for_tokens_that_cannot_come() -> None:
    rig = Rig(overlap=True)
    rig.say(admit(1, [2, 3], 3, ignore_eos=True))
    unread = []
    while rig.step():
        unread.append((len(rig.runner.sizes), len(late(rig).unread), len(rig.notes.tokens[1, 0])))
    assert unread == [(1, 1, 0), (2, 1, 1), (3, 1, 2), (3, 0, 3)]
    assert rig.runner.sizes == [2, 1, 1]
    assert rig.notes.tokens[1, 0] == greedy([2, 3], 3)


def test_what_was_computed_after_an_end_is_never_said_nor_published() -> None:
    prompt = ending(14)
    rig = Rig(overlap=True)
    rig.say(admit(1, prompt, 100, cache_scope=SHARED))
    rig.finish()
    tokens = greedy(prompt, 14)
    assert rig.notes.tokens[1, 0] == tokens
    assert rig.notes.finishes[1, 0] == m.Run(1, 0, 14, (), m.Finish.STOP, END)
    assert len(rig.runner.sizes) == 14 + 2, "one step more than the synchronous engine, thrown away"
    assert steps(rig)[-1].decode_tokens == 1
    assert rig.pool.match([next_key(SHARED, ids([*prompt, *tokens][:BLOCK_SIZE]))])
    assert rig.pool.counts.cached == 1


def test_an_end_that_fills_a_block_leaves_the_block_unpublished() -> None:
    prompt = ending(12)  # 3 + 12 tokens and the end: one block, whose last token is no output
    rig = Rig(overlap=True)
    rig.say(admit(1, prompt, 100, cache_scope=SHARED))
    rig.finish()
    assert rig.notes.finishes[1, 0].stop_token == END
    assert rig.pool.counts.cached == 0


def test_a_block_is_shareable_as_soon_as_its_last_token_is_known() -> None:
    rig = Rig(overlap=True)
    rig.say(admit(1, [4] * 12, 30, ignore_eos=True, cache_scope=SHARED))
    key = next_key(SHARED, ids([*[4] * 12, *greedy([4] * 12, 4)]))
    while not rig.pool.match([key]):
        rig.step()
    assert len(rig.notes.tokens[1, 0]) == 4
    assert len(rig.runner.sizes) == 5, "the step that fills it is in flight"


def test_rows_whose_draw_depends_on_the_last_token_skip_a_step_and_hold_nobody_up() -> None:
    rig = Rig(overlap=True)
    penalised = m.Sampling(repetition_penalty=1.3)
    rig.say(admit(1, [2, 3], 6, ignore_eos=True), admit(2, [2, 4], 6, ignore_eos=True, sampling=penalised))
    rig.finish()
    assert rig.runner.keys[:6] == [{1, 2}, {1}, {1, 2}, {1}, {1, 2}, {1}]
    alone = Rig()
    alone.say(admit(2, [2, 4], 6, ignore_eos=True, sampling=penalised))
    alone.finish()
    assert rig.notes.tokens[2, 0] == alone.notes.tokens[2, 0]


def test_a_cancel_is_answered_at_once_and_its_blocks_go_to_the_next_one_while_the_step_runs() -> None:
    rig = Rig(blocks=4, overlap=True)
    rig.say(admit(1, [2] * 40, 20, ignore_eos=True))
    for _ in range(3):
        rig.step()
    heard = len(rig.notes.tokens[1, 0])
    rig.say(m.Cancel(1), admit(2, [3] * 40, 5, ignore_eos=True))
    rig.step()
    assert isinstance(rig.notes.ended[1], m.Freed)
    assert rig.runner.keys[-1] == {2}
    rig.finish()
    assert len(rig.notes.tokens[1, 0]) == heard
    assert rig.notes.tokens[2, 0] == greedy([3] * 40, 5)


def test_a_step_in_flight_lands_when_everything_is_paused_and_then_the_engine_rests() -> None:
    rig = Rig(overlap=True)
    rig.say(admit(1, [2, 3], 6, ignore_eos=True))
    rig.step()
    rig.say(m.Pause(1, True), m.Pause(1, False), m.Pause(1, True))
    assert rig.engine.busy
    rig.step()
    assert not rig.engine.busy
    assert rig.notes.tokens[1, 0] == greedy([2, 3], 1)
    assert not rig.step()
    rig.say(m.Pause(1, False))
    rig.finish()
    assert rig.notes.tokens[1, 0] == greedy([2, 3], 6)


def test_a_pause_that_is_over_at_once_costs_a_step_and_no_token() -> None:
    rig = Rig(overlap=True)
    rig.say(admit(1, [2] * 20, 6, ignore_eos=True), admit(2, [3], 6, ignore_eos=True))
    rig.step()
    rig.step()
    rig.say(m.Pause(1, True), m.Pause(1, False))
    rig.step()
    assert rig.runner.keys[-1] == {2}, "what it draws in flight comes first"
    rig.finish()
    assert rig.notes.tokens[1, 0] == greedy([2] * 20, 6)
    assert rig.notes.tokens[2, 0] == greedy([3], 6)


def test_the_last_token_of_a_paused_request_ends_it() -> None:
    rig = Rig(overlap=True)
    rig.say(admit(1, [2, 3], 2, ignore_eos=True))
    rig.step()
    rig.step()
    rig.say(m.Pause(1, True))
    rig.step()
    assert isinstance(rig.notes.ended[1], m.Finished)
    assert rig.pool.counts.used == 0


class Waiting(LateRunner):
    """Each result comes 30 ms after somebody asks for it."""

    clock: FakeClock

    def landed(self) -> None:
        self.clock.advance(0.03)


def test_a_step_lasts_from_when_the_device_was_free_for_it() -> None:
    runner = Waiting(64)
    rig = Rig(runner=runner)
    runner.clock = rig.clock
    rig.say(admit(1, [2, 3], 5, ignore_eos=True))
    rig.finish()
    # From one result to the next, not from the launch, which is one step earlier.
    assert [step.duration_ms for step in steps(rig)] == pytest.approx([40.0] * 5)


def test_whoever_ended_in_flight_makes_room_before_anybody_is_preempted() -> None:
    rig = Rig(blocks=5, batch_tokens=64, overlap=True)
    rig.say(admit(1, [2] * 31, 3, ignore_eos=True), admit(2, [3] * 30, 8, ignore_eos=True))
    for _ in range(3):
        rig.step()
    assert rig.pool.available == 0
    assert rig.runner.keys[-1] == {1, 2}
    rig.step()
    assert len(rig.runner.keys) == 3, "the next token of 2 has no room: the step in flight is read first"
    rig.finish()
    assert rig.scheduler.preemptions == 0
    assert rig.notes.tokens[2, 0] == greedy([3] * 30, 8)


# Mistakes that must be noticed.


class Mistaken(LateRunner):
    """Gives each row the pending token of its neighbour."""

    def launch(self, plan: Plan, draws: Sequence[Draw]) -> LateStep:  # type: ignore[override]
        step = super().launch(plan, draws)
        rows, picks = [row for row, _ in step.carried], [pick for _, pick in step.carried]
        step.carried = list(zip(rows, picks[1:] + picks[:1], strict=True))
        return step

    def catch_up(self, last: LateStep) -> None:
        if last not in self.unread:  # read, not merely launched: by now the mistake is made
            super().catch_up(last)


def test_a_pending_token_of_another_row_is_noticed() -> None:
    rig = Rig(runner=Mistaken(64))
    rig.say(admit(1, [2, 3], 6, ignore_eos=True), admit(2, [2, 4], 6, ignore_eos=True))
    rig.finish()
    assert rig.notes.tokens[1, 0] != greedy([2, 3], 6)
    assert rig.notes.tokens[2, 0] != greedy([2, 4], 6)


def test_a_block_that_is_published_with_a_pending_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(self: Scheduler, row: Row) -> None:
        for index, key in enumerate(row.keys(row.computed // BLOCK_SIZE)):
            self.pool.publish(int(row.blocks[index]), key)

    monkeypatch.setattr(Scheduler, "_publish", publish)
    rig = Rig(overlap=True)
    rig.say(admit(1, [2] * 12, 10, ignore_eos=True))
    with pytest.raises(AssertionError, match="tokens that are not known"):
        rig.finish()


def test_a_preemption_with_a_step_in_flight_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_short", lambda *_: False)
    rig = Rig(blocks=5, overlap=True)
    rig.say(admit(1, [2] * 20, 40, ignore_eos=True), admit(2, [3] * 20, 40, ignore_eos=True))
    with pytest.raises(AssertionError, match="preempted by a plan that could have waited"):
        rig.finish()
