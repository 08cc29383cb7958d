"""With a step in flight every stream is what it is without: the same tokens, log-probabilities, finishes and usage.

Both engines hear the same arrivals in the same turns, and whoever meddles does so at the same place of a stream: when a
choice has that many tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.engine_rig import LateRunner, Rig
from tests.fakes.hash_model import POISON
from workers.engine import messages as m
from workers.engine.step import StepRunner

SHARED = hashlib.sha256(b"shared").digest()
PATIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Meddling:
    """What somebody does once a choice of a request has `tokens` tokens."""

    what: str  # stop, pause, cancel
    choice: int
    tokens: int
    turns: int  # of a pause; 0: it is over before the engine hears of it


@dataclass(frozen=True)
class Job:
    """One request and what becomes of it."""

    turn: int
    work: m.Admit | m.Encode
    meddling: Meddling | None


@dataclass(frozen=True)
class Machine:
    """What an engine has."""

    blocks: int
    batch_tokens: int
    seqs: int


@st.composite
def prompts(draw: st.DrawFn, most: int) -> list[int]:
    """Often one of two long beginnings."""
    stem = [3 + draw(st.integers(0, 1))] * draw(st.sampled_from([0, 0, 15, 16, 33]))
    return (stem + draw(st.lists(st.integers(2, POISON - 1), min_size=1, max_size=12)))[:most]


samplings = st.builds(
    m.Sampling,
    temperature=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {5: 2.0, 7: -3.0}]),
    logprobs=st.sampled_from([-1, 2]),
    seed=st.integers(0, 2**64 - 1),
)


@st.composite
def works(draw: st.DrawFn, key: int, room: int) -> m.Admit | m.Encode:
    if draw(st.integers(0, 5)) == 0:
        inputs = draw(st.lists(prompts(min(40, room)), min_size=1, max_size=3))
        return m.Encode(key, [m.pack_tokens(tokens) for tokens in inputs])
    prompt = draw(prompts(min(40, room - 2)))
    if draw(st.integers(0, 9)) == 0:
        prompt[draw(st.integers(0, len(prompt) - 1))] = POISON
    return m.Admit(
        key,
        m.pack_tokens(prompt),
        [m.ChoiceIn(index) for index in range(draw(st.sampled_from([1, 1, 2, 3])))],
        draw(samplings),
        max_tokens=draw(st.integers(1, min(50, room - len(prompt)))),
        min_tokens=draw(st.sampled_from([0, 0, 4])),
        stop_token_ids=draw(st.sampled_from([(), (9, 10, 11)])),
        ignore_eos=draw(st.booleans()),
        priority=draw(st.sampled_from([0, 0, 1])),
        cache_scope=draw(st.sampled_from([b"", SHARED, SHARED])),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    seqs = draw(st.sampled_from([1, 3, 8]))
    return Machine(draw(st.sampled_from([4, 5, 8, 60])), draw(st.sampled_from([8, 16, 40])), seqs)


meddlings = st.none() | st.builds(
    Meddling,
    what=st.sampled_from(["stop", "pause", "cancel"]),
    choice=st.integers(0, 2),
    tokens=st.integers(1, 20),
    turns=st.integers(0, 6),
)


@st.composite
def jobs(draw: st.DrawFn, room: int) -> list[Job]:
    count = draw(st.integers(1, 8))
    return [Job(draw(st.integers(0, 30)), draw(works(key, room)), draw(meddlings)) for key in range(1, count + 1)]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Machine, list[Job]]:
    machine = draw(machines())
    return machine, draw(jobs(min(machine.blocks * 16, 120)))


def play(machine: Machine, jobs: Sequence[Job], *, overlap: bool, runner: StepRunner | None = None) -> Rig:
    """Everything to its end. INV-4 is asserted by the engine in every turn."""
    rig = Rig(machine.blocks, machine.batch_tokens, machine.seqs, overlap=overlap, runner=runner)
    open_ = {job.work.key: job.meddling for job in jobs if job.meddling}
    resume: dict[int, list[int]] = {}
    for turn in range(4000):
        rig.say(*(job.work for job in jobs if job.turn == turn))
        rig.say(*(m.Pause(key, False) for key in resume.pop(turn, [])))
        for key, meddling in list(open_.items()):
            if len(rig.notes.tokens.get((key, meddling.choice), ())) >= meddling.tokens:
                rig.say(_said(key, meddling))
                del open_[key]
                if meddling.what == "pause" and meddling.turns == 0:
                    rig.say(m.Pause(key, False))
                elif meddling.what == "pause":
                    resume.setdefault(turn + meddling.turns, []).append(key)
        if not rig.step() and not rig.queue and turn > 30 and not resume:
            break
    assert rig.pool.counts.used == 0
    assert rig.scheduler.held == 0
    return rig


def _said(key: int, meddling: Meddling) -> m.ToEngine:
    if meddling.what == "stop":
        return m.StopChoice(key, meddling.choice)
    return m.Cancel(key) if meddling.what == "cancel" else m.Pause(key, True)


@PATIENT
@given(scenes())
def test_streams_are_identical_with_one_step_in_flight(scene: tuple[Machine, list[Job]]) -> None:
    machine, jobs = scene
    plain, overlapped = play(machine, jobs, overlap=False), play(machine, jobs, overlap=True)
    assert plain.notes.ended.keys() == overlapped.notes.ended.keys() == {job.work.key for job in jobs}
    for job in jobs:
        key = job.work.key
        ends = plain.notes.ended[key], overlapped.notes.ended[key]
        assert type(ends[0]) is type(ends[1])
        if isinstance(job.work, m.Encode):
            assert plain.notes.vectors[key].keys() == overlapped.notes.vectors[key].keys()
            for index, vector in plain.notes.vectors[key].items():
                assert overlapped.notes.vectors[key][index].data == vector.data
            continue
        for choice in range(len(job.work.choices)):
            # A request that fails or is cancelled takes its other choices with it, wherever they are.
            whole = isinstance(ends[0], m.Finished) or len(job.work.choices) == 1
            same_stream(plain, overlapped, (key, choice), whole=whole)


def same_stream(plain: Rig, overlapped: Rig, where: tuple[int, int], *, whole: bool) -> None:
    one, other = plain.notes, overlapped.notes
    shorter = len(one.tokens[where]) if whole else min(len(one.tokens[where]), len(other.tokens[where]))
    assert other.tokens[where][: None if whole else shorter] == one.tokens[where][:shorter]
    assert other.logprobs[where][: None if whole else shorter] == one.logprobs[where][:shorter]
    if whole:
        assert _end(overlapped, where) == _end(plain, where)


def _end(rig: Rig, where: tuple[int, int]) -> tuple[int, int, int] | None:
    run = rig.notes.finishes.get(where)
    return None if run is None else (run.index + len(run.tokens), run.finish, run.stop_token)


@PATIENT
@given(st.data())
def test_receipts_and_the_prefix_cache_are_identical_where_there_is_room(data: st.DataObject) -> None:
    """Requests come one after the other, and again with their outputs. Steps are counted where there is one choice: the
    others wait for the first one to have ended, which a plan that comes earlier does not know of."""
    works_ = [data.draw(works(key, 120)) for key in range(1, 5)]
    receipts: list[list[object]] = []
    carried = 0
    for overlap in (False, True):
        rig = Rig(blocks=200, batch_tokens=24, overlap=overlap)
        said: list[object] = []
        for work in works_:
            rig.say(work)
            rig.finish()
            said.append(_receipt(rig, work))
            if isinstance(work, m.Admit):
                ids = [*m.unpack_tokens(work.prompt).tolist(), *rig.notes.tokens[work.key, 0], 2]
                again = m.Admit(
                    work.key + 100, m.pack_tokens(ids), [m.ChoiceIn(0)], m.Sampling(), 1, cache_scope=work.cache_scope
                )
                rig.say(again)
                rig.finish()
                said.append(_receipt(rig, again))
        receipts.append(said)
        carried += rig.runner.carried if isinstance(rig.runner, LateRunner) else 0
    assert receipts[0] == receipts[1]
    plain = [work for work in works_ if isinstance(work, m.Admit) and not work.sampling.penalised]
    if any(len(rig.notes.tokens[work.key, 0]) > 1 for work in plain):
        assert carried, "nothing overlapped"


def _receipt(rig: Rig, work: m.Admit | m.Encode) -> object:
    end = rig.notes.ended[work.key]
    if not isinstance(end, m.Finished) or isinstance(work, m.Encode):
        return type(end)
    return (end.steps if len(work.choices) == 1 else 0, end.cached_tokens, end.preemptions)
