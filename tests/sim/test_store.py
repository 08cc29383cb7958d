"""The store in memory against a real one: the same scripts, the same answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from gateway import custody
from gateway.admission import SCRIPT
from shared.state import Script
from tests.sim.loop import SimLoop
from tests.sim.store import SimRedis

NOW_MS = 1_800_000_000_000


class _Both:
    """Runs a script on both and compares."""

    def __init__(self, url: str) -> None:
        self._real = redis.Redis.from_url(url, decode_responses=True)
        loop = SimLoop()  # only its time is used
        loop.close()
        self._sim = SimRedis(loop)

    def close(self) -> None:
        """Ends the connection."""
        self._real.close()

    def run(self, script: Script, keys: list[str], args: list[Any]) -> Any:
        texts = [str(arg) for arg in args]
        told = self._sim.script(script.sha, script.text, keys, texts)
        assert _plain(self._real.eval(script.text, len(keys), *keys, *texts)) == _plain(told), (keys, texts)
        return told


def _both(url: str, request: pytest.FixtureRequest) -> _Both:
    both = _Both(url)
    request.addfinalizer(both.close)
    return both


def _plain(answer: Any) -> Any:
    """Without the names of entries, which are times."""
    if isinstance(answer, (list, tuple)):
        return [_plain(item) for item in answer]
    return "entry" if isinstance(answer, str) and answer.count("-") == 1 else answer


@pytest.mark.parametrize("seed", range(5))
def test_limits_are_reserved_and_settled_alike(redis_url: str, request: pytest.FixtureRequest, seed: int) -> None:
    both, rng = _both(redis_url, request), random.Random(seed)
    now, requests = NOW_MS * 1000, 0
    for _ in range(300):
        now += rng.choice((0, 1, 1000, 5_000_000, 61_000_000))
        if rng.random() < 0.6:
            requests += rng.random() < 0.8
            model, tokens = rng.choice("mn"), rng.randrange(1, 900)
            limits = [60, 2000, 3, 90, 3000, 4]
            args = ["reserve", now, rng.choice((0, 1000)), f"r{requests}", 10_000_000, tokens, model, *limits]
            keyed = rng.random() < 0.3
            keys = ["tl:lim:{t}", *([f"tl:idem:{{t}}:k{rng.randrange(4)}"] if keyed else [])]
            both.run(SCRIPT, keys, [*args, *(["hash", 100] if keyed else [])])
        else:
            used = rng.choice(("", rng.randrange(900)))
            both.run(SCRIPT, ["tl:lim:{t}"], ["settle", now, 0, f"r{rng.randrange(requests + 1)}", used])


@pytest.mark.parametrize("seed", range(5))
def test_custody_changes_hands_alike(redis_url: str, request: pytest.FixtureRequest, seed: int) -> None:
    both, rng = _both(redis_url, request), random.Random(seed)
    now = NOW_MS
    keys = ["tl:req:{r}", "tl:out:{r}"]
    for _ in range(300):
        now += rng.choice((0, 10, 700, 3000, 7000))
        epoch, ginc = rng.randrange(1, 4), rng.choice(("aa", "bb"))
        ending = rng.choice(("", "", "", "", "", "e"))
        match rng.randrange(6):
            case 0:
                fields = ["rank", 1, "attempt", 1, "state", "QUEUED", "plan", "p", "window", 5000]
                both.run(custody._CLAIM, keys[:1], [now, 6000, 60_000, epoch, ginc, 3600, *fields])
            case 1:
                both.run(custody._HOLD, keys[:1], [now, 6000, epoch, rng.randrange(4)])
            case 2:
                record, known = ["state", "FINISHED"] if ending else [], rng.choice((0, 0, 1, 5))
                both.run(custody._APPEND, keys, [now, 6000, epoch, 1 << 20, 3600, known, "runs", ending, *record])
            case 3:
                both.run(custody._TAKE_OVER, keys[:1], [now, 6000, "g", ginc, rng.randrange(2)])
            case 4:
                both.run(custody._FOLLOW, keys, [now, "0-0", 10])
            case _:
                both.run(custody._SWEEP, keys, [now, ginc, 3600, "end"])
