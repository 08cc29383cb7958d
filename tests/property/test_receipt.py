"""A receipt adds up, whatever clocks and stages say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import receipt
from gateway.receipt import Stages

seconds = st.floats(0, 1e4)
PARTS = (
    "admit_ms", "tokenise_ms", "router_queue_ms", "dispatch_ms", "worker_queue_ms", "prefill_ms", "decode_ms",
    "detokenise_ms", "client_wait_ms", "lost_attempts_ms", "unattributed_ms",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(seconds, min_size=4, max_size=4),
    attempts=st.lists(seconds, max_size=3),
    reported=st.lists(st.floats(-1e3, 1e7), min_size=8, max_size=8),
    tokens=st.booleans(),
    decode_known=st.booleans(),
)
def test_the_parts_are_never_negative_and_their_sum_is_the_total(
    steps: list[float], attempts: list[float], reported: list[float], tokens: bool, decode_known: bool
) -> None:
    now = 1000.0
    stages = Stages(now, admit_s=reported[0] / 1000, tokenise_s=reported[1] / 1000)
    for gap in attempts:
        last = stages.attempt_began(now)
        now += gap
    if attempts:
        last.router_queue_ms, last.worker_queue_ms, last.prefill_ms = reported[2:5]
        last.decode_ms = reported[5] if decode_known else None
        if tokens:
            last.first_token = now
            now += steps[0]
            last.last_token = now
    now += steps[1]
    stages.text_s, stages.client_wait_s = reported[6] / 1000, reported[7] / 1000
    made = receipt.make(stages, now, "trace")
    values = [getattr(made, part) for part in PARTS]
    assert all(value >= 0 for value in values)
    assert abs(sum(values) - made.total_ms) < 1e-6 * max(1.0, made.total_ms)
    assert abs(made.total_ms - (now - 1000.0) * 1000) < 1e-3


def test_each_stage_claims_its_own_time_and_the_hops_are_what_is_left() -> None:
    stages = Stages(0.0, admit_s=0.001, tokenise_s=0.002)
    stages.attempt_began(0.003)
    last = stages.attempt_began(0.013)
    last.router_queue_ms, last.worker_queue_ms, last.prefill_ms, last.decode_ms = 2.0, 3.0, 20.0, 50.0
    last.first_token, last.last_token = 0.043, 0.093
    stages.text_s, stages.client_wait_s = 0.0004, 0.0002
    made = receipt.make(stages, 0.094, "trace")
    got = {part: round(getattr(made, part), 6) for part in PARTS}
    assert got == {
        "admit_ms": 1.0, "tokenise_ms": 2.0, "lost_attempts_ms": 10.0, "router_queue_ms": 2.0, "worker_queue_ms": 3.0,
        "prefill_ms": 20.0, "dispatch_ms": 5.0, "decode_ms": 50.0, "detokenise_ms": 0.4, "client_wait_ms": 0.2,
        "unattributed_ms": 0.4,
    }  # fmt: skip
    assert (made.attempts, round(made.total_ms, 6)) == (2, 94.0)
