"""Limit clocks of one process: what `scripts/limits.lua` does in the store, for the time that the store is away.

Pure arithmetic on whole microseconds; a test runs both on the same events and compares. The one rule: costs are rounded
up and credits down, so that nothing is given away by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MINUTE_US: Final = 60_000_000
MAX_TENANTS: Final = 1024  # beyond it idle ones are forgotten


@dataclass(frozen=True, slots=True)
class Rates:
    """Limits of one scope: a model, or all models of the tenant ("*")."""

    rpm: int
    tpm: int
    concurrency: int

    def share(self, parts: int) -> Rates:
        """One of `parts` equal shares, at least 1 of each."""
        return Rates(max(1, self.rpm // parts), max(1, self.tpm // parts), max(1, self.concurrency // parts))


@dataclass(frozen=True, slots=True)
class Left:
    """What is left after a reservation, the tightest over its scopes; times until everything is."""

    requests: int
    requests_us: int
    tokens: int
    tokens_us: int


@dataclass(frozen=True, slots=True)
class Headroom:
    """Limits and what is left of them, for response headers; times in seconds until all is free again."""

    limit_requests: int
    remaining_requests: int
    reset_requests_s: float
    limit_tokens: int
    remaining_tokens: int
    reset_tokens_s: float

    def headers(self) -> dict[str, str]:
        """By the names that OpenAI's clients know."""
        return {
            "x-ratelimit-limit-requests": str(self.limit_requests),
            "x-ratelimit-remaining-requests": str(self.remaining_requests),
            "x-ratelimit-reset-requests": f"{self.reset_requests_s:.3f}s",
            "x-ratelimit-limit-tokens": str(self.limit_tokens),
            "x-ratelimit-remaining-tokens": str(self.remaining_tokens),
            "x-ratelimit-reset-tokens": f"{self.reset_tokens_s:.3f}s",
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was taken. `limit` is RPM, TPM or CONCURRENCY; `wait_us` the time after which it may fit; `left`: what is
    left without it."""

    limit: str
    wait_us: int
    scope: str
    left: Left


@dataclass(slots=True)
class _Clocks:
    requests: int = 0
    tokens: int = 0
    credits: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """What one lease took from one scope."""

    clocks: _Clocks
    tpm: int
    stands_until: int
    credits_then: int


@dataclass(frozen=True, slots=True)
class _Lease:
    expiry: int
    tokens: int
    parts: tuple[_Part, ...]


@dataclass(slots=True)
class _Tenant:
    scopes: dict[str, _Clocks] = field(default_factory=dict)
    leases: dict[str, _Lease] = field(default_factory=dict)

    def idle(self, now: int) -> bool:
        return not self.leases and all(max(own.requests, own.tokens) <= now for own in self.scopes.values())


def _cost(amount: int, per_minute: int) -> int:
    return -(-amount * MINUTE_US // per_minute)


class Ledger:
    """The clocks and leases of all tenants. `now` is in microseconds of any one clock."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def reserve(
        self, tenant: str, request: str, scopes: Sequence[tuple[str, Rates]], tokens: int, now: int, ttl: int
    ) -> Left | Refused:
        """Take one request and `tokens` from every scope, or nothing."""
        own = self._tenant(tenant, now)
        _sweep(own, now)
        refusals: list[tuple[int, str, str]] = []  # wait, limit, scope
        takes, stands = [], []
        for scope, rates in scopes:
            clocks = own.scopes.setdefault(scope, _Clocks())
            stands.append((rates, max(clocks.requests, now), max(clocks.tokens, now)))
            requests = max(clocks.requests, now) + _cost(1, rates.rpm)
            until = max(clocks.tokens, now) + _cost(tokens, rates.tpm)
            refusals.append((requests - now - MINUTE_US, "RPM", scope))
            refusals.append((until - now - MINUTE_US, "TPM", scope))
            refusals.append((int(clocks.held >= rates.concurrency), "CONCURRENCY", scope))
            takes.append((rates, requests, until))
        wait_us, limit, named = max(refusals, key=lambda refused: refused[0])
        if wait_us > 0:
            return Refused(limit, wait_us, named, _left(stands, now))
        parts = []
        for (scope, _), (rates, requests, until) in zip(scopes, takes, strict=True):
            clocks = own.scopes[scope]
            parts.append(_Part(clocks, rates.tpm, until, clocks.credits))
            clocks.requests, clocks.tokens, clocks.held = requests, until, clocks.held + 1
        own.leases[request] = _Lease(now + ttl, tokens, tuple(parts))
        return _left(takes, now)

    def settle(self, tenant: str, request: str, used: int, now: int) -> bool:
        """Give back what a lease did not use; False where there is no such lease (any more)."""
        own = self._tenants.get(tenant)
        lease = own.leases.pop(request, None) if own else None
        if lease is None:
            return False
        _release(lease, used, now)
        return True

    def held(self, tenant: str) -> int:
        """Leases of a tenant."""
        own = self._tenants.get(tenant)
        return len(own.leases) if own else 0

    def _tenant(self, tenant: str, now: int) -> _Tenant:
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            self._tenants = {name: own for name, own in self._tenants.items() if not own.idle(now)}
        return self._tenants.setdefault(tenant, _Tenant())


def _left(clocks: Sequence[tuple[Rates, int, int]], now: int) -> Left:
    """By rates, clock of requests, clock of tokens of every scope."""
    return Left(
        min((MINUTE_US - (requests - now)) // _cost(1, rates.rpm) for rates, requests, _ in clocks),
        max(requests - now for _, requests, _ in clocks),
        min((MINUTE_US - (until - now)) * rates.tpm // MINUTE_US for rates, _, until in clocks),
        max(until - now for *_, until in clocks),
    )


def _sweep(own: _Tenant, now: int) -> None:
    """End leases that were never settled; nobody knows what they used, so nothing goes back."""
    for request in [request for request, lease in own.leases.items() if lease.expiry <= now]:
        lease = own.leases.pop(request)
        _release(lease, lease.tokens, now)


def _release(lease: _Lease, used: int, now: int) -> None:
    """Credit what was not used, as far as it still stands in the future of the clock: the part in the past has flowed
    back already, and others may have taken it."""
    for part in lease.parts:
        own = part.clocks
        unused = _cost(lease.tokens, part.tpm) - _cost(min(used, lease.tokens), part.tpm)
        credit = max(0, min(unused, part.stands_until - (own.credits - part.credits_then) - now))
        own.tokens -= credit
        own.credits += credit
        own.held -= 1
