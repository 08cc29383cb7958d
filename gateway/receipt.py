"""The latency receipt: where a request's time went. Owns the arithmetic only.

The one rule: the parts are disjoint by construction. Each claims at most what the earlier ones left, so that
`total_ms` = the named parts + `unattributed_ms`, and none is negative, whatever the clocks of other processes say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trunkline.common.v1 import common_pb2


@dataclass
class Stages:
    """What a request notes on its way; seconds of the gateway's monotonic clock, and what other stages report (ms).

    The attempt's fields are those of the last attempt; `attempt_began` starts them anew.
    """

    accepted: float
    admit_s: float = 0.0
    tokenise_s: float = 0.0
    first_submit: float | None = None
    text_s: float = 0.0
    client_wait_s: float = 0.0
    attempts: int = 0
    migrations: int = 0
    last: AttemptStages = field(default_factory=lambda: AttemptStages(0.0))

    def attempt_began(self, now: float) -> AttemptStages:
        """A new attempt is submitted; the one before was lost."""
        self.first_submit = now if self.first_submit is None else self.first_submit
        self.attempts += 1
        self.last = AttemptStages(now)
        return self.last


@dataclass
class AttemptStages:
    """One attempt: when it was submitted, when tokens came, and what router and worker say of it."""

    submitted: float
    first_token: float | None = None
    last_token: float | None = None
    router_queue_ms: float = 0.0
    worker_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float | None = None
    steps: int = 0
    cached_tokens: int = 0
    worker: str = ""


def make(stages: Stages, now: float, trace_id: str) -> common_pb2.Receipt:
    """The receipt of a request that ends `now`."""
    rest = _Rest((now - stages.accepted) * 1000)
    last = stages.last
    receipt = common_pb2.Receipt(
        total_ms=rest.left_ms,
        admit_ms=rest.claim(stages.admit_s * 1000),
        tokenise_ms=rest.claim(stages.tokenise_s * 1000),
        steps=last.steps,
        attempts=stages.attempts,
        migrations=stages.migrations,
        worker=last.worker,
        trace_id=trace_id,
    )
    if stages.first_submit is not None:
        receipt.lost_attempts_ms = rest.claim((last.submitted - stages.first_submit) * 1000)
        _claim_attempt(receipt, rest, last, now)
    receipt.detokenise_ms = rest.claim(stages.text_s * 1000)
    receipt.client_wait_ms = rest.claim(stages.client_wait_s * 1000)
    receipt.unattributed_ms = rest.left_ms
    return receipt


def _claim_attempt(receipt: common_pb2.Receipt, rest: _Rest, last: AttemptStages, now: float) -> None:
    """Submission to first token: what router and worker report, the hops being what is left. Then decode."""
    first = now if last.first_token is None else last.first_token
    wait = _Rest(min((first - last.submitted) * 1000, rest.left_ms))
    receipt.router_queue_ms = rest.claim(wait.claim(last.router_queue_ms))
    receipt.worker_queue_ms = rest.claim(wait.claim(last.worker_queue_ms))
    receipt.prefill_ms = rest.claim(wait.claim(last.prefill_ms))
    receipt.dispatch_ms = rest.claim(wait.left_ms)
    if last.last_token is not None:
        seen = (last.last_token - first) * 1000
        receipt.decode_ms = rest.claim(seen if last.decode_ms is None else min(seen, last.decode_ms))


class _Rest:
    """Time not claimed yet, in milliseconds; never negative."""

    def __init__(self, ms: float) -> None:
        self.left_ms = max(0.0, ms)

    def claim(self, ms: float) -> float:
        """As much of `ms` as is left."""
        part = min(max(0.0, ms), self.left_ms)
        self.left_ms -= part
        return part
