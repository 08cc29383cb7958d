"""The state store against a real server that is killed, stopped, emptied and full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
import uvloop

from shared import state
from shared.clock import SYSTEM_CLOCK
from shared.errors import Reason
from shared.state import Script, StateAway, Store
from tests.chaos.proxy import Link
from tests.fakes.valkey import Valkey

APPEND = Script("redis.call('RPUSH', KEYS[1], ARGV[1]) return redis.call('LLEN', KEYS[1])")
# As all scripts that are written behind: running it again changes nothing.
SET_ONCE = Script(
    "if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 1 then redis.call('RPUSH', KEYS[2], ARGV[1]) end"
)
WRONG = Script("return redis.call('RPUSH', KEYS[1], 'x')")


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = Store(url, SYSTEM_CLOCK, name="test")
    await store.start()
    try:
        yield store
    finally:
        await store.close()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is not the test's
            await asyncio.sleep(0.01)


async def refused_in(store: Store) -> float:
    """Seconds until a call was refused."""
    began = time.monotonic()
    with pytest.raises(StateAway) as caught:
        await store.get("k")
    assert caught.value.reason is Reason.STATE_AWAY
    return time.monotonic() - began


# --- while it is there ---


async def test_a_script_runs_whether_or_not_the_store_knows_it(redis_url: str) -> None:
    async with opened(redis_url) as store:
        assert store.available
        assert await store.run(APPEND, ["l"], ["a"]) == 1
        assert await store.run(APPEND, ["l"], ["b"]) == 2
        redis.Redis.from_url(redis_url).script_flush()
        assert await store.run(APPEND, ["l"], [3]) == 3
        assert await store.lrange("l", 0, -1) == ["a", "b", "3"]
        assert (await store.get("none"), await store.hgetall("none")) == (None, {})


async def test_a_fault_in_a_script_is_the_callers_and_not_the_stores(redis_url: str) -> None:
    async with opened(redis_url) as store:
        redis.Redis.from_url(redis_url).set("text", "x")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            await store.run(WRONG, ["text"], [])
        assert store.available


async def test_all_processes_see_one_birth_id_which_stays_while_the_data_does(redis_url: str) -> None:
    async with opened(redis_url) as one, opened(redis_url) as other:
        assert one.birth == other.birth
        assert len(one.birth) == 16
        assert await one.get("tl:birth") == one.birth


async def test_a_caller_that_is_cancelled_leaves_no_answer_for_the_next(redis_url: str) -> None:
    echo = Script("local n = 0 while n < tonumber(ARGV[2]) do n = n + 1 end return ARGV[1]")
    async with opened(redis_url) as store:
        for i in range(60):
            task = asyncio.create_task(store.run(echo, [], [f"cancelled {i}", 30_000]))
            await asyncio.sleep(0.0005 * (i % 5))
            task.cancel()
            assert await store.run(echo, [], [f"kept {i}", 0]) == f"kept {i}"
            await asyncio.gather(task, return_exceptions=True)
        assert store.available


async def test_many_callers_at_once_share_few_connections_and_none_is_refused(redis_url: str) -> None:
    async with opened(redis_url) as store:
        answers = await asyncio.gather(*(store.run(APPEND, ["l"], [i]) for i in range(500)))
        assert sorted(answers) == list(range(1, 501))
        with redis.Redis.from_url(redis_url) as client:
            assert len([c for c in client.client_list() if c["name"] == "test"]) <= state.MAX_CONNECTIONS + 3


# --- writes behind ---


async def test_writes_behind_are_made_in_order_and_without_waiting(redis_url: str, unblocked: None) -> None:
    async with opened(redis_url) as store:
        for i in range(2000):
            store.write_behind(SET_ONCE, ["h", "l"], [i, 1])
            if i % 500 == 0:
                await asyncio.sleep(0)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.lrange("l", 0, -1) == [str(i) for i in range(2000)]


async def test_writes_of_different_scripts_to_one_key_keep_their_order(redis_url: str) -> None:
    clear = Script("redis.call('DEL', KEYS[1], KEYS[2])")
    async with opened(redis_url) as store:
        for i in range(300):
            store.write_behind(SET_ONCE, ["h", "l"], [i, 1])
            store.write_behind(clear, ["h", "l"], [])
        store.write_behind(SET_ONCE, ["h", "l"], ["last", 1])
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.lrange("l", 0, -1) == ["last"]


async def test_a_write_that_the_store_refuses_is_counted_and_holds_up_none_behind_it(redis_url: str) -> None:
    before = state._refused._value.get()
    async with opened(redis_url) as store:
        redis.Redis.from_url(redis_url).set("text", "x")
        store.write_behind(WRONG, ["text"], [])
        store.write_behind(SET_ONCE, ["h", "l"], ["after", 1])
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.lrange("l", 0, -1) == ["after"]
    assert state._refused._value.get() == before + 1


async def test_writes_wait_for_the_stores_return_and_the_oldest_go_beyond_the_bound() -> None:
    with Valkey() as valkey:
        url = valkey.url
        valkey.kill()
        before = state._dropped._value.get()
        async with opened(url) as store:
            assert not store.available
            for i in range(state.MAX_BEHIND + 5):
                store.write_behind(SET_ONCE, ["h", "l"], [i, 1])
            assert state._dropped._value.get() == before + 5
            valkey.start()
            await until(lambda: not store._behind)
        with valkey.client() as client:
            assert client.lrange("l", 0, -1) == [str(i) for i in range(5, state.MAX_BEHIND + 5)]


async def test_no_write_is_lost_or_made_twice_or_out_of_turn_by_a_store_that_is_killed_under_them(
    tmp_path: Path,
) -> None:
    with Valkey(tmp_path) as valkey:
        async with opened(valkey.url) as store:
            for i in range(1500):
                store.write_behind(SET_ONCE, ["h", "l"], [i, 1])
            for left in (1000, 300):
                await until(lambda left=left: len(store._behind) < left)  # type: ignore[misc]
                valkey.kill()  # while a batch is under way
                valkey.start()
                await until(lambda: store.available)
            await until(lambda: store._idle.is_set(), 10)
        with valkey.client() as client:
            assert client.lrange("l", 0, -1) == [str(i) for i in range(1500)]


async def test_no_write_is_lost_when_the_store_forgets_its_scripts_between_loading_and_running(redis_url: str) -> None:
    def forget() -> None:
        with redis.Redis.from_url(redis_url) as client:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                client.script_flush()

    async with opened(redis_url) as store, asyncio.TaskGroup() as group:
        for i in range(1500):
            store.write_behind(SET_ONCE, ["h", "l"], [i, 1])
        group.create_task(asyncio.to_thread(forget))
        await until(lambda: store._idle.is_set(), 10)
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert client.lrange("l", 0, -1) == [str(i) for i in range(1500)]


# --- while it is away ---


async def test_a_store_that_was_never_there_is_no_error_and_is_found_when_it_comes() -> None:
    with Valkey() as valkey:
        valkey.kill()
        async with opened(valkey.url) as store:
            store.on_birth_change(lambda: pytest.fail("the first data set is not a change"))
            assert await refused_in(store) < 0.05
            valkey.start()
            await until(lambda: store.available)
            assert await store.run(APPEND, ["l"], ["x"]) == 1


async def test_a_killed_store_costs_one_failed_call_and_then_no_wait_and_comes_back(valkey: Valkey) -> None:
    async with opened(valkey.url) as store:
        await store.run(APPEND, ["l"], ["x"])
        valkey.kill()
        assert await refused_in(store) < 1.5
        assert not store.available
        assert await refused_in(store) < 0.05
        valkey.start()
        await until(lambda: store.available)
        assert await store.run(APPEND, ["l"], ["x"]) == 1, "it came back empty"


async def test_connections_that_ended_with_a_killed_store_fail_no_call_once_it_is_back(valkey: Valkey) -> None:
    async with opened(valkey.url) as store:
        await asyncio.gather(*(store.get("k") for _ in range(12)))  # so many connections wait for their next use
        valkey.kill()
        await refused_in(store)
        valkey.start()
        await until(lambda: store.available)
        await asyncio.gather(*(store.get("k") for _ in range(12)))
        assert store.available


async def test_a_store_that_came_back_empty_is_told_to_all_even_if_one_of_them_fails(valkey: Valkey) -> None:
    told: list[str] = []

    def fails() -> None:
        told.append("fails")
        raise RuntimeError("a bug")

    async with opened(valkey.url) as store:
        birth = store.birth
        store.on_birth_change(fails)
        store.on_birth_change(lambda: told.append(store.birth))
        valkey.kill()
        valkey.start()
        await until(lambda: len(told) == 2)
        assert store.birth != birth
        assert told == ["fails", store.birth]
        await asyncio.sleep(2 * state.PROBE_S)
        assert len(told) == 2
        assert store.available


async def test_who_starts_after_a_loss_knows_of_it_too(valkey: Valkey) -> None:
    async with opened(valkey.url) as store:
        assert not store.lost_within(60)
        birth = store.birth
        valkey.kill()
        valkey.start()
        await until(lambda: store.birth != birth)
        async with opened(valkey.url) as later:
            assert store.lost_within(60)
            assert later.lost_within(60)
            assert not later.lost_within(0)


async def test_a_store_that_came_back_with_its_data_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    told: list[str] = []
    with Valkey(tmp_path) as valkey:
        async with opened(valkey.url) as store:
            store.on_birth_change(lambda: told.append("changed"))
            await store.run(APPEND, ["l"], ["x"])
            valkey.kill()
            await refused_in(store)
            valkey.start()
            await until(lambda: store.available)
            assert await store.lrange("l", 0, -1) == ["x"]
            assert told == []


async def test_a_store_held_up_by_anothers_script_is_away_and_loses_no_write(valkey: Valkey) -> None:
    endless = "while true do end"
    async with opened(valkey.url) as store:
        await store.run(APPEND, ["l"], ["before"])
        with valkey.client() as client:
            client.config_set("busy-reply-threshold", 1)
        held_up = asyncio.create_task(asyncio.to_thread(_evaluate, valkey, endless))
        await asyncio.sleep(0.1)
        store.write_behind(SET_ONCE, ["h", "w"], ["kept", 1])  # before the probe finds out
        assert await refused_in(store) < 1.5
        await asyncio.sleep(2 * state.PROBE_S)
        with valkey.client() as client:
            client.script_kill()
        await held_up
        await until(lambda: store.available)
        await until(store._idle.is_set)
        store.write_behind(SET_ONCE, ["h", "w"], ["next", 1])
        await until(store._idle.is_set)
        assert await store.lrange("w", 0, -1) == ["kept", "next"]


def _evaluate(valkey: Valkey, script: str) -> None:
    with valkey.client() as client, pytest.raises(redis.RedisError):
        client.eval(script, 0)


async def test_a_store_that_stands_still_costs_a_bounded_wait_once_however_many_ask(
    valkey: Valkey, unblocked: None
) -> None:
    async with opened(valkey.url) as store:
        await store.get("k")
        valkey.pause()
        began = time.monotonic()
        answers = await asyncio.gather(*(store.get("k") for _ in range(200)), return_exceptions=True)
        assert all(isinstance(answer, StateAway) for answer in answers)
        assert time.monotonic() - began < 2.5
        assert await refused_in(store) < 0.05
        valkey.resume()
        await until(lambda: store.available)
        assert await store.get("k") is None


async def test_closing_does_not_wait_long_for_a_store_that_stands_still(valkey: Valkey) -> None:
    store = Store(valkey.url, SYSTEM_CLOCK, name="test")
    await store.start()
    valkey.pause()
    store.write_behind(APPEND, ["l"], ["x"])
    began = time.monotonic()
    await store.close()
    assert time.monotonic() - began < state.CLOSE_S + 1
    valkey.resume()


# --- on the loop that services run on ---


def test_a_connection_that_breaks_is_the_stores_absence_on_uvloop_too(redis_url: str) -> None:
    uvloop.run(_used_while_connections_break(int(redis_url.rpartition(":")[2].removesuffix("/0"))))


async def _used_while_connections_break(port: int) -> None:
    link = Link("store", ("127.0.0.2", port), ("127.0.0.1", port))
    await link.start()
    await asyncio.sleep(0.2)  # it listens
    answered = refused = 0
    async with opened(f"redis://127.0.0.2:{port}/0") as store:

        async def use() -> None:
            nonlocal answered, refused
            for _ in range(300):
                try:
                    await store.run_all([(APPEND, ["l"], ["a"])])
                    answered += 1
                except StateAway:
                    refused += 1
                    await asyncio.sleep(0.001)

        async def breaking() -> None:
            while True:
                await asyncio.sleep(0.02)
                link.drop()
                store._mark(True, None)  # not wait for the next look

        breaks = asyncio.create_task(breaking())
        try:
            async with asyncio.timeout(30):
                await asyncio.gather(*(use() for _ in range(8)))
        finally:
            breaks.cancel()
            await link.close()
    assert answered
    assert refused
