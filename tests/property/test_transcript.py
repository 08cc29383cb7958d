"""The transcript's text is that of the tokens up to the stop, however they come: split, repeated, interleaved, taken at
any time; and what does not join on is refused."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import cursor
from gateway.tokens import Detokenizer, Tokenizer
from gateway.transcript import LENGTH, STOP, Fit, Form, Run, Transcript
from shared.errors import Reason, TrunklineError
from tests.fakes.clock import FakeClock
from tests.fakes.mesh import EOS, TEXT_TOKENS, tokenizer_json
from trunkline.common.v1 import common_pb2

TOKENIZER = Tokenizer(tokenizer_json())

ids = st.lists(st.integers(0, TEXT_TOKENS - 1), max_size=40)
stops = st.lists(st.sampled_from(["a", "ST", "STOP", "é", "日本", " the", "\ufffd", "fox jumps", "zz"]), max_size=3)

RARELY = st.sampled_from([False, False, False, True])


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, after_text=True)


def stopped(tokens: list[int], stops_: list[str], min_tokens: int, include: bool) -> tuple[list[int], str, str]:
    """(ids kept, text, stop) by the plain definition: token by token, the first that completes a stop string."""
    for count in range(min_tokens + 1, len(tokens) + 1):
        # A character that is still open is not text yet.
        shown = _shown(tokens[:count])[len(_shown(tokens[:min_tokens])) :]
        found = [(shown.index(stop) + len(stop), -len(stop), stop) for stop in stops_ if stop in shown]
        if found:
            end, _, stop = min(found)
            kept = shown[:end] if include else shown[: end - len(stop)]
            return tokens[:count], _shown(tokens[:min_tokens]) + kept, stop
    return tokens, text_of(tokens), ""


def _shown(tokens: list[int]) -> str:
    return Detokenizer(TOKENIZER, after_text=True).push(tokens)


def collect(transcript: Transcript, texts: list[str], told: list[list[int]], ends: list[int]) -> None:
    for delta in transcript.take():
        assert not ends[delta.choice], "a delta after the choice's end"
        texts[delta.choice] += delta.text
        told[delta.choice] += delta.token_ids
        ends[delta.choice] = delta.finish_reason


@settings(max_examples=60, deadline=None)
@given(
    choices=st.lists(ids, min_size=1, max_size=3),
    stops_=stops,
    include=st.booleans(),
    min_tokens=st.integers(0, 3),
    data=st.data(),
)
def test_text_and_ids_are_those_up_to_the_stop_however_runs_come_and_are_taken(
    choices: list[list[int]], stops_: list[str], include: bool, min_tokens: int, data: st.DataObject
) -> None:
    form = Form(
        choices=len(choices),
        max_tokens=100,
        min_tokens=min_tokens,
        stops=tuple(stops_),
        include_stop=include,
        token_ids=True,
    )
    transcript = Transcript(form, TOKENIZER, FakeClock())
    texts, told, ends = [""] * len(choices), [[] for _ in choices], [0] * len(choices)
    sent = [0] * len(choices)
    while not all(transcript.finishes()):
        choice = data.draw(st.sampled_from([c for c, finish in enumerate(transcript.finishes()) if not finish]))
        back = data.draw(st.integers(0, min(3, sent[choice])))
        start = sent[choice] - back
        count = data.draw(st.integers(0, 5))
        run = choices[choice][start : start + count]
        last = start + len(run) == len(choices[choice])
        finish, stop_token = (STOP, EOS) if last else (0, None)
        fit = transcript.append(Run(choice, start, run, finish, stop_token))
        assert fit in (Fit.TAKEN, Fit.KNOWN)
        sent[choice] = max(sent[choice], start + len(run))
        if data.draw(st.booleans()):
            collect(transcript, texts, told, ends)
    collect(transcript, texts, told, ends)
    assert transcript.complete
    assert all(ends)
    total = 0
    for choice, tokens in enumerate(choices):
        kept, text, _ = stopped(tokens, stops_, min_tokens, include)
        if "\ufffd" not in "".join(stops_):  # a character left open at the end may itself complete such a stop
            assert (told[choice], texts[choice]) == (kept, text)
        total += len(told[choice])
    assert transcript.tokens == total
    told_stops = {stop.choice: stop.at_index for stop in transcript.stops()}
    assert all(len(told[choice]) == at_index for choice, at_index in told_stops.items())


@settings(max_examples=60, deadline=None)
@given(tokens=ids, cut=st.integers(0, 40), beyond=st.integers(1, 5))
def test_a_run_beyond_the_next_index_is_a_gap_and_changes_nothing(tokens: list[int], cut: int, beyond: int) -> None:
    transcript = Transcript(Form(choices=1, max_tokens=100), TOKENIZER, FakeClock())
    start = tokens[:cut]
    transcript.append(Run(0, 0, start))
    assert transcript.append(Run(0, len(start) + beyond, [1], STOP)) is Fit.GAP
    assert transcript.tokens == len(start)
    assert not transcript.complete


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, TEXT_TOKENS - 1), min_size=1, max_size=20), data=st.data())
def test_other_tokens_where_some_are_known_diverge_and_change_nothing(tokens: list[int], data: st.DataObject) -> None:
    transcript = Transcript(Form(choices=1, max_tokens=100), TOKENIZER, FakeClock())
    transcript.append(Run(0, 0, tokens))
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :], 5]
    start = data.draw(st.integers(0, at))
    assert transcript.append(Run(0, start, other[start:])) is Fit.DIVERGED
    assert transcript.append(Run(0, 0, tokens[:at], STOP)) is Fit.DIVERGED
    assert transcript.tokens == len(tokens)
    assert not transcript.complete


@given(
    told=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, -1, 1]), st.integers(0, 3), RARELY)),
    stops_=stops,
    most=st.integers(1, 8),
    logprobs=st.booleans(),
)
@example([(0, 0, 1, True), (0, 0, 1, False)], [], 8, False)  # more after the end
def test_the_short_way_of_single_tokens_leads_to_the_same_transcript(
    told: list[tuple[int, int, int, bool]], stops_: list[str], most: int, logprobs: bool
) -> None:
    form = Form(choices=2, max_tokens=most, stops=tuple(stops_), logprobs=logprobs)
    short, long = Transcript(form, TOKENIZER, FakeClock()), Transcript(form, TOKENIZER, FakeClock())
    for choice, beside, token, ends in told:
        held = [len(each.emitted) for each in long.progress()]
        index = max(0, held[choice] + beside) if choice < len(held) else 0
        run = Run(choice, index, [token], STOP if ends else 0, EOS if ends else None, [common_pb2.TokenLogprob()])
        taken = not ends and short.token(choice, index, token)
        fit = long.append(run)
        assert fit is Fit.TAKEN if taken else short.append(run) is fit
        assert (short.progress(), short.tokens, short.stops()) == (long.progress(), long.tokens, long.stops())
    assert list(short.take()) == list(long.take())


@settings(max_examples=60, deadline=None)
@given(tokens=ids, most=st.integers(1, 20))
def test_a_transcript_never_holds_more_than_max_tokens_and_tells_the_worker_so(tokens: list[int], most: int) -> None:
    transcript = Transcript(Form(choices=1, max_tokens=most), TOKENIZER, FakeClock())
    transcript.append(Run(0, 0, tokens, STOP if len(tokens) <= most else 0))
    assert transcript.tokens == min(most, len(tokens))
    if len(tokens) > most:
        assert transcript.finishes() == [LENGTH]
        assert [(stop.choice, stop.at_index) for stop in transcript.stops()] == [(0, most)]


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, TEXT_TOKENS - 1), min_size=1, max_size=20), cuts=st.lists(st.integers(0, 19)))
def test_a_cursor_names_tokens_characters_and_digest_of_what_was_taken(tokens: list[int], cuts: list[int]) -> None:
    transcript = Transcript(Form(choices=1, max_tokens=100, token_ids=True), TOKENIZER, FakeClock())
    done, text, last = 0, "", ""
    for cut in sorted({*cuts, len(tokens)}):
        transcript.append(Run(0, done, tokens[done:cut]))
        done = max(done, min(cut, len(tokens)))
        for delta in transcript.take():
            text += delta.text
            last = delta.cursor
    (place,) = cursor.decode(last).places
    assert (place.tokens, place.chars, place.ended) == (len(tokens), len(text), False)
    assert place.digest == hashlib.sha256(struct.pack(f"<{len(tokens)}I", *tokens)).digest()[:8]


@given(
    choices=st.lists(ids, min_size=1, max_size=3),
    stops_=stops,
    echo=st.sampled_from(["", "the prompt"]),
    token_ids=st.booleans(),
    data=st.data(),
)
def test_from_any_cursor_the_rest_of_the_stream_follows_and_nothing_else(
    choices: list[list[int]], stops_: list[str], echo: str, token_ids: bool, data: st.DataObject
) -> None:
    form = Form(len(choices), 100, b"r" * 16, stops=tuple(stops_), prefix=echo, token_ids=token_ids)
    transcript, runs = Transcript(form, TOKENIZER, FakeClock()), []
    told, sent = [], [0] * len(choices)
    while not all(transcript.finishes()):
        choice = data.draw(st.sampled_from([c for c, finish in enumerate(transcript.finishes()) if not finish]))
        part = choices[choice][sent[choice] : sent[choice] + data.draw(st.integers(0, 5))]
        last = sent[choice] + len(part) == len(choices[choice])
        run = Run(choice, sent[choice], part, STOP if last else 0, EOS if last else None)
        sent[choice] += len(part)
        if transcript.append(run) is Fit.TAKEN:
            runs.append(run)
        if data.draw(st.booleans()):
            told.extend(transcript.take())
    told.extend(transcript.take())
    for place, delta in enumerate(told):
        again = Transcript(form, TOKENIZER, FakeClock())
        assert again.skip(cursor.decode(delta.cursor).places, runs) is None
        rest = list(again.take())
        assert again.complete
        for choice in range(len(choices)):
            later = [other for other in told[place + 1 :] if other.choice == choice]
            own = [other for other in rest if other.choice == choice]
            assert "".join(other.text for other in own) == "".join(other.text for other in later)
            assert [id_ for other in own for id_ in other.token_ids] == [id_ for o in later for id_ in o.token_ids]
            assert [other.finish_reason for other in own][-1:] == [other.finish_reason for other in later][-1:]
            assert [other.matched_stop for other in own][-1:] == [other.matched_stop for other in later][-1:]


@given(tokens=st.lists(st.integers(0, TEXT_TOKENS - 1), min_size=1, max_size=20), data=st.data())
def test_a_cursor_over_other_tokens_names_the_choice_that_diverged(tokens: list[int], data: st.DataObject) -> None:
    form = Form(choices=2, max_tokens=100, token_ids=True)
    transcript = Transcript(form, TOKENIZER, FakeClock())
    for choice in range(2):
        transcript.append(Run(choice, 0, tokens))
    (*_, last) = transcript.take()
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    again = Transcript(form, TOKENIZER, FakeClock())
    assert again.skip(cursor.decode(last.cursor).places, [Run(0, 0, tokens), Run(1, 0, other)]) == 1
    shorter = Transcript(form, TOKENIZER, FakeClock())
    assert shorter.skip(cursor.decode(last.cursor).places, [Run(0, 0, tokens[:-1]), Run(1, 0, tokens)]) == 0


@pytest.mark.parametrize("text", ["x", "!!!!", "AQ", "AA" * 24, "A" * 2000, "é"])
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(TrunklineError) as caught:
        cursor.decode(text)
    assert caught.value.reason is Reason.BAD_FIELD


def test_log_probabilities_travel_with_their_tokens_and_end_with_the_stop() -> None:
    form = Form(choices=1, max_tokens=100, stops=("STOP",), logprobs=True)
    transcript = Transcript(form, TOKENIZER, FakeClock())
    tokens = TOKENIZER.encode("ab STOP fox")
    entries = [common_pb2.TokenLogprob(chosen=-float(index)) for index in range(len(tokens))]
    transcript.append(Run(0, 0, tokens, 0, None, entries))
    (delta,) = transcript.take()
    kept = tokens.index(TOKENIZER.encode("STOP")[0]) + 1
    assert [entry.chosen.token_id for entry in delta.logprobs] == tokens[:kept]
    assert [entry.chosen.logprob for entry in delta.logprobs] == [-float(index) for index in range(kept)]
    assert (delta.finish_reason, delta.matched_stop, delta.text) == (STOP, "STOP", "ab ")
