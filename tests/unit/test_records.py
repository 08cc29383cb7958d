from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from shared import keys, records
from shared.clock import SYSTEM_CLOCK
from shared.records import Records
from shared.state import Store
from tests.fakes.valkey import Valkey
from trunkline.common.v1 import common_pb2
from trunkline.common.v1.common_pb2 import (
    REQUEST_STATE_CANCELLED as CANCELLED,
)
from trunkline.common.v1.common_pb2 import (
    REQUEST_STATE_EXPIRED as EXPIRED,
)
from trunkline.common.v1.common_pb2 import (
    REQUEST_STATE_FAILED as FAILED,
)
from trunkline.common.v1.common_pb2 import (
    REQUEST_STATE_FINISHED as FINISHED,
)
from trunkline.common.v1.common_pb2 import (
    REQUEST_STATE_QUEUED as QUEUED,
)
from trunkline.common.v1.common_pb2 import (
    REQUEST_STATE_RUNNING as RUNNING,
)

ID = "ab" * 16
OWNER = "00000000000000ff"


def record(state: int, epoch: int = 1, attempt: int = 1, **fields: object) -> common_pb2.RequestRecord:
    return common_pb2.RequestRecord(
        request_id=ID, tenant="dev", state=state, epoch=epoch, attempt=attempt, **fields  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = Store(redis_url, SYSTEM_CLOCK, name="test")
    await store.start()
    yield store
    await store.close()


async def written(store: Store) -> None:
    async with asyncio.timeout(5):
        await store._idle.wait()


async def test_a_record_comes_back_as_it_was_written(store: Store) -> None:
    whole = common_pb2.RequestRecord(
        request_id=ID, tenant="dev", model="smollm2", version="1", state=FINISHED, gateway_id="g0", worker_id="w0",
        epoch=2, attempt=3, usage=common_pb2.Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=1),
        reason="stop", trace_id="cd" * 16, accepted_at_ms=1_800_000_000_000, ended_at_ms=1_800_000_000_500,
    )  # fmt: skip
    kept = Records(store)
    kept.write(whole, incarnation=OWNER)
    await written(store)
    assert await kept.get(ID) == whole
    assert (await store.hgetall(keys.req(ID)))["ginc"] == OWNER
    assert await kept.get("00" * 16) is None


ORDERS = [
    # what is written, in turn, and what stays: (state, epoch, attempt)
    ([(QUEUED, 1, 1), (RUNNING, 1, 1), (FINISHED, 1, 1)], (FINISHED, 1, 1)),
    ([(RUNNING, 1, 1), (QUEUED, 1, 1)], (RUNNING, 1, 1)),
    ([(RUNNING, 1, 1), (QUEUED, 1, 2)], (QUEUED, 1, 2)),
    ([(RUNNING, 1, 2), (RUNNING, 1, 1)], (RUNNING, 1, 2)),
    ([(RUNNING, 2, 1), (RUNNING, 1, 9)], (RUNNING, 2, 1)),
    ([(RUNNING, 2, 1), (FINISHED, 1, 9)], (RUNNING, 2, 1)),  # an owner that was fenced ends nothing
    ([(FINISHED, 1, 1), (FAILED, 2, 1)], (FINISHED, 1, 1)),
    ([(CANCELLED, 1, 1), (FINISHED, 1, 1)], (CANCELLED, 1, 1)),
    ([(EXPIRED, 1, 1), (QUEUED, 2, 2)], (EXPIRED, 1, 1)),
    ([(FAILED, 1, 1)], (FAILED, 1, 1)),
    ([(RUNNING, 1, 10), (RUNNING, 1, 9)], (RUNNING, 1, 10)),  # numbers, not texts
]


@pytest.mark.parametrize(("writes", "stays"), ORDERS)
async def test_a_record_moves_forward_only_and_ends_once(
    store: Store, writes: list[tuple[int, int, int]], stays: tuple[int, int, int]
) -> None:
    kept = Records(store)
    for write in writes:
        kept.write(record(*write), incarnation=OWNER)
    await written(store)
    held = await kept.get(ID)
    assert held is not None
    assert (held.state, held.epoch, held.attempt) == stays


async def test_a_later_write_of_the_same_step_tells_more(store: Store) -> None:
    kept = Records(store)
    kept.write(record(RUNNING, worker_id="w0"), incarnation=OWNER)
    kept.write(record(RUNNING, worker_id="w1"), incarnation=OWNER)
    await written(store)
    held = await kept.get(ID)
    assert held is not None
    assert held.worker_id == "w1"


async def test_records_and_aliases_live_an_hour_after_the_end(store: Store, redis_url: str) -> None:
    kept = Records(store)
    kept.write_alias("dev", "mine", ID)
    kept.write(record(RUNNING), incarnation=OWNER)
    await written(store)
    with redis.Redis.from_url(redis_url) as client:
        both = (keys.req(ID), keys.alias("dev", "mine"))
        assert all(client.ttl(key) > records.ENDED_TTL_S for key in both)
        kept.write(record(FINISHED), incarnation=OWNER)
        await written(store)
        assert all(records.ENDED_TTL_S - 5 < client.ttl(key) <= records.ENDED_TTL_S for key in both)
    assert await kept.alias("dev", "mine") == ID
    assert await kept.alias("other", "mine") is None


async def test_an_alias_given_to_a_later_request_outlives_the_earlier_one(store: Store, redis_url: str) -> None:
    kept = Records(store)
    kept.write_alias("dev", "mine", ID)
    kept.write_alias("dev", "mine", "ff" * 16)
    kept.write(record(FINISHED), incarnation=OWNER)
    await written(store)
    assert await kept.alias("dev", "mine") == "ff" * 16
    with redis.Redis.from_url(redis_url) as client:
        assert client.ttl(keys.alias("dev", "mine")) > records.ENDED_TTL_S


async def test_what_is_live_is_written_again_into_a_store_that_came_back_empty(valkey: Valkey) -> None:
    store = Store(valkey.url, SYSTEM_CLOCK, name="test")
    await store.start()
    kept = Records(store)
    kept.write_alias("dev", "mine", ID)
    kept.write(record(RUNNING, attempt=2), incarnation=OWNER)
    ended = record(FINISHED)
    ended.request_id = "cd" * 16
    kept.write(ended, incarnation=OWNER)
    await written(store)
    birth = store.birth
    valkey.kill()
    valkey.start()
    async with asyncio.timeout(5):
        while store.birth == birth or not store.available:  # noqa: ASYNC110 - what is waited for is not the test's
            await asyncio.sleep(0.01)
    await written(store)
    held = await kept.get(ID)
    assert held is not None
    assert (held.state, held.attempt) == (RUNNING, 2)
    assert await kept.alias("dev", "mine") == ID
    assert await kept.get("cd" * 16) is None
    await store.close()


async def test_only_so_many_live_records_are_remembered(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LIVE", 3)
    kept = Records(store)
    for i in range(5):
        live = record(RUNNING)
        live.request_id = f"{i:032x}"
        kept.write(live, incarnation=OWNER)
        kept.write_alias("dev", str(i), live.request_id)
    assert [int(id_, 16) for id_ in kept._live] == [2, 3, 4]
    assert [int(id_, 16) for id_ in kept._aliases] == [2, 3, 4]
