"""Claims, leases, outputs and take-overs on a real store, with several gateways and time that is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import redis

from gateway.admission import SCRIPT
from gateway.custody import LEASE_MS, MAX_OUT_BYTES, Batch, Custody, Ending, Plan, Written
from gateway.transcript import Run
from shared import keys
from shared.clock import SYSTEM_CLOCK
from shared.ids import Identity
from shared.state import Store
from tests.fakes.gateway_client import until
from tests.fakes.valkey import Valkey
from trunkline.common.v1 import common_pb2

ID = "ab" * 16
PLAN = Plan("chat", "a", "k1", b"spec", b"submit", b"served", ("", ""), 5)
RECORD: dict[str, str | int] = {"tenant": "a", "idem": "key"}
ENDING = Ending(finished=b"whole")


class Time:
    """Milliseconds of the store's clock."""

    def __init__(self) -> None:
        self.now_ms = 1_764_000_000_000


@asynccontextmanager
async def custodies(url: str, count: int, time: Time) -> AsyncIterator[list[Custody]]:
    stores = [Store(url, SYSTEM_CLOCK, name=f"g{number}") for number in range(count)]
    try:
        for store in stores:
            await store.start()
        yield [
            Custody(store, Identity("gateway", f"g{number}", number + 1), lambda: time.now_ms)
            for number, store in enumerate(stores)
        ]
    finally:
        for store in stores:
            await store.close()


async def claimed(custody: Custody, **record: Any) -> None:
    assert await custody.claim(ID, "a", (1, 1), PLAN, 60_000, 1000, RECORD | record)


def runs(*tokens: int, start: int = 0) -> list[Run]:
    return [Run(0, start, list(tokens))]


async def append(custody: Custody, epoch: int, *batch: Run, ending: Ending | None = None, known: int = 0) -> Written:
    record = {"state": "FINISHED"} if ending else {}
    ((answer, _),) = await custody.append([Batch(ID, epoch, known, batch, ending, record)])
    return answer


async def test_outputs_come_back_as_they_were_written(redis_url: str) -> None:
    time = Time()
    async with custodies(redis_url, 2, time) as (one, two):
        await claimed(one)
        logprobs = [common_pb2.TokenLogprob(chosen=float("-inf"), top_ids=[1, 2], top_logprobs=[-0.1, -3.3])]
        written = [Run(1, 0, [2**31 - 1], 0, None, logprobs), Run(0, 0, [], 2), Run(1, 1, [7], 1, 0)]
        assert await append(one, 1, *written) is Written.MADE
        assert await append(one, 1, *runs(9)) is Written.MADE
        news = await two.follow(ID)
        assert [tuple(run)[:5] for run in news.runs] == [tuple(run)[:5] for run in (*written, *runs(9))]
        assert list(news.runs[0].logprobs) == logprobs
        assert (news.rank, news.resumable, news.lapsed, news.ending) == (1, True, False, None)
        assert await append(one, 1, ending=ENDING) is Written.MADE
        later = await two.follow(ID, news.last)
        assert (later.rank, later.runs, later.ending) == (3, [], ENDING)
        assert await append(one, 1, ending=ENDING) is Written.MADE, "an end whose answer was lost is written again"
        assert len((await two.follow(ID)).runs) == 4


async def test_an_append_behind_entries_that_are_gone_is_refused_and_nothing_is_written(redis_url: str) -> None:
    async with custodies(redis_url, 1, Time()) as (one,):
        await claimed(one)
        made = [await one.append([Batch(ID, 1, known, runs(known, start=known))]) for known in range(3)]
        assert made == [[(Written.MADE, entries)] for entries in (1, 2, 3)]
        assert await append(one, 1, *runs(9, start=9), known=4) is Written.LOST
        assert await append(one, 1, ending=ENDING, known=4) is Written.LOST
        news = await one.follow(ID)
        assert (len(news.runs), news.entries, news.ending, news.rank) == (3, 3, None, 1)


async def test_of_many_that_want_a_lapsed_request_one_gets_it(redis_url: str) -> None:
    time = Time()
    async with custodies(redis_url, 6, time) as (owner, *others):
        await claimed(owner)
        assert not any(await asyncio.gather(*(each.take_over(ID, "a") for each in others)))
        time.now_ms += LEASE_MS - 1
        assert not any(await asyncio.gather(*(each.take_over(ID, "a") for each in others)))
        assert await owner.hold([(ID, 1, 0)]) == [(Written.MADE, -1)]
        for epoch in range(2, 8):
            time.now_ms += LEASE_MS
            taken = await asyncio.gather(*(each.take_over(ID, "a") for each in (owner, *others)))
            (won,) = [answer for answer in taken if answer is not None]
            assert won == (epoch, max(0, 60_000 - (LEASE_MS - 1) - LEASE_MS * (epoch - 1)))


