"""Limits: requests and tokens per minute, requests at once, per tenant and model and over all models of a tenant.

Owns the key `tl:lim:{tenant}` through one script. The one rule: `reserve` before any work, `settle` at the end with the
tokens used, whatever the end is; a reservation never settled counts as used in full and ends at its expiry.

A limit of L per minute is a bucket: full it holds L, and L flow back per minute. Over any time t, what was admitted and
not given back is at most L × (1 + t / minute), whichever gateways admitted it. While the store is away every gateway
keeps its share of the limits (L / gateways) by itself; a store that came back empty starts with empty buckets.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import Counter

from gateway.auth import Limits, Principal
from gateway.ledger import MINUTE_US, Headroom, Ledger, Left, Rates, Refused
from shared import keys
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.state import Script, StateAway, Store, Write

SCRIPT: Final = Script(importlib.resources.files("gateway").joinpath("scripts/limits.lua").read_text())
CONCURRENCY_RETRY_S: Final = 1.0  # nobody knows when a running request ends

_Scopes = Sequence[tuple[str, Rates]]

_admissions = Counter(
    "trunkline_admissions_total", "Reservations, by who decided and what came of it.", ["by", "outcome"]
)


class KeyTaken(Exception):
    """The idempotency key belongs to another request; `same`: of the same body. Nothing was taken."""

    def __init__(self, request_id: str, same: bool) -> None:
        super().__init__(request_id)
        self.request_id = request_id
        self.same = same


class Reservation:
    """What one admitted request holds of its tenant's limits."""

    def __init__(self, headroom: Headroom | None, settle: Callable[[int], None]) -> None:
        self.headroom = headroom
        self._settle: Callable[[int], None] | None = settle

    def settle(self, used_tokens: int) -> None:
        """Give back what was not used. Counts once; never waits."""
        if self._settle is not None:
            settle, self._settle = self._settle, None
            settle(used_tokens)


