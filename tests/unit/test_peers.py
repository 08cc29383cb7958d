from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
import redis

from shared import keys, peers
from shared.clock import SYSTEM_CLOCK
from shared.ids import Identity
from shared.peers import PeerInfo, Peers, Registration
from shared.state import Store
from tests.fakes.valkey import Valkey

W0, W1 = Identity("worker", "w0", 0xA0), Identity("worker", "w1", 0xA1)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = Store(url, SYSTEM_CLOCK, name="test")
    await store.start()
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entries that live 600 ms."""
    with monkeypatch.context() as patch:
        patch.setattr(peers, "TTL_MS", 600)
        patch.setattr(peers, "REFRESH_S", 0.2)
        patch.setattr(peers, "LOOK_S", 0.1)
        yield


@asynccontextmanager
async def running(*parts: Registration | Peers) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(found: Peers, *ids: str) -> None:
    """Waits for exactly these peers."""
    async with asyncio.timeout(5):
        while set(found.snapshot()) != set(ids):
            await found.changed(found.version)


async def test_what_registers_is_found_with_its_fields_and_what_leaves_is_gone(redis_url: str) -> None:
    async with opened(redis_url) as store:
        found = Peers(store, "worker")
        one, other = (
            Registration(store, W0, {"address": "127.0.0.1:1", "build": "7"}),
            Registration(store, W1, {"address": "127.0.0.1:2"}),
        )
        await one.refresh()
        await other.refresh()
        await Registration(store, Identity("router", "r0", 1), {"address": "127.0.0.1:3"}).refresh()
        await found.look()
        assert set(found.snapshot()) == {"w0", "w1"}
        info = found.snapshot()["w0"]
        assert (info.id, info.address, info.incarnation, info.fields["build"]) == ("w0", "127.0.0.1:1", 0xA0, "7")
        await one.update({"address": "127.0.0.1:9"})
        await other.close()
        await found.look()
        assert {id_: info.address for id_, info in found.snapshot().items()} == {"w0": "127.0.0.1:9"}


async def test_a_process_that_dies_falls_off_the_list_by_itself(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick(monkeypatch):
        async with opened(redis_url) as store:
            found = Peers(store, "worker")
            alive = Registration(store, W1, {"address": "127.0.0.1:2"})
            async with running(found, alive):
                async with running(Registration(store, W0, {"address": "127.0.0.1:1"})):
                    await until(found, "w0", "w1")
                await until(found, "w1")
                await asyncio.sleep(0.8)
                assert set(found.snapshot()) == {"w1"}, "who refreshes stays"
            with redis.Redis.from_url(redis_url) as client:
                await asyncio.sleep(0.8)
                assert not client.exists(keys.peers("worker"), keys.peer("worker", "w1"))


async def test_a_successor_under_the_same_id_survives_the_farewell_of_its_predecessor(redis_url: str) -> None:
    async with opened(redis_url) as store:
        old = Registration(store, W0, {"address": "127.0.0.1:1"})
        new = Registration(store, Identity("worker", "w0", 0xB0), {"address": "127.0.0.1:2"})
        await old.refresh()
        await new.refresh()
        await old.close()
        found = Peers(store, "worker")
        await found.look()
        assert found.snapshot()["w0"].incarnation == 0xB0


async def test_configured_addresses_are_always_there_and_once_only(redis_url: str) -> None:
    async with opened(redis_url) as store:
        found = Peers(store, "worker", ["127.0.0.1:1", "127.0.0.1:2"])
        assert found.snapshot() == {a: PeerInfo(a, a) for a in ("127.0.0.1:1", "127.0.0.1:2")}
        await Registration(store, W0, {"address": "127.0.0.1:1"}).refresh()
        await found.look()
        assert set(found.snapshot()) == {"w0", "127.0.0.1:2"}


async def test_without_a_store_the_configured_addresses_are_all_there_is() -> None:
    found = Peers(None, "worker", ["127.0.0.1:1"])
    await found.look()
    assert set(found.snapshot()) == {"127.0.0.1:1"}


async def test_peers_stay_known_while_the_store_is_away_and_while_all_register_again(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick(monkeypatch):
        async with opened(valkey.url) as store:
            found = Peers(store, "worker")
            lost: list[set[str]] = []

            async def watch() -> None:
                while True:
                    await asyncio.sleep(0.02)
                    if set(found.snapshot()) != {"w0", "w1"}:
                        lost.append(set(found.snapshot()))

            registrations = [Registration(store, w, {"address": f"127.0.0.1:{i}"}) for i, w in enumerate((W0, W1))]
            async with running(found, *registrations):
                await until(found, "w0", "w1")
                watcher = asyncio.create_task(watch())
                valkey.kill()
                await asyncio.sleep(1.0)  # longer than an entry lives
                valkey.start()
                await asyncio.sleep(1.5)
                watcher.cancel()
                assert not lost
                with valkey.client() as client:
                    assert set(client.zrange(keys.peers("worker"), 0, -1)) == {"w0", "w1"}


async def test_a_peer_that_died_while_the_store_was_away_is_forgotten_afterwards(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick(monkeypatch):
        async with opened(valkey.url) as store:
            found = Peers(store, "worker")
            async with running(found, Registration(store, W1, {"address": "127.0.0.1:2"})):
                async with running(Registration(store, W0, {"address": "127.0.0.1:1"})):
                    await until(found, "w0", "w1")
                valkey.kill()
                await asyncio.sleep(0.3)
                valkey.start()
                await until(found, "w1")


async def test_an_entry_that_is_no_peer_is_passed_over(redis_url: str) -> None:
    async with opened(redis_url) as store:
        await Registration(store, W0, {"address": "127.0.0.1:1"}).refresh()
        with redis.Redis.from_url(redis_url) as client:
            client.zadd(keys.peers("worker"), {"gone": 9e15, "odd": 9e15, "worse": 9e15})
            client.hset(keys.peer("worker", "odd"), "colour", "blue")
            client.hset(
                keys.peer("worker", "worse"), mapping={"id": "worse", "address": "127.0.0.1:5", "incarnation": "zz"}
            )
        found = Peers(store, "worker")
        await found.look()
        assert set(found.snapshot()) == {"w0"}


async def test_a_store_that_came_back_empty_a_moment_ago_does_not_empty_the_list(redis_url: str) -> None:
    async with opened(redis_url) as store:
        found = Peers(store, "worker")
        await Registration(store, W0, {"address": "127.0.0.1:1"}).refresh()
        await found.look()
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        await found.look()
        assert set(found.snapshot()) == {"w0"}, "nothing in a new data set says that it is gone"