async def test_what_an_owner_does_after_a_take_over_is_refused(redis_url: str) -> None:
    time = Time()
    async with custodies(redis_url, 2, time) as (one, two):
        await claimed(one)
        await append(one, 1, *runs(1, 2))
        time.now_ms += LEASE_MS
        assert await two.take_over(ID, "a") == (2, 60_000 - LEASE_MS)
        assert await append(one, 1, *runs(3, start=2)) is Written.FENCED
        assert await append(one, 1, ending=ENDING) is Written.FENCED
        assert await one.hold([(ID, 1, 0), (ID, 1, 7)]) == [(Written.FENCED, -1)] * 2
        assert not await one.claim(ID, "a", (1, 1), PLAN, 1, 1, RECORD)
        assert [run.ids for run in (await one.follow(ID)).runs] == [[1, 2]]
        assert await append(two, 2, *runs(3, start=2)) is Written.MADE
        assert await two.hold([(ID, 2, 2)]) == [(Written.MADE, 0)]
        assert await two.hold([(ID, 2, 2)]) == [(Written.MADE, 0)], "a raise whose answer was lost is made again"
        assert await two.hold([(ID, 2, 1)]) == [(Written.FENCED, -1)]


async def test_two_owners_at_random_never_mix_their_outputs(redis_url: str) -> None:
    """Each appends the next index of its own copy; whatever is acknowledged is there, once, in order."""
    rng, time = random.Random(11), Time()
    async with custodies(redis_url, 3, time) as owners:
        await claimed(owners[0])
        epochs, told = {0: 1}, 0
        for _ in range(400):
            place = rng.randrange(3)
            action = rng.choice(["append", "append", "hold", "lapse", "take"])
            if action == "lapse":
                time.now_ms += rng.choice([100, LEASE_MS // 2, LEASE_MS])
            elif action == "take":
                taken = await owners[place].take_over(ID, "a")
                if taken is not None:
                    epochs = epochs | {place: taken[0]}
            elif place in epochs:
                if action == "hold":
                    await owners[place].hold([(ID, epochs[place], 0)])
                elif await append(owners[place], epochs[place], *runs(told, start=told)) is Written.MADE:
                    assert epochs[place] == max(epochs.values()), "an owner of old was heard"
                    told += 1
        assert [run.ids for run in (await owners[0].follow(ID)).runs] == [[token] for token in range(told)]
        assert told > 50


async def test_at_its_bound_a_request_is_no_longer_resumable_and_nothing_is_trimmed(redis_url: str) -> None:
    time = Time()
    async with custodies(redis_url, 2, time) as (one, two):
        await claimed(one)
        big = [Run(0, 0, [10**9] * (MAX_OUT_BYTES // 23))]
        assert await append(one, 1, *big) is Written.MADE
        assert await append(one, 1, *big) is Written.MADE
        assert await append(one, 1, *big) is Written.FULL
        assert not (await two.follow(ID)).resumable
        assert await two.plan(ID) is None
        time.now_ms += 10 * LEASE_MS
        assert await two.take_over(ID, "a") is None
        assert await append(one, 1, ending=ENDING) is Written.LOST


async def test_a_record_that_came_back_without_its_plan_is_lost_to_its_owner(redis_url: str) -> None:
    time = Time()
    async with custodies(redis_url, 1, time) as (one,):
        await claimed(one)
        await append(one, 1, *runs(1))
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            store.flushall()
            store.hset(keys.req(ID), mapping={"epoch": 1, "attempt": 1, "rank": 2, "ginc": "1".zfill(16)})
        assert await append(one, 1, *runs(2, start=1)) is Written.LOST
        assert await one.hold([(ID, 1, 0), (ID, 1, 2)]) == [(Written.LOST, -1)] * 2
        await claimed(one)
        assert await append(one, 1, *runs(1, 2)) is Written.MADE


async def test_the_sweep_ends_what_is_ordinary_parks_what_may_be_resumed_and_leaves_the_rest(redis_url: str) -> None:
    time = Time()
    async with custodies(redis_url, 2, time) as (one, two):
        await claimed(one)
        dead = "1".zfill(16)
        assert await one.gone(10_000) == []
        time.now_ms += 10_001
        assert await two.gone(10_000) == [dead]
        assert await two.owned_by(dead) == [(ID, "a")]
        time.now_ms -= 10_001 - LEASE_MS - 999
        assert (await two.sweep(dead, ID, ENDING)).outcome == "parked"
        time.now_ms += 1
        swept = await two.sweep(dead, ID, ENDING)
        assert (swept.outcome, swept.idempotency_key, swept.worked) == ("failed", "key", False)
        assert (await two.sweep(dead, ID, ENDING)).outcome == "over"
        news = await two.follow(ID)
        assert (news.rank, news.ending) == (3, ENDING)
        assert (await two.sweep(dead, "cd" * 16, ENDING)).outcome == "none"


async def reserve(store: Store, request: str, body: str, rpm: int = 100) -> list[Any]:
    limits: Sequence[int] = (rpm, 1000, 10)
    args = ["reserve", 1_764_000_000_000_000, 0, request, 10**7, 5, "m", *limits, *limits, body, 60]
    return list(await store.run(SCRIPT, [keys.lim("a"), keys.idem("a", "key")], args))


async def test_a_key_is_asked_before_the_limits_and_claimed_only_with_them(redis_url: str) -> None:
    store = Store(redis_url, SYSTEM_CLOCK, name="g")
    await store.start()
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert (await reserve(store, "first", "b1", rpm=1))[0] == 1
        assert await reserve(store, "second", "b1", rpm=1) == [2, "first", "b1"], "though the limit is reached"
        assert await reserve(store, "second", "b2", rpm=1) == [2, "first", "b1"]
        assert (await reserve(store, "first", "b1", rpm=1))[0] == 1, "the first answer was lost"
        client.delete(keys.idem("a", "key"))
        assert (await reserve(store, "third", "b1", rpm=1))[:2] == [0, "RPM"]
        assert not client.exists(keys.idem("a", "key"))
        assert client.hkeys(keys.lim("a")).count("l:first") == 1
    await store.close()


async def test_of_concurrent_claims_of_a_key_one_wins(redis_url: str) -> None:
    stores = [Store(redis_url, SYSTEM_CLOCK, name=f"g{number}") for number in range(4)]
    for store in stores:
        await store.start()
    answers = await asyncio.gather(*(reserve(store, f"r{n}", "b") for n, store in enumerate(stores * 8)))
    (winner,) = [f"r{place}" for place, answer in enumerate(answers) if answer[0] == 1]
    assert all(answer == [2, winner, "b"] for answer in answers if answer[0] != 1)
    for store in stores:
        await store.close()


async def test_what_is_let_go_can_be_taken_at_once_and_a_lost_answer_is_asked_for_again(redis_url: str) -> None:
    time = Time()
    async with custodies(redis_url, 3, time) as (one, two, three):
        await claimed(one)
        await one.hold([(ID, 1, 0)], lease_ms=0)
        assert await two.take_over(ID, "a") == (2, 60_000)
        assert await three.take_over(ID, "a", again=True) is None
        assert await two.take_over(ID, "a") is None
        assert await two.take_over(ID, "a", again=True) == (3, 60_000)


async def test_a_store_that_came_back_empty_hears_again_what_is_owned(valkey: Valkey) -> None:
    async with custodies(valkey.url, 1, Time()) as (one,):
        await claimed(one)
        await one.claim("cd" * 16, "a", (1, 1), PLAN, 1, 1, RECORD)
        one.disown("cd" * 16, "a")
        valkey.kill()
        valkey.start()

        def owned() -> set[str]:
            with valkey.client() as client:
                return set(client.smembers(keys.own("1".zfill(16))))

        await until(lambda: owned() == {f"{ID}:a"})
        assert await one.forgot(5)


async def test_a_forgotten_key_is_written_again_unless_it_stands_for_another_request(redis_url: str) -> None:
    async with custodies(redis_url, 2, Time()) as (one, two):
        for_key = {"key": ("k", b"body")}
        assert await one.claim(ID, "a", (1, 1), PLAN, 60_000, 1000, RECORD, **for_key)
        assert await one.claim(ID, "a", (1, 1), PLAN, 60_000, 1000, RECORD, **for_key)
        other = "cd" * 16
        assert not await two.claim(other, "a", (1, 1), PLAN, 60_000, 1000, RECORD, **for_key)
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            assert store.hgetall(keys.idem("a", "k")) == {"request": ID, "hash": b"body".hex()}
            await until(lambda: not store.exists(keys.req(other)))
            assert not store.smembers(keys.own("2".zfill(16)))