class Admission:
    """Reserves and settles. `gateways` says how many gateways live, this one included.

    `store_now_us` replaces the store's own clock where time is simulated; microseconds, never 0.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        gateways: Callable[[], int],
        store_now_us: Callable[[], int] | None = None,
        idem_ttl_s: int = 24 * 3600,
    ) -> None:
        self._idem_ttl_s = idem_ttl_s
        self._store = store
        self._clock = clock
        self._gateways = gateways
        self._store_now_us = store_now_us or (lambda: 0)
        self._local = Ledger()
        self._empty_until_us = 0
        store.on_birth_change(self._start_empty)

    async def reserve(
        self,
        principal: Principal,
        model: str,
        request_id: str,
        tokens: int,
        ttl_s: float,
        owned: Write | None = None,
        claims: tuple[str, bytes] | None = None,
    ) -> Reservation:
        """Take one request and `tokens` (prompt + choices × max_tokens) for at most `ttl_s`.

        `owned` is written in the same round trip, before. `claims`: an idempotency key and the hash of the body, looked
        at before the limits in the same script. Raises RPM, TPM, CONCURRENCY with the time after which it may fit, and
        KeyTaken; a refusal takes nothing. With a key there is no local share: raises StateAway.
        """
        scopes = [(model, _rates(principal.model_limits.get(model, principal.limits))), ("*", _rates(principal.limits))]
        _refuse_what_never_fits(scopes, tokens)
        tenant, ttl_us = principal.tenant, round(ttl_s * 1e6)
        try:
            found = await self._reserve_shared(tenant, request_id, scopes, tokens, ttl_us, owned, claims)
            by = "store"
        except StateAway:
            if claims is not None:
                self.settle(tenant, request_id, 0)  # the store may have taken it, and the answer is lost
                raise
            if owned is not None:
                self._store.write_behind(*owned)
            scopes = [(scope, rates.share(max(1, self._gateways()))) for scope, rates in scopes]
            found = self._local.reserve(tenant, request_id, scopes, tokens, self._now_us(), ttl_us)
            by = "local"
        _admissions.labels(by, found.limit if isinstance(found, Refused) else "ok").inc()
        if isinstance(found, Refused):
            raise _refusal(found, scopes)
        return Reservation(_headroom(found, scopes), lambda used: self.settle(tenant, request_id, used))

    def adopt(self, tenant: str, request_id: str) -> Reservation:
        """The reservation of a request that another gateway began."""
        return Reservation(None, lambda used: self.settle(tenant, request_id, used))

    async def _reserve_shared(
        self,
        tenant: str,
        request_id: str,
        scopes: _Scopes,
        tokens: int,
        ttl_us: int,
        owned: Write | None,
        claims: tuple[str, bytes] | None,
    ) -> Left | Refused:
        (model, _), *_ = scopes
        debt = max(0, self._empty_until_us - self._now_us())
        arguments: list[str | int] = ["reserve", self._store_now_us(), debt, request_id, ttl_us, tokens, model]
        for _, rates in scopes:
            arguments += [rates.rpm, rates.tpm, rates.concurrency]
        names = [keys.lim(tenant)]
        if claims is not None:
            key, body = claims
            names.append(keys.idem(tenant, key))
            arguments += [body.hex(), self._idem_ttl_s]
        reserve: Write = (SCRIPT, names, arguments)
        *_, answer = await self._store.run_all([owned, reserve] if owned else [reserve])
        if answer[0] == 1:
            return Left(*answer[1:])
        if answer[0] == 2:
            raise KeyTaken(_text(answer[1]), claims is not None and _text(answer[2]) == claims[1].hex())
        return Refused(_text(answer[1]), answer[2], _text(answer[3]), Left(*answer[4:]))

    def settle(self, tenant: str, request_id: str, used: int | None) -> None:
        """End a lease that used so much; None: nobody knows, so it counts in full. Written behind."""
        # The store is told also of what was decided here: it may have taken the reservation and lost the answer.
        if used is not None:
            self._local.settle(tenant, request_id, used, self._now_us())
        known = "" if used is None else used
        arguments: list[str | int] = ["settle", self._store_now_us(), 0, request_id, known]
        self._store.write_behind(SCRIPT, [keys.lim(tenant)], arguments)

    def _start_empty(self) -> None:
        """The store forgot what was taken: buckets that are not there are empty and fill from now on."""
        self._empty_until_us = self._now_us() + MINUTE_US

    def _now_us(self) -> int:
        return round(self._clock.monotonic() * 1e6)


def _rates(limits: Limits) -> Rates:
    return Rates(limits.rpm, limits.tpm, limits.concurrency)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _refuse_what_never_fits(scopes: _Scopes, tokens: int) -> None:
    limit = min(rates.tpm for _, rates in scopes)
    if tokens > limit:
        raise TrunklineError(
            Reason.TPM,
            f"The request may use {tokens} tokens and the limit is {limit} per minute: ask for fewer (max_tokens, n).",
            metadata={"subject": "TPM", "limit": str(limit)},
        )


def _refusal(refused: Refused, scopes: _Scopes) -> TrunklineError:
    """What is left of the limits goes with it, as on an answer."""
    rates = dict(scopes)[refused.scope]
    scope = "all models" if refused.scope == "*" else refused.scope
    what, limit, retry_s = {
        "RPM": ("requests per minute", rates.rpm, refused.wait_us / 1e6),
        "TPM": ("tokens per minute", rates.tpm, refused.wait_us / 1e6),
        "CONCURRENCY": ("requests at once", rates.concurrency, CONCURRENCY_RETRY_S),
    }[refused.limit]
    return TrunklineError(
        Reason(refused.limit),
        f"The limit of {limit} {what} for {scope} is reached.",
        metadata={
            "subject": f"{refused.limit} {refused.scope}",
            "limit": str(limit),
            **_headroom(refused.left, scopes).headers(),
        },
        retry_after_s=retry_s,
    )


def _headroom(left: Left, scopes: _Scopes) -> Headroom:
    return Headroom(
        min(rates.rpm for _, rates in scopes),
        left.requests,
        left.requests_us / 1e6,
        min(rates.tpm for _, rates in scopes),
        left.tokens,
        left.tokens_us / 1e6,
    )
