"""What the engine says: refusals, endings, receipts, heartbeats."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.fakes.engine_rig import Rig, admit
from tests.fakes.hash_model import END, POISON, VOCAB, scores, states
from workers.engine import messages as m
from workers.engine.engine import SlowestStep


def first_tokens(prompt: list[int], count: int) -> list[int]:
    """What the model says greedily, the end included."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(scores(states(tokens)[-1:]).argmax()))
    return tokens[len(prompt) :]


def failure(rig: Rig, key: int) -> m.Failed:
    event = rig.notes.ended[key]
    assert isinstance(event, m.Failed)
    return event


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": b""}, "prompt is empty"),
        ({"prompt": m.pack_tokens([3, VOCAB])}, "outside the vocabulary"),
        ({"prompt": m.pack_tokens([3, -1])}, "outside the vocabulary"),
        ({"choices": []}, "at least one"),
        ({"choices": [m.ChoiceIn(1), m.ChoiceIn(1)]}, "distinct"),
        ({"choices": [m.ChoiceIn(0, m.pack_tokens([VOCAB]))]}, "emitted has token ids"),
        ({"choices": [m.ChoiceIn(0, m.pack_tokens([2] * 8))]}, "already has max_tokens"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ({"cache_scope": b"short"}, "32 bytes"),
        ({"sampling": m.Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": m.Sampling(temperature=math.nan)}, "temperature"),
        ({"sampling": m.Sampling(temperature=math.inf)}, "temperature"),
        ({"sampling": m.Sampling(top_k=-1)}, "top_k"),
        ({"sampling": m.Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": m.Sampling(min_p=-0.1)}, "min_p"),
        ({"sampling": m.Sampling(repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": m.Sampling(presence_penalty=math.nan)}, "presence_penalty"),
        ({"sampling": m.Sampling(frequency_penalty=math.inf)}, "frequency_penalty"),
        ({"sampling": m.Sampling(logprobs=21)}, "logprobs"),
        ({"sampling": m.Sampling(logit_bias={VOCAB: 1.0})}, "logit_bias"),
        ({"sampling": m.Sampling(logit_bias={0: math.nan})}, "logit_bias"),
    ],
)
def test_what_could_break_a_step_is_refused_in_words(change: dict[str, object], words: str) -> None:
    rig = Rig()
    good = admit(1, [2, 3, 4])
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    rig.say(m.Admit(**fields | change), admit(2, [2, 3, 4]))
    rig.finish()
    assert failure(rig, 1).reason == "BAD_FIELD"
    assert words in failure(rig, 1).message
    assert not failure(rig, 1).work_done
    assert isinstance(rig.notes.ended[2], m.Finished)


def test_a_prompt_must_leave_room_for_one_token_and_an_encode_only_for_itself() -> None:
    rig = Rig(context=32)
    rig.say(admit(1, [2] * 32), admit(2, [2] * 31, ignore_eos=True), m.Encode(3, [m.pack_tokens([2] * 32)]))
    rig.say(m.Encode(4, [m.pack_tokens([2]), m.pack_tokens([2] * 33)]), m.Encode(5, []), m.Encode(6, [b""]))
    rig.finish()
    assert failure(rig, 1).reason == failure(rig, 4).reason == "PROMPT_TOO_LONG"
    assert failure(rig, 5).reason == failure(rig, 6).reason == "BAD_FIELD"
    assert rig.notes.finishes[2, 0].finish == m.Finish.LENGTH
    assert rig.notes.vectors.keys() == {3}


def test_more_than_the_engine_may_hold_is_refused_and_may_be_tried_again() -> None:
    rig = Rig(held=2)
    rig.say(admit(1, [2], choices=2), admit(2, [2]))
    rig.finish()
    assert failure(rig, 2).reason == "QUEUE_FULL"
    assert failure(rig, 2).retryable


def test_an_end_token_is_no_output_and_travels_as_the_finish() -> None:
    prompt = next([2, n, k] for n in range(2, 40) for k in range(2, 40) if END in first_tokens([2, n, k], 4)[1:])
    tokens = first_tokens(prompt, 4)
    place = tokens.index(END)
    rig = Rig()
    rig.say(admit(1, prompt, 4), admit(2, prompt, 4, ignore_eos=True), admit(3, prompt, 4, min_tokens=4))
    rig.finish()
    assert rig.notes.tokens[1, 0] == tokens[:place]
    assert rig.notes.finishes[1, 0] == m.Run(1, 0, place, (), m.Finish.STOP, END)
    assert rig.notes.tokens[2, 0] == tokens
    assert len(rig.notes.tokens[3, 0]) == 4
    assert END not in rig.notes.tokens[3, 0]


def test_the_last_token_and_its_finish_are_one_message() -> None:
    rig = Rig()
    rig.say(admit(1, [2, 3], 3, ignore_eos=True))
    rig.finish()
    runs = [run for step in rig.notes.messages if isinstance(step, m.StepOut) for run in step.runs]
    assert [(run.index, len(run.tokens), run.finish) for run in runs] == [(0, 1, 0), (1, 1, 0), (2, 1, m.Finish.LENGTH)]


def test_a_stopped_choice_ends_alone_and_the_last_one_ends_the_request() -> None:
    rig = Rig()
    rig.say(admit(1, [2, 3], 100, choices=2, ignore_eos=True))
    for _ in range(5):
        rig.step()
    rig.say(m.StopChoice(1, 0), m.StopChoice(1, 9), m.StopChoice(7, 0))
    rig.step()
    stopped = rig.notes.finishes[1, 0]
    assert (stopped.finish, stopped.index, stopped.tokens) == (m.Finish.STOP, len(rig.notes.tokens[1, 0]), ())
    assert 1 not in rig.notes.ended
    rig.say(m.StopChoice(1, 1), m.StopChoice(1, 0))
    rig.step()
    assert isinstance(rig.notes.ended[1], m.Finished)


def test_an_encode_has_no_choices_to_stop() -> None:
    rig = Rig()
    rig.say(m.Encode(1, [m.pack_tokens([4])]), m.StopChoice(1, 0))
    rig.finish()
    assert rig.notes.vectors.keys() == {1}
    assert not rig.notes.finishes


def test_every_cancel_is_answered_with_the_step_after_which_nothing_is_held() -> None:
    rig = Rig()
    rig.say(admit(1, [2] * 40, 100, ignore_eos=True))
    rig.step()
    rig.step()
    rig.say(m.Cancel(1), m.Cancel(99), m.Cancel(1))
    assert not rig.step()
    last = rig.notes.messages[-1]
    assert isinstance(last, m.StepOut)
    assert [(event.key, event.step) for event in last.events if isinstance(event, m.Freed)] == [(1, 2), (99, 2), (1, 2)]
    assert last.load.kv_blocks_used == 0


def test_a_request_that_moved_here_with_a_full_context_ends_without_a_step() -> None:
    rig = Rig(context=16)
    emitted = m.ChoiceIn(3, m.pack_tokens([4] * 6))
    rig.say(m.Admit(1, m.pack_tokens([2] * 10), [emitted], m.Sampling(), max_tokens=50))
    assert not rig.step()
    assert rig.notes.finishes[1, 3] == m.Run(1, 3, 6, (), m.Finish.LENGTH)
    assert isinstance(rig.notes.ended[1], m.Finished)


def test_a_continued_choice_draws_what_it_would_have_drawn() -> None:
    sampling = m.Sampling(temperature=1.0, seed=4, repetition_penalty=1.1, presence_penalty=0.4)
    rig = Rig()
    rig.say(admit(1, [2, 3], 20, sampling=sampling, ignore_eos=True))
    rig.finish()
    whole = rig.notes.tokens[1, 0]
    moved = m.ChoiceIn(0, m.pack_tokens(whole[:7]))
    rig.say(m.Admit(2, m.pack_tokens([2, 3]), [moved], sampling, max_tokens=20, ignore_eos=True))
    rig.finish()
    assert rig.notes.first_index[2, 0] == 7
    assert rig.notes.tokens[2, 0] == whole[7:]


def test_cached_tokens_of_a_continued_choice_are_those_of_the_prompt() -> None:
    rig = Rig()
    emitted = m.ChoiceIn(0, m.pack_tokens([4] * 60))
    for key in (1, 2):
        spec = m.Admit(key, m.pack_tokens([2] * 20), [emitted], m.Sampling(), max_tokens=70, cache_scope=b"s" * 32)
        rig.say(spec)
        rig.finish()
    assert [rig.notes.scheduled[key].cached_tokens for key in (1, 2)] == [0, 20]


def test_the_receipt_adds_up_in_the_engines_own_time() -> None:
    rig = Rig(batch_tokens=16, seqs=1)
    rig.say(admit(1, [2] * 5, 3, ignore_eos=True), admit(2, [3] * 40, 5, ignore_eos=True))
    rig.finish()
    end = rig.notes.ended[2]
    assert isinstance(end, m.Finished)
    assert end.queue_ms == pytest.approx(30)
    assert end.prefill_ms == pytest.approx(20)
    assert end.decode_ms == pytest.approx(40)
    assert (end.steps, end.cached_tokens, end.preemptions) == (7, 0, 0)
    assert rig.notes.scheduled[2].queue_ms == pytest.approx(30)


def test_budgets_end_requests_in_the_queue_and_in_the_run_by_their_own_names() -> None:
    rig = Rig(seqs=1)
    rig.say(admit(1, [2], 100, budget_ms=50, ignore_eos=True), admit(2, [3], 1, budget_ms=20))
    rig.finish()
    assert (failure(rig, 1).reason, failure(rig, 1).work_done) == ("RUN_EXPIRED", True)
    assert (failure(rig, 2).reason, failure(rig, 2).work_done) == ("QUEUE_EXPIRED", False)
    assert len(rig.notes.tokens[1, 0]) == 5


def test_scores_that_are_not_numbers_leave_nothing_in_the_cache() -> None:
    rig = Rig()
    scope = b"s" * 32
    rig.say(admit(1, [2] * 40 + [POISON] + [2] * 40, cache_scope=scope), admit(2, [3] * 40, cache_scope=scope))
    rig.finish()
    assert failure(rig, 1).reason == "NAN_LOGITS"
    assert not failure(rig, 1).retryable
    rig.say(admit(3, [2] * 40, cache_scope=scope))
    rig.finish()
    assert rig.notes.scheduled[3].cached_tokens == 0


def test_one_sick_choice_fails_its_request_and_the_step_goes_on() -> None:
    rig = Rig()
    choices = [m.ChoiceIn(0), m.ChoiceIn(1, m.pack_tokens([POISON])), m.ChoiceIn(2)]
    rig.say(m.Admit(1, m.pack_tokens([2]), choices, m.Sampling(), max_tokens=9, ignore_eos=True))
    rig.say(admit(2, [3], 9, ignore_eos=True))
    rig.finish()
    assert failure(rig, 1).reason == "NAN_LOGITS"
    assert (1, 2) not in rig.notes.first_index
    assert len(rig.notes.tokens[2, 0]) == 9


def test_embeddings_are_the_mean_over_chunks_and_a_sick_input_fails_its_request() -> None:
    rig = Rig(batch_tokens=8)
    tokens = [5, 6, 7] * 9
    rig.say(m.Encode(1, [m.pack_tokens(tokens), m.pack_tokens([4])], normalize=False))
    rig.say(m.Encode(2, [m.pack_tokens([4, POISON])]))
    rig.finish()
    data = np.frombuffer(rig.notes.vectors[1][0].data, "<f4")
    assert data == pytest.approx(states(tokens).mean(), rel=1e-6)
    assert [event.last for event in rig.notes.vectors[1].values()].count(True) == 1
    assert failure(rig, 2).reason == "NAN_LOGITS"


def test_an_idle_engine_ticks_every_quarter_second_and_a_busy_one_speaks_every_step() -> None:
    rig = Rig(batch_tokens=8)
    for _ in range(110):
        rig.step()
    ticks = [message for message in rig.notes.messages if isinstance(message, m.Tick)]
    assert len(ticks) == 4
    rig.say(admit(1, [2] * 80, 1))
    rig.finish()
    steps = [message for message in rig.notes.messages if isinstance(message, m.StepOut)]
    assert [step.prefill_tokens for step in steps] == [8] * 10
    assert [step.step for step in steps] == list(range(1, 11))


def test_shutdown_ends_the_loop_after_the_step() -> None:
    rig = Rig()
    rig.say(admit(1, [2], 5), m.Shutdown())
    rig.engine.run()
    assert not rig.engine.open
    assert rig.engine.steps == 1


def test_the_slowest_step_is_that_of_the_last_minute() -> None:
    slowest = SlowestStep()
    assert slowest.at(0.0) == 0.0
    for second, took in ((0.1, 50.0), (0.9, 20.0), (30.0, 5.0), (59.5, 7.0)):
        slowest.add(second, took)
    assert slowest.at(59.9) == 50.0
    assert slowest.at(60.5) == 7.0
    for second in range(1000):
        slowest.add(100.0 + second, float(second))
    assert slowest.at(1100.0) == 999.0
