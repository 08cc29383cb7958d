"""How good a worker is for more work: one function per aspect, each in [0, 1], 1 is best.

Owns the formulas. The one rule: a scorer reads the estimate and the limits, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a worker holds of one artefact: its last absolute report and own dispatches which that does not count."""

    requests: int = 0  # admitted and not ended
    max_requests: int = 0
    choices: int = 0  # running and waiting
    prefill_tokens: int = 0  # admitted, not yet computed
    kv_available: int = 0  # KV tokens free or evictable, less what `prefill_tokens` will take
    kv_reserved: int = 0  # KV tokens that admitted requests may still come to need
    kv_total: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much work is given out ahead of the engine."""

    prefill_tokens: int = 16384  # queued at a worker; more than this waits here, where order and choice are still open


def load(estimate: Estimate, limits: Limits) -> float:
    """Free share of the places for requests, each choice counted as one."""
    return 1.0 - _share(max(estimate.choices, estimate.requests), estimate.max_requests)


def prefill(estimate: Estimate, limits: Limits) -> float:
    """Halves when the queued prefill reaches an eighth of the limit: short queues differ most."""
    return 1.0 / (1.0 + 8.0 * estimate.prefill_tokens / limits.prefill_tokens)


def kv(estimate: Estimate, limits: Limits) -> float:
    """Share of the KV pool that no admitted request lays claim to."""
    return 1.0 - _share(estimate.kv_reserved, estimate.kv_total)


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole > 0 else 1.0


SCORERS: Mapping[str, Callable[[Estimate, Limits], float]] = {"load": load, "prefill": prefill, "kv": kv}
