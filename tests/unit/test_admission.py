"""Single cases of admission: refusals, settling, a store that is away or came back empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from gateway.admission import Admission
from gateway.auth import Limits, Principal
from gateway.ledger import MAX_TENANTS, Ledger, Left, Rates
from shared import keys
from shared.clock import SYSTEM_CLOCK
from shared.errors import Reason, TrunklineError
from shared.state import StateAway, Store
from tests.fakes.valkey import Valkey


class Time:
    """One time for the gateway's clock and, in microseconds since the epoch, the store's."""

    def __init__(self) -> None:
        self.s = 1000.0

    def monotonic(self) -> float:
        return self.s

    def wall_ms(self) -> int:
        return round(self.s * 1000)

    def store_us(self) -> int:
        return 1_764_000_000_000_000 + round(self.s * 1e6)


def principal(rpm: int = 60, tpm: int = 6000, concurrency: int = 10, **model_limits: Limits) -> Principal:
    everything = frozenset(("*",))
    return Principal("k", "t", everything, everything, Limits(rpm, tpm, concurrency), model_limits)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def store(redis_url: str, time: Time) -> AsyncIterator[Store]:
    made = Store(redis_url, time, name="test")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def admission(store: Store, time: Time) -> Admission:
    return Admission(store, time, lambda: 2, time.store_us)


@pytest.fixture
async def hash_of(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def refusal(admission: Admission, who: Principal, name: str, tokens: int = 1, model: str = "m") -> TrunklineError:
    with pytest.raises(TrunklineError) as refused:
        await admission.reserve(who, model, name, tokens, 60)
    return refused.value


@pytest.mark.parametrize(
    ("who", "tokens", "reason"),
    [
        (principal(rpm=3), 1, Reason.RPM),
        (principal(tpm=30), 10, Reason.TPM),
        (principal(concurrency=3), 1, Reason.CONCURRENCY),
    ],
)
async def test_each_limit_refuses_by_its_name_and_waiting_as_told_helps(
    admission: Admission, store: Store, time: Time, who: Principal, tokens: int, reason: Reason
) -> None:
    first = [await admission.reserve(who, "m", str(number), tokens, 600) for number in range(3)]
    refused = await refusal(admission, who, "4", tokens)
    assert refused.reason is reason
    assert refused.retry_after_s is not None
    if reason is Reason.CONCURRENCY:
        first[0].settle(0)
        await store._idle.wait()
    else:
        time.s += refused.retry_after_s - 0.001
        assert (await refusal(admission, who, "5", tokens)).reason is reason
        time.s += 0.001
    await admission.reserve(who, "m", "6", tokens, 600)


async def test_a_refusal_takes_nothing(admission: Admission, hash_of: redis.asyncio.Redis) -> None:
    await admission.reserve(principal(tpm=100), "m", "1", 60, 60)
    before = await hash_of.hgetall(keys.lim("t"))
    for number in range(5):
        assert (await refusal(admission, principal(tpm=100), f"x{number}", 60)).reason is Reason.TPM
    assert await hash_of.hgetall(keys.lim("t")) == before
    await admission.reserve(principal(tpm=100), "m", "2", 40, 60)


async def test_what_can_never_fit_is_told_so_without_a_time(admission: Admission) -> None:
    refused = await refusal(admission, principal(tpm=100), "1", 101)
    assert (refused.reason, refused.retry_after_s) == (Reason.TPM, None)
    assert "101" in refused.message
    assert "100" in refused.message


async def test_settling_gives_back_what_was_not_used_once(admission: Admission, store: Store) -> None:
    reservation = await admission.reserve(principal(tpm=100), "m", "1", 100, 60)
    await refusal(admission, principal(tpm=100), "2", 1)
    reservation.settle(30)
    reservation.settle(0)
    await store._idle.wait()
    await admission.reserve(principal(tpm=100), "m", "3", 70, 60)
    await refusal(admission, principal(tpm=100), "4", 1)


async def test_an_answer_lost_on_the_way_does_not_count_twice(admission: Admission, store: Store) -> None:
    again = [await admission.reserve(principal(tpm=100, concurrency=1), "m", "1", 100, 60) for _ in range(2)]
    assert again[0].headroom == again[1].headroom
    again[0].settle(0)
    again[1].settle(0)
    await store._idle.wait()
    await admission.reserve(principal(tpm=100, concurrency=1), "m", "2", 100, 60)


async def test_a_lease_that_nobody_settles_ends_at_its_expiry_and_counts_as_used(
    admission: Admission, time: Time
) -> None:
    who = principal(tpm=600, concurrency=1)
    await admission.reserve(who, "m", "1", 600, ttl_s=10)
    time.s += 9.9
    assert (await refusal(admission, who, "2")).reason is Reason.CONCURRENCY
    time.s += 0.1
    assert (await refusal(admission, who, "3", 101)).reason is Reason.TPM
    await admission.reserve(who, "m", "4", 100, 10)


async def test_a_refusal_says_what_is_left_as_an_answer_does(admission: Admission, time: Time) -> None:
    who = principal(rpm=2, tpm=6000)
    admitted = await admission.reserve(who, "m", "1", 600, 60)
    await admission.reserve(who, "m", "2", 600, 60)
    refused = await refusal(admission, who, "3")
    assert admitted.headroom is not None
    assert admitted.headroom.remaining_requests == 1
    assert refused.retry_after_s == pytest.approx(30.0)
    told = {name: value for name, value in refused.metadata.items() if name.startswith("x-ratelimit-")}
    assert told == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "4800",
        "x-ratelimit-reset-tokens": "12.000s",
    }


async def test_a_models_limit_holds_beside_the_tenants(admission: Admission) -> None:
    who = principal(rpm=4, small=Limits(2, 6000, 10))
    for number in range(2):
        await admission.reserve(who, "small", str(number), 1, 60)
    refused = await refusal(admission, who, "x", model="small")
    assert refused.metadata.items() >= {"subject": "RPM small", "limit": "2"}.items()
    for number in range(2):
        await admission.reserve(who, "large", f"l{number}", 1, 60)
    assert (await refusal(admission, who, "y", model="large")).reason is Reason.RPM, "the tenant's own limit"


async def test_headroom_tells_the_tighter_limit(admission: Admission) -> None:
    who = principal(rpm=60, tpm=6000, small=Limits(6, 600, 10))
    left = (await admission.reserve(who, "small", "1", 100, 60)).headroom
    assert (left.limit_requests, left.remaining_requests, left.reset_requests_s) == (6, 5, 10.0)
    assert (left.limit_tokens, left.remaining_tokens, left.reset_tokens_s) == (600, 500, 10.0)


async def test_the_key_goes_by_itself_after_the_last_clock_and_lease(
    admission: Admission, hash_of: redis.asyncio.Redis
) -> None:
    await admission.reserve(principal(), "m", "1", 1, ttl_s=600)
    await admission.reserve(principal(), "m", "2", 1, ttl_s=1)
    assert 600_000 < await hash_of.pttl(keys.lim("t")) <= 662_000


async def test_without_the_store_each_gateway_keeps_its_share(store: Store, time: Time) -> None:
    admission = Admission(store, time, lambda: 2, time.store_us)
    store.available = False
    who = principal(rpm=4, tpm=1000, concurrency=4)
    held = [await admission.reserve(who, "m", str(number), 100, 60) for number in range(2)]
    assert held[0].headroom.limit_requests == 2
    assert (await refusal(admission, who, "3", 100)).reason is Reason.RPM
    held[0].settle(50)
    time.s += 30
    await admission.reserve(who, "m", "4", 100, 60)


async def test_what_was_admitted_without_the_store_is_settled_there_too_if_it_took_it(
    admission: Admission, store: Store, hash_of: redis.asyncio.Redis
) -> None:
    """The answer was lost and the gateway decided by itself, but the store holds the lease."""
    await admission.reserve(principal(), "m", "1", 100, 600)
    store.available = False
    reservation = await admission.reserve(principal(), "m", "1", 100, 600)
    store.available = True
    reservation.settle(10)
    await store._idle.wait()
    assert not await hash_of.hexists(keys.lim("t"), "l:1")


async def test_a_store_that_came_back_empty_starts_with_empty_buckets(
    admission: Admission, store: Store, time: Time, hash_of: redis.asyncio.Redis
) -> None:
    who = principal(rpm=60, tpm=6000)
    await hash_of.flushall()
    await store._probe()
    refused = await refusal(admission, who, "1", 100)
    assert refused.reason in (Reason.RPM, Reason.TPM)
    time.s += 1.0
    await admission.reserve(who, "m", "2", 100, 60)
    assert (await refusal(admission, who, "3", 100)).reason in (Reason.RPM, Reason.TPM)
    time.s += 60
    for number in range(50):
        await admission.reserve(principal(60, 6000, 100), "m", f"n{number}", 100, 60)


async def test_the_stores_own_clock_serves_by_default(store: Store, time: Time) -> None:
    admission = Admission(store, time, lambda: 1)
    left = (await admission.reserve(principal(rpm=60), "m", "1", 1, 60)).headroom
    assert (left.remaining_requests, left.reset_requests_s) == (59, 1.0)


def test_idle_tenants_are_forgotten_and_busy_ones_kept() -> None:
    ledger, scopes = Ledger(), [("*", Rates(60, 60, 5))]
    assert isinstance(ledger.reserve("busy", "1", scopes, 60, 10**9, 10**12), Left)
    for number in range(MAX_TENANTS * 2):
        now = 10**10 + number * 10**8
        ledger.reserve(f"t{number}", "1", scopes, 1, now, 1)
        ledger.settle(f"t{number}", "1", 1, now)
    assert ledger.held("busy") == 1
    assert len(ledger._tenants) <= MAX_TENANTS + 1


async def test_a_reservation_whose_answer_was_lost_is_given_back_by_the_request_that_was_refused(
    valkey: Valkey,
) -> None:
    store = Store(valkey.url, SYSTEM_CLOCK, name="test")
    await store.start()
    admission = Admission(store, SYSTEM_CLOCK, lambda: 1)
    await admission.reserve(principal(), "m", "a", 1, 60)  # the store knows the script
    valkey.pause()
    with pytest.raises(StateAway):
        await admission.reserve(principal(), "m", "b", 1, 60, claims=("key", b"body"))
    valkey.resume()
    with valkey.client() as client:
        async with asyncio.timeout(5):
            while not (store.available and client.hget(keys.idem("t", "key"), "request")):  # noqa: ASYNC110 - its own
                await asyncio.sleep(0.02)  # until it runs what it was sent
        await store.close()
        assert client.hget(keys.lim("t"), "n:*") == "1"
        assert not client.hexists(keys.lim("t"), "l:b")
