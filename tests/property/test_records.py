"""One terminal state, whoever writes when."""

from __future__ import annotations

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared import keys
from shared.records import _TRANSITION

ID = "ab" * 16
QUEUED, RUNNING, ENDED = 1, 2, 3
NAMES = {QUEUED: ["QUEUED"], RUNNING: ["RUNNING"], ENDED: ["FINISHED", "FAILED", "CANCELLED", "EXPIRED"]}

writes = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 11), st.sampled_from([QUEUED, RUNNING, ENDED]), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


def model(held: tuple[int, int, int, str] | None, write: tuple[int, int, int, str]) -> tuple[int, int, int, str]:
    """The rule in one line: nothing follows an end, nothing goes back."""
    return write if held is None or (held[2] != ENDED and write[:3] >= held[:3]) else held


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=writes)
def test_any_interleaving_of_writers_ends_as_the_rule_says(
    redis_url: str, writes: list[tuple[int, int, int, int]]
) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.delete(keys.req(ID))
        held: tuple[int, int, int, str] | None = None
        for epoch, attempt, rank, pick in writes:
            name = NAMES[rank][pick % len(NAMES[rank])]
            before, held = held, model(held, (epoch, attempt, rank, name))
            answer = client.eval(
                _TRANSITION.text, 1, keys.req(ID), epoch, attempt, rank, 60, "state", name, "worker", f"w{attempt}"
            )
            row = client.hgetall(keys.req(ID))
            assert (int(row["epoch"]), int(row["attempt"]), int(row["rank"]), row["state"]) == held
            assert answer == (before != held or (before[:3] == (epoch, attempt, rank) and rank != ENDED))
