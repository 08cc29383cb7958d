"""Random work on small pools: whatever happens to a request, its tokens are those it would have had alone."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from tests.fakes.engine_rig import Rig, admit
from tests.fakes.hash_model import END, POISON, VOCAB, scores, states
from workers.engine import messages as m
from workers.engine.sampler import Draw, sample

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "one step in flight"])
SCOPES = (b"", hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest())


def expected(spec: m.Admit, choice: m.ChoiceIn, context: int) -> tuple[list[int], int, int]:
    """(new tokens, finish, stop token) of a choice run alone, without cache, engine or scheduler."""
    prompt = m.unpack_tokens(spec.prompt).tolist()
    tokens = prompt + m.unpack_tokens(choice.emitted).tolist()
    stops = sorted({*spec.stop_token_ids, *(() if spec.ignore_eos else (END,))})
    new: list[int] = []
    while True:
        if len(tokens) - len(prompt) == spec.max_tokens or len(tokens) >= context:
            return new, m.Finish.LENGTH, -1
        banned = stops if len(tokens) - len(prompt) < spec.min_tokens else ()
        draw = Draw(spec.sampling, np.array(tokens, np.int32), len(prompt), choice.index, banned)
        pick = sample(scores(states(tokens)[-1:]), [draw])[0]
        assert pick is not None
        if pick.token in stops:
            return new, m.Finish.STOP, pick.token
        tokens.append(pick.token)
        new.append(pick.token)


def pooled(tokens: list[int], normalize: bool) -> np.ndarray:
    """The embedding of one input, summed token after token."""
    total = 0.0
    for state in states(tokens).tolist():
        total += state
    mean = total / len(tokens)
    return np.array([mean / abs(mean) if normalize else mean], np.float32)


@dataclass
class World:
    """A random scenario: what is sent, and what must come of it."""

    rng: random.Random
    blocks: int
    hungry: bool = False  # short prompts, long outputs: all fit at first and then grow into one another

    def tokens(self, most: int) -> list[int]:
        """Ids without end or poison."""
        return [self.rng.randrange(2, POISON) for _ in range(self.rng.randint(1, most))]

    def prompt(self, most: int) -> list[int]:
        """Often one of a few long beginnings, so that prefixes are shared."""
        stem = [3 + self.rng.randrange(2)] * self.rng.choice([0, 0, 15, 16, 17, 33, 48])
        return (stem + self.tokens(most))[:most]

    def sampling(self) -> m.Sampling:
        r = self.rng
        if r.random() < 0.4:
            return m.Sampling()
        return m.Sampling(
            temperature=r.choice([0.0, 0.3, 1.0, 2.0]),
            top_k=r.choice([0, 1, 5]),
            top_p=r.choice([1.0, 0.9, 0.3]),
            min_p=r.choice([0.0, 0.1]),
            repetition_penalty=r.choice([1.0, 1.3]),
            presence_penalty=r.choice([0.0, 0.5]),
            frequency_penalty=r.choice([0.0, 0.5]),
            logit_bias=r.choice([{}, {5: 2.0, 7: -3.0}]),
            logprobs=r.choice([-1, -1, 0, 3]),
            seed=r.randrange(2**64),
        )

    def generate(self, key: int) -> m.Admit:
        r = self.rng
        room = self.blocks * 16
        prompt = self.prompt(20 if self.hungry else min(100, room - 8))
        max_tokens = room - len(prompt) if self.hungry else r.randint(1, min(60, room - len(prompt)))
        fresh = [m.pack_tokens([]), m.pack_tokens(self.tokens(max_tokens)[: max_tokens - 1])]
        choices = [
            m.ChoiceIn(index, r.choice(fresh)) for index in sorted(r.sample(range(6), r.choice([1, 1, 1, 2, 4])))
        ]
        return m.Admit(
            key,
            m.pack_tokens(prompt),
            choices,
            self.sampling(),
            max_tokens,
            min_tokens=r.choice([0, 0, 5]),
            stop_token_ids=r.choice([(), (9, 10)]),
            ignore_eos=r.random() < (0.8 if self.hungry else 0.3),
            priority=r.choice([0, 0, 0, 1, 2]),
            cache_scope=r.choice(SCOPES),
        )

    def encode(self, key: int) -> m.Encode:
        inputs = [m.pack_tokens(self.prompt(min(80, self.blocks * 16))) for _ in range(self.rng.randint(1, 4))]
        return m.Encode(key, inputs, normalize=self.rng.random() < 0.5, priority=self.rng.choice([0, 1]))

    def work(self, key: int) -> m.Admit | m.Encode:
        return self.encode(key) if self.rng.random() < 0.2 else self.generate(key)


@OVERLAP
@pytest.mark.parametrize("seed", range(60))
def test_any_mix_of_work_preemption_cancel_pause_and_stop_keeps_every_promise(seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    blocks = rng.choice([8, 12, 24, 60])
    seqs = rng.choice([1, 2, 4, 8])
    context = rng.choice([64, 512])
    rig = Rig(
        blocks=blocks,
        batch_tokens=rng.choice([8, 9, 16, 40, 128]),
        seqs=seqs,
        context=context,
        held=200,
        overlap=overlap,
    )
    hungry = rng.random() < 0.3
    world = World(rng, min(blocks, context // 16, 8 if hungry else 24), hungry)
    specs: dict[int, m.Admit | m.Encode] = {}
    meddled: set[int] = set()  # cancelled, or a choice was stopped
    paused: set[int] = set()
    gone: dict[int, int] = {}  # key → steps planned when the engine saw the cancel

    for _ in range(rng.randint(20, 120)):
        if rng.random() < 0.3 and len(specs) < (8 if hungry else 25):
            key = len(specs) + 1
            specs[key] = world.work(key)
            rig.say(specs[key])
        if specs and rng.random() < 0.15:
            key = rng.choice(list(specs))
            action = rng.choice(["cancel", "stop", "pause", "pause", "resume"])
            if action == "cancel":
                rig.say(m.Cancel(key))
                gone.setdefault(key, len(rig.runner.keys))
                meddled.add(key)
                paused.discard(key)
            elif action == "stop":
                rig.say(m.StopChoice(key, rng.randrange(6)))
                meddled.add(key)
            else:
                rig.say(m.Pause(key, action == "pause"))
                (paused.add if action == "pause" else paused.discard)(key)
        before = len(rig.runner.keys)
        rig.step()
        for keys in rig.runner.keys[before:]:
            assert not keys & paused, "a paused request was in a step"
    for key in paused:
        rig.say(m.Pause(key, False))
    rig.finish()

    for key, seen in gone.items():
        assert all(key not in keys for keys in rig.runner.keys[seen:]), "a cancelled request was planned again"
    assert rig.notes.ended.keys() == specs.keys(), "each request ends exactly once"
    for key, spec in specs.items():
        if isinstance(spec, m.Encode):
            check_encode(rig, spec, whole=key not in meddled)
        else:
            check_generate(rig, spec, context, whole=key not in meddled)
    assert rig.runner.most_preempted <= rig.scheduler.limits.preemption_cap
    assert max(rig.runner.sizes, default=0) <= rig.scheduler.limits.max_batch_tokens
    assert rig.pool.counts.used == 0
    assert rig.scheduler.held == 0


def check_generate(rig: Rig, spec: m.Admit, context: int, *, whole: bool) -> None:
    end = rig.notes.ended[spec.key]
    for choice in spec.choices:
        where = (spec.key, choice.index)
        tokens, finish, stop = expected(spec, choice, context)
        got = rig.notes.tokens[where]
        assert rig.notes.first_index.get(where, 0) in (0, len(choice.emitted) // 4)
        if whole:
            assert got == tokens
            assert (rig.notes.finishes[where].finish, rig.notes.finishes[where].stop_token) == (finish, stop)
            assert len(rig.notes.logprobs[where]) == (len(tokens) if spec.sampling.logprobs >= 0 else 0)
        else:
            assert got == tokens[: len(got)]
    if whole:
        assert isinstance(end, m.Finished)
    if isinstance(end, m.Finished):
        assert min(end.queue_ms, end.prefill_ms, end.decode_ms) >= 0
        assert end.cached_tokens <= len(spec.prompt) // 4


def check_encode(rig: Rig, spec: m.Encode, *, whole: bool) -> None:
    vectors = rig.notes.vectors[spec.key]
    if whole:
        assert vectors.keys() == set(range(len(spec.inputs)))
    for index, encoded in vectors.items():
        tokens = m.unpack_tokens(spec.inputs[index]).tolist()
        got = np.frombuffer(encoded.data, "<f4")
        assert got.tobytes() == pooled(tokens, spec.normalize).tobytes()
        assert encoded.tokens == len(tokens)


@OVERLAP
@pytest.mark.parametrize("seed", range(5))
def test_equal_scenarios_say_equal_bytes(seed: int, overlap: bool) -> None:
    logs = []
    for _ in range(2):
        rng = random.Random(3000 + seed)
        rig = Rig(blocks=12, batch_tokens=16, seqs=4, overlap=overlap)
        world = World(rng, 12)
        for key in range(12):
            rig.say(world.work(key))
            if rng.random() < 0.2:
                rig.say(m.Cancel(rng.randrange(key + 1)))
            rig.step()
        rig.finish()
        logs.append(b"".join(map(msgspec.msgpack.encode, rig.notes.messages)))
    assert logs[0] == logs[1]


@OVERLAP
@pytest.mark.parametrize("batch_tokens", [8, 11, 16, 100, 1000])
@pytest.mark.parametrize("scope", SCOPES[:2])
def test_a_warm_cache_and_any_chunk_size_give_the_tokens_of_a_cold_one(
    batch_tokens: int, scope: bytes, overlap: bool
) -> None:
    rng = random.Random(batch_tokens)
    prompts = [[5] * length + [rng.randrange(2, POISON)] for length in (1, 14, 15, 16, 31, 47, 200)]
    rig = Rig(blocks=200, batch_tokens=batch_tokens, overlap=overlap)
    results: list[list[int]] = []
    for key, prompt in enumerate(prompts * 2):
        rig.say(admit(key, prompt, 20, cache_scope=scope, ignore_eos=True))
        rig.finish()
        results.append(rig.notes.tokens[key, 0])
    assert results[:7] == results[7:]
    for prompt, tokens in zip(prompts, results, strict=False):
        spec = admit(0, prompt, 20, ignore_eos=True)
        assert tokens == expected(spec, spec.choices[0], 512)[0]
    cached = [rig.notes.scheduled[key].cached_tokens for key in range(14)]
    whole = [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    assert cached[7:] == (whole if scope else [0] * 7)


@OVERLAP
@pytest.mark.parametrize("seed", range(20))
def test_time_budgets_end_requests_wherever_they_are_and_nothing_leaks(seed: int, overlap: bool) -> None:
    rng = random.Random(1000 + seed)
    rig = Rig(blocks=12, batch_tokens=16, seqs=4, overlap=overlap)
    world = World(rng, 12)
    for key in range(20):
        work = world.generate(key)
        budget = rng.choice([10, 50, 200, 1000])
        rig.say(m.Admit(**{f: getattr(work, f) for f in work.__struct_fields__} | {"budget_ms": budget}))
        rig.step()
    rig.finish()
    assert len(rig.notes.ended) == 20
    reasons = {event.reason for event in rig.notes.ended.values() if isinstance(event, m.Failed)}
    assert reasons <= {"QUEUE_EXPIRED", "RUN_EXPIRED"}
    for key, event in rig.notes.ended.items():
        if isinstance(event, m.Failed):
            assert event.work_done == (event.reason == "RUN_EXPIRED") == (key in rig.notes.scheduled)
    assert rig.pool.counts.used == 0


@OVERLAP
@pytest.mark.parametrize("seed", range(20))
def test_scores_that_are_not_numbers_fail_their_request_only(seed: int, overlap: bool) -> None:
    rng = random.Random(2000 + seed)
    rig = Rig(blocks=16, batch_tokens=rng.choice([8, 64]), overlap=overlap)
    world = World(rng, 16)
    sick = {}
    for key in range(12):
        spec = world.generate(key)
        if rng.random() < 0.4:
            prompt = m.unpack_tokens(spec.prompt).copy()
            prompt[rng.randrange(len(prompt))] = POISON
            spec = m.Admit(**{f: getattr(spec, f) for f in spec.__struct_fields__} | {"prompt": m.pack_tokens(prompt)})
            sick[key] = spec
        rig.say(spec)
        rig.step()
    rig.finish()
    for key, event in rig.notes.ended.items():
        if key in sick:
            assert isinstance(event, m.Failed)
            assert event.reason == "NAN_LOGITS"
        else:
            assert isinstance(event, m.Finished)
    assert len(rig.notes.ended) == 12
    assert VOCAB > POISON
