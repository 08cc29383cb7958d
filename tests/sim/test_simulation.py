"""The simulation as tests: every named scenario, some random worlds, the same history from the same seed, every
breakage noticed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.chance import random_world
from tests.sim.loop import Deadlock, SimLoop
from tests.sim.mutations import MUTATIONS, Mutation
from tests.sim.scenarios import Scene, play, scenes

SEEDS = 60
_SCENES = [pytest.param(scene, id=f"{name}-{label}" if label else name) for name, label, scene in scenes()]


@pytest.mark.parametrize("scene", _SCENES)
def test_scenario(scene: Scene) -> None:
    play(scene)


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_random_worlds(first: int) -> None:
    for seed in range(first, first + 10):
        try:
            random_world(seed)
        except Exception as error:
            raise AssertionError(f"python -m tests.sim --seed {seed}") from error


def test_the_same_seed_is_the_same_history_in_every_process() -> None:
    """INV-6, whatever sets and dictionaries of strings do."""
    program = "from tests.sim.chance import random_world\nfor seed in (3, 11, 25): print(random_world(seed).digest)"
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(number), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True, text=True, check=True,
        ).stdout
        for number in (1, 2)
    }  # fmt: skip
    assert len(told) == 1
    assert len(set(told.pop().split())) == 3


@pytest.mark.mutations
@pytest.mark.parametrize("mutation", [pytest.param(each, id=each.name) for each in MUTATIONS])
def test_a_broken_rule_is_noticed(mutation: Mutation) -> None:
    assert mutation.noticed() is not None, f"no scenario notices that rule {mutation.rule} is broken"


def test_no_rule_is_taken_on_trust() -> None:
    """Rule 16 is not built yet: there is nothing to break."""
    broken = {mutation.rule for mutation in MUTATIONS}
    assert {str(number) for number in range(1, 16)} <= broken
    assert {"take-over", "lease", "drain", "slow reader", "sweep", "limits", "records", "keys"} <= broken


def test_a_loop_on_which_nothing_can_happen_is_a_deadlock() -> None:
    loop = SimLoop()
    with pytest.raises(Deadlock, match="nothing will ever happen"):
        loop.run_until_complete(loop.create_future())
    loop.close()
