"""Pacing: prefills beside streams are as large as the objective allows, on any machine, and never nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.clock import FakeClock
from tests.fakes.engine_rig import LateRunner, Rig, SpyRunner, admit
from workers.engine import messages as m
from workers.engine.batch import RaggedBatch
from workers.engine.pacing import CHUNK, Pacer
from workers.engine.scheduler import Plan


@dataclass(frozen=True)
class Machine:
    """Steps that take a + b·prefill + c·decodes + d·context milliseconds, give or take."""

    a: float
    b: float
    c: float
    d: float
    noise: float = 0.03

    def took_ms(self, rng: random.Random, prefill: int, decodes: int, context: int) -> float:
        exact = self.a + self.b * prefill + self.c * decodes + self.d * context
        return exact * rng.uniform(1 - self.noise, 1 + self.noise)

    def best(self, objective: float, decodes: int, context: int) -> float:
        """Prefill tokens that just fit."""
        return (objective - self.a - self.c * decodes - self.d * context) / self.b


def drive(pacer: Pacer, machine: Machine, rng: random.Random, steps: int) -> list[tuple[int, float, float]]:
    """(allowance, the best one, milliseconds) of steps with a wandering number of streams and prefills now and then."""
    decodes, seen = 8, []
    for step in range(steps):
        decodes = min(64, max(1, decodes + rng.randint(-2, 2)))
        context = decodes * rng.randint(200, 1200)
        allowed = pacer.allowance(decodes, context)
        prefill = allowed if step % 50 < 35 else 0
        took = machine.took_ms(rng, prefill, decodes, context)
        pacer.observe(prefill, decodes, context, took)
        if prefill:
            seen.append((allowed, machine.best(40.0, decodes, context), took))
    return seen


GPU = Machine(a=6.0, b=0.02, c=0.05, d=1e-4)
CPU = Machine(a=12.0, b=0.3, c=0.1, d=5e-5)


@pytest.mark.parametrize("machine", [GPU, CPU], ids=["GPU", "CPU"])
def test_steps_come_to_just_keep_the_objective(machine: Machine) -> None:
    seen = drive(Pacer(40.0, 8192), machine, random.Random(1), 600)[-200:]
    late = sum(took > 40.0 for *_, took in seen)
    assert late < 20
    assert np.mean([allowed / best for allowed, best, _ in seen]) > 0.75


@settings(max_examples=60, deadline=None)
@given(
    a=st.floats(0.5, 20),
    b=st.floats(0.005, 1.5),
    c=st.floats(0, 0.2),
    d=st.floats(0, 2e-4),
    most=st.sampled_from([64, 512, 8192]),
    seed=st.integers(0, 1000),
)
def test_any_machine_is_learned(a: float, b: float, c: float, d: float, most: int, seed: int) -> None:
    seen = drive(Pacer(40.0, most), Machine(a, b, c, d), random.Random(seed), 800)[-200:]
    over = [took for allowed, _, took in seen if allowed > CHUNK]
    assert sum(took > 44.0 for took in over) <= 0.05 * len(over) + 1, "a step is far over the objective"
    for allowed, *_ in seen:
        assert CHUNK <= allowed <= most
        assert allowed % CHUNK == 0
    wanted = [min(best, most) for _, best, _ in seen]
    assert np.mean([allowed for allowed, *_ in seen]) > 0.6 * np.mean(wanted) - CHUNK, "prefills wait without need"


def test_a_machine_that_becomes_slower_is_followed_and_back() -> None:
    pacer, rng = Pacer(40.0, 2048), random.Random(3)
    fast, slow = Machine(6.0, 0.02, 0.05, 0.0), Machine(6.0, 0.1, 0.05, 0.0)
    drive(pacer, fast, rng, 300)
    before = pacer.allowance(8, 0)
    drive(pacer, slow, rng, 300)
    during = pacer.allowance(8, 0)
    drive(pacer, fast, rng, 600)
    assert during < 340 < 1100 < before
    assert pacer.allowance(8, 0) > 1000


def test_a_few_steps_that_hang_change_little() -> None:
    pacer, rng = Pacer(40.0, 2048), random.Random(4)
    drive(pacer, GPU, rng, 300)
    before = pacer.allowance(8, 4000)
    for _ in range(3):
        pacer.observe(before, 8, 4000, 2000.0)
        drive(pacer, GPU, rng, 30)
    assert pacer.allowance(8, 4000) > 0.6 * before


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 8192), st.integers(0, 512), st.integers(0, 10**7), st.floats(0, 1e9)), max_size=60
    )
)
def test_nothing_that_is_measured_starves_a_prefill_and_equal_steps_give_equal_budgets(
    steps: list[tuple[int, int, int, float]],
) -> None:
    one, other = Pacer(30.0, 1000), Pacer(30.0, 1000)
    for step in steps:
        one.observe(*step)
        other.observe(*step)
        allowed = one.allowance(step[1], step[2])
        assert allowed == other.allowance(step[1], step[2])
        assert CHUNK <= allowed <= 1000
        assert allowed % CHUNK == 0


def test_without_an_objective_there_is_no_bound() -> None:
    pacer = Pacer(0.0, 70)
    pacer.observe(64, 3, 100, 1e9)
    assert pacer.allowance(3, 100) == 70


class Slow(SpyRunner):
    """Takes 10 ms for a step."""

    clock: FakeClock

    def arrays(self, plan: Plan) -> RaggedBatch:
        self.clock.advance(0.01)
        return super().arrays(plan)


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_are_small_beside_a_stream_and_whole_steps_without_one(overlap: bool) -> None:
    slow = Slow(64)
    rig = Rig(batch_tokens=64, itl_slo_ms=0.001, runner=LateRunner(64) if overlap else slow)
    slow.clock = rig.clock
    rig.say(admit(1, [2] * 200, 1))
    rig.finish()
    assert rig.runner.sizes == [64, 64, 64, 8]
    rig.say(admit(2, [3] * 4, 20, ignore_eos=True))
    rig.step()
    rig.say(admit(3, [4] * 100, 1))
    rig.finish()
    assert rig.runner.sizes[4:12] == [4, 17, 17, 17, 17, 17, 17, 5]
    assert all(isinstance(end, m.Finished) for end in rig.notes.ended.values())
