"""Resumable generations: clients that are cut off and come back, to the same gateway, to another, to the one that takes
over; and keys under which nothing runs twice.

Whatever happens: what a client has read, joined over all its streams, is the undisturbed text.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis

from gateway import cursor as cursors
from shared import keys
from shared.errors import Reason, TrunklineError
from tests.fakes.gateway_client import Client, Said, expected, serving, spec, until, world
from tests.fakes.mesh import FakeRouter, MeshWorker, fails_with, fake_mesh
from tests.fakes.resuming import broken, come_back, gateway_process, last_cursor, read_on, resume, resumed
from tests.fakes.valkey import Valkey
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2 as pb

PROMPT = (5, 6, 7)
LENGTHS = (2, 20, 60)
WHOLE = {choice: expected(PROMPT, choice, length) for choice, length in enumerate(LENGTHS)}
LONG = {"lengths": LENGTHS, "step_s": 0.02}
WINDOW_MS = 60_000


def kept(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> pb.GenerationSpec:
    return spec(prompt, **{"n": 3, "resume_window_ms": WINDOW_MS, **fields})


def assert_whole(said: Said) -> None:
    assert said.texts == WHOLE
    assert set(said.finishes.values()) == {common_pb2.FINISH_REASON_STOP}
    assert said.finished is not None
    assert said.finished.usage.completion_tokens == sum(LENGTHS)


def held_by(store: redis.Redis, tenant: str = "a") -> list[str]:
    """Leases of limits that a tenant holds."""
    return [name for name in store.hkeys(keys.lim(tenant)) if name.startswith("l:")]


@asynccontextmanager
async def two_gateways(
    store: str, directory: Path, workers: int = 1, **fakes: Any
) -> AsyncIterator[tuple[Client, Client, FakeRouter, list[MeshWorker]]]:
    (directory / "b").mkdir()
    async with (
        fake_mesh(workers=workers, **fakes) as ((router,), own),
        serving(router, directory=directory, store=store, gateway_id="g1") as one,
        serving(router, directory=directory / "b", store=store, gateway_id="g2", seed=6) as two,
    ):
        yield one, two, router, own


async def cut_off(client: Client, asked: pb.GenerationSpec, deltas: int) -> Said:
    """Read so many deltas, then leave."""
    said, call = Said(), client.generate(asked)
    await read_on(call, said, deltas)
    call.cancel()
    return said


# --- with the owner alive -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deltas", [1, 4, 30])
async def test_a_client_that_was_cut_off_reads_the_rest_from_its_cursor(
    redis_url: str, tmp_path: Path, deltas: int
) -> None:
    async with world(redis_url, tmp_path, fakes=LONG) as (client, _, (worker,)):
        said = await cut_off(client, kept(), deltas)
        assert said.started is not None
        assert_whole(await resume(client, said.started.request_id, said=said))
        assert len(worker.submissions) == 1
        assert not worker.cancels


async def test_a_generation_that_nobody_reads_goes_on_and_is_replayed_from_any_gateway(
    redis_url: str, tmp_path: Path
) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, (worker,)):
        said = await cut_off(one, kept(return_token_ids=True), 2)
        assert said.started is not None
        request_id = said.started.request_id
        await until(lambda: not one.gateway.core.table and not len(one.gateway.core.journals))
        for client in (one, two):
            again = await resume(client, request_id)
            assert_whole(again)
            assert again.started == said.started
            assert_whole(await resume(client, request_id, said=copy_of(said)))
        assert len(worker.submissions) == 1


def copy_of(said: Said) -> Said:
    again = Said()
    for delta in said.deltas:
        again.started = said.started
        again.take(pb.GenerateResponse(delta=delta))
    return again


async def test_another_gateway_follows_while_the_owner_lives(redis_url: str, tmp_path: Path) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, (worker,)):
        said, call = Said(), one.generate(kept())
        await read_on(call, said, 3)
        assert said.started is not None
        other = await resume(two, said.started.request_id)
        assert_whole(other)
        while said.finished is None:
            said.take(await call.read())
        assert_whole(said)
        assert {sub.epoch for sub in worker.submissions} == {1}
        record = (await two.call("GetGeneration", pb.GetGenerationRequest(request_id=said.started.request_id))).record
        assert record.state == common_pb2.REQUEST_STATE_FINISHED
        assert record.usage.completion_tokens == sum(LENGTHS)


async def test_log_probabilities_ids_and_stops_survive_a_resume(redis_url: str, tmp_path: Path) -> None:
    asked = kept(return_token_ids=True, stop=["zz", "fox"], echo=True)
    asked.sampling.logprobs = 2
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, _):
        whole = await one.stream(asked)
        said = await cut_off(one, asked, 5)
        assert said.started is not None
        await resume(two, said.started.request_id, said=said)
        assert said.texts == whole.texts
        assert said.ids == whole.ids
        assert said.matched == whole.matched
        assert [entry for delta in said.deltas for entry in delta.logprobs if delta.choice == 1] == [
            entry for delta in whole.deltas for entry in delta.logprobs if delta.choice == 1
        ]


async def test_a_cursor_over_other_tokens_is_refused_with_the_choice_to_read_again(
    redis_url: str, tmp_path: Path
) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, _):
        said = await cut_off(one, kept(), 12)
        assert said.started is not None
        place = cursors.decode(last_cursor(said))
        first, second, third = place.places
        other = cursors.Place(second.tokens, second.chars, second.ended, b"x" * 8)
        for client in (one, two):
            with pytest.raises(TrunklineError) as caught:
                await resume(client, said.started.request_id, cursors.encode(place.request_id, [first, other, third]))
            assert caught.value.reason is Reason.RESUME_DIVERGED
            assert caught.value.metadata["choice"] == "1"
            with pytest.raises(TrunklineError) as caught:
                await resume(client, said.started.request_id, "AAAA")
            assert caught.value.reason is Reason.BAD_FIELD


async def test_another_tenants_generation_is_not_there(redis_url: str, tmp_path: Path) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, _):
        said = await cut_off(one, kept(), 2)
        assert said.started is not None
        for client in (one, two):
            stranger = Client(client.gateway, "k2")
            with pytest.raises(TrunklineError) as caught:
                await resume(stranger, said.started.request_id, last_cursor(said))
            assert caught.value.reason is Reason.REQUEST_UNKNOWN
            await stranger.channel.close()


async def test_an_ordinary_generation_cannot_be_resumed(redis_url: str, tmp_path: Path) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, _):
        said, call = Said(), one.generate(spec(PROMPT))
        await read_on(call, said, 2)
        assert said.started is not None
        for client in (one, two):
            with pytest.raises(TrunklineError) as caught:
                await resume(client, said.started.request_id, last_cursor(said))
            assert caught.value.reason is Reason.FEATURE_OFF
        call.cancel()


MANY = int(os.environ.get("TRUNKLINE_TEST_RESUMES", "150"))  # of the closing note: 1000


@pytest.mark.timeout(600)
async def test_many_disconnects_and_resumes_join_to_the_undisturbed_text(redis_url: str, tmp_path: Path) -> None:
    async with two_gateways(redis_url, tmp_path, lengths=LENGTHS, step_s=0.004) as (*gateways, _, (worker,)):
        room = asyncio.Semaphore(12)

        async def one(number: int) -> None:
            rng, prompt = random.Random(number), (number % 280, number // 280, 7)
            async with room:
                said = await cut_off(rng.choice(gateways), kept(prompt), rng.randint(1, 30))
                for _ in range(rng.randint(0, 2)):
                    said = await cut_again(rng.choice(gateways), said, rng.randint(1, 20))
                await come_back(rng.choice(gateways), said)
            assert said.texts == {choice: expected(prompt, choice, length) for choice, length in enumerate(LENGTHS)}

        async with asyncio.TaskGroup() as tasks:
            for number in range(MANY):
                tasks.create_task(one(number))
        assert len(worker.submissions) == MANY
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            await until(lambda: not held_by(store))


async def cut_again(client: Client, said: Said, more: int) -> Said:
    """Come back, read a little, and leave again."""
    assert said.started is not None
    call = resumed(client, said.started.request_id, last_cursor(said))
    said.started, wanted = None, len(said.deltas) + more
    while said.finished is None and len(said.deltas) < wanted:
        said.take(await call.read())
    call.cancel()
    said.finished = None
    return said


# --- ends -----------------------------------------------------------------------------------------------------------


async def test_when_nobody_comes_back_within_the_window_it_is_cancelled(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (10**6,) * 3, "step_s": 0.01}) as (client, _, (worker,)):
        said = await cut_off(client, kept(resume_window_ms=700), 3)
        await asyncio.sleep(0.3)
        assert not worker.cancels
        await until(lambda: worker.cancels and not client.gateway.core.table)
        assert said.started is not None
        with pytest.raises(TrunklineError) as caught:
            await resume(client, said.started.request_id, said=said)
        assert caught.value.reason is Reason.CLIENT_GONE
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            await until(lambda: not held_by(store))


async def test_a_follower_elsewhere_keeps_it_beyond_its_window(redis_url: str, tmp_path: Path) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, (worker,)):
        said = await cut_off(one, kept(resume_window_ms=400), 2)
        assert said.started is not None
        assert_whole(await resume(two, said.started.request_id, said=said))
        assert not worker.cancels


@pytest.mark.parametrize("by", [0, 1])
async def test_an_explicit_cancel_ends_it_through_any_gateway(redis_url: str, tmp_path: Path, by: int) -> None:
    async with two_gateways(redis_url, tmp_path, lengths=(10**6,) * 3) as (*clients, _, (worker,)):
        said = await cut_off(clients[0], kept(), 3)
        assert said.started is not None
        answer = await clients[by].call(
            "CancelGeneration", pb.CancelGenerationRequest(request_id=said.started.request_id)
        )
        assert (answer.confirmed, answer.state) == (True, common_pb2.REQUEST_STATE_CANCELLED)
        assert not worker.held
        with pytest.raises(TrunklineError) as caught:
            await resume(clients[1], said.started.request_id, said=said)
        assert caught.value.reason is Reason.CLIENT_CANCEL


async def test_a_failure_is_replayed_as_the_failure_it_was(redis_url: str, tmp_path: Path) -> None:
    async with two_gateways(redis_url, tmp_path, lengths=(10**6,) * 3) as (one, two, _, (worker,)):
        said, call = Said(), one.generate(kept())
        await read_on(call, said, 3)
        worker.fail(Reason.NAN_LOGITS, retryable=False)
        assert (await broken(call, said)).reason is Reason.NAN_LOGITS
        assert said.started is not None
        with pytest.raises(TrunklineError) as caught:
            await resume(two, said.started.request_id, said=said)
        assert caught.value.reason is Reason.NAN_LOGITS


# --- the owner dies -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_streams_of_a_killed_gateway_are_taken_over_with_identical_text(redis_url: str, tmp_path: Path) -> None:
    async with (
        fake_mesh(**LONG | {"lengths": (2, 20, 300)}) as ((router,), (worker,)),
        gateway_process(router, directory=tmp_path, store=redis_url, limits={"owner_gone_ms": 7000}) as doomed,
        serving(router, directory=tmp_path, store=redis_url, gateway_id="g2") as client,
    ):
        prompts = [(number, 6, 7) for number in range(8)]
        calls = [doomed.client.generate(kept(prompt)) for prompt in prompts]
        heard = [Said() for _ in prompts]
        await asyncio.gather(*(read_on(call, said, 6) for call, said in zip(calls, heard, strict=True)))
        await doomed.kill()
        for call, said in zip(calls, heard, strict=True):
            assert (await broken(call, said)).row.code is grpc.StatusCode.UNAVAILABLE
        ids = [said.started.request_id for said in heard if said.started is not None]
        pairs = zip(ids, heard, strict=True)
        await asyncio.gather(*(resume(client, request_id, said=said) for request_id, said in pairs))
        for prompt, said in zip(prompts, heard, strict=True):
            assert said.texts == {
                choice: expected(prompt, choice, length) for choice, length in enumerate((2, 20, 300))
            }
        taken = [request for request in router.requests if request.submission.epoch == 2]
        assert {bytes(request.submission.request_id).hex() for request in taken} == set(ids)
        assert all(list(request.preferred) == [worker.incarnation] for request in taken)
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            await until(lambda: not held_by(store))


@pytest.mark.timeout(120)
async def test_of_two_gateways_that_want_to_take_over_one_does_and_the_other_follows(
    redis_url: str, tmp_path: Path
) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG | {"lengths": (2, 20, 300)}) as (one, two, router, (worker,)):
        async with gateway_process(router, directory=tmp_path, store=redis_url) as doomed:
            said, call = Said(), doomed.client.generate(kept())
            await read_on(call, said, 6)
            await doomed.kill()
            await broken(call, said)
        assert said.started is not None
        heard = await asyncio.gather(
            *(resume(client, said.started.request_id, said=copy_of(said)) for client in (one, two, one, two))
        )
        whole = {choice: expected(PROMPT, choice, length) for choice, length in enumerate((2, 20, 300))}
        assert all(each.texts == whole for each in heard)
        assert [(sub.epoch, sub.attempt) for sub in worker.submissions] == [(1, 1), (2, 1)]


@pytest.mark.timeout(120)
async def test_a_frozen_gateway_that_wakes_after_the_take_over_tells_nothing_more(
    redis_url: str, tmp_path: Path
) -> None:
    async with (
        fake_mesh(**LONG | {"lengths": (2, 20, 500)}) as ((router,), (worker,)),
        gateway_process(router, directory=tmp_path, store=redis_url) as frozen,
        serving(router, directory=tmp_path, store=redis_url, gateway_id="g2") as client,
    ):
        said, call = Said(), frozen.client.generate(kept())
        await read_on(call, said, 6)
        frozen.signal(signal.SIGSTOP)
        assert said.started is not None
        other, going_on = copy_of(said), resumed(client, said.started.request_id, last_cursor(said))
        other.started = None
        await read_on(going_on, other, len(said.deltas) + 3)
        frozen.signal(signal.SIGCONT)
        error = await broken(call, said)
        assert error.reason is Reason.MOVED
        while other.finished is None:
            other.take(await going_on.read())
        whole = {choice: expected(PROMPT, choice, length) for choice, length in enumerate((2, 20, 500))}
        assert other.texts == whole
        assert all(whole[choice].startswith(text) for choice, text in said.texts.items())
        await resume(client, said.started.request_id, error.metadata["cursor"], said=said)
        assert said.texts == whole
        assert max((sub.epoch, sub.attempt) for sub in worker.submissions) == (2, 1)


@pytest.mark.timeout(120)
async def test_what_a_killed_gateway_leaves_is_swept_and_its_limits_given_back(redis_url: str, tmp_path: Path) -> None:
    async with (
        fake_mesh(lengths=(10**6,) * 3) as ((router,), _),
        gateway_process(router, directory=tmp_path, store=redis_url) as doomed,
        serving(router, directory=tmp_path, store=redis_url, gateway_id="g2", limits={"owner_gone_ms": 3000}) as client,
    ):
        ordinary, parked, given_up = Said(), Said(), Said()
        calls = [
            doomed.client.generate(each)
            for each in (spec(PROMPT), kept(), kept(resume_window_ms=1, idempotency_key="k"))
        ]
        for call, said in zip(calls, (ordinary, parked, given_up), strict=True):
            await read_on(call, said, 2)
        ids = [said.started.request_id for said in (ordinary, parked, given_up) if said.started is not None]
        await doomed.kill()

        async def state(request_id: str) -> tuple[int, str]:
            answer = await client.call("GetGeneration", pb.GetGenerationRequest(request_id=request_id))
            return answer.record.state, answer.record.reason

        async with asyncio.timeout(20):
            while {(await state(ids[0]))[0], (await state(ids[2]))[0]} != {common_pb2.REQUEST_STATE_FAILED}:  # noqa: ASYNC110 - the store tells
                await asyncio.sleep(0.2)
        assert await state(ids[0]) == await state(ids[2]) == (common_pb2.REQUEST_STATE_FAILED, "OWNER_LOST")
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            await until(lambda: held_by(store) == [f"l:{ids[1]}"])
            with pytest.raises(TrunklineError) as caught:
                await resume(client, ids[2], said=given_up)
            assert caught.value.reason is Reason.OWNER_LOST
            answer = await client.call("CancelGeneration", pb.CancelGenerationRequest(request_id=ids[1]))
            assert (answer.confirmed, answer.state) == (True, common_pb2.REQUEST_STATE_CANCELLED)
            await until(lambda: not held_by(store))
            await until(lambda: len(store.zrange(keys.owners(), 0, -1)) == 1, 10)


# --- the store ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [False, True])
async def test_without_the_store_streams_move_and_go_on_when_it_is_back(tmp_path: Path, empty: bool) -> None:
    (tmp_path / "data").mkdir()
    with Valkey(None if empty else tmp_path / "data") as valkey:
        async with world(valkey.url, tmp_path, fakes=LONG) as (client, _, (worker,)):
            said, ordinary = Said(), asyncio.create_task(client.stream(spec(PROMPT, n=3)))
            call = client.generate(kept())
            await read_on(call, said, 5)
            valkey.kill()
            error = await broken(call, said)
            assert error.reason is Reason.MOVED
            assert error.metadata["cursor"] == last_cursor(said)
            with pytest.raises(TrunklineError) as caught:
                await client.stream(kept())
            assert caught.value.reason is Reason.STATE_AWAY
            assert_whole(await ordinary)
            valkey.start()
            assert_whole(await come_back(client, said))
            assert len(worker.submissions) == 2


# --- idempotency keys -----------------------------------------------------------------------------------------------


async def test_duplicates_of_a_key_run_once_and_all_hear_the_same(redis_url: str, tmp_path: Path) -> None:
    async with two_gateways(redis_url, tmp_path, **LONG) as (one, two, _, (worker,)):
        asked = kept(idempotency_key="order 7", resume_window_ms=0)
        heard = await asyncio.gather(*(client.stream(asked) for client in (one, two) * 4))
        for said in (*heard, await two.stream(asked), await one.stream(asked)):
            assert_whole(said)
        assert len({said.started.request_id for said in heard if said.started is not None}) == 1
        assert len(worker.submissions) == 1
        for change in ({"n": 2}, {"prompt_token_ids": pb.TokenIds(ids=[9])}):
            other = pb.GenerationSpec()
            other.CopyFrom(asked)
            other.MergeFrom(pb.GenerationSpec(**change))
            with pytest.raises(TrunklineError) as caught:
                await two.stream(other)
            assert caught.value.reason is Reason.IDEMPOTENCY_CONFLICT
        stranger = Client(two.gateway, "k2")
        assert (await stranger.stream(asked)).texts == WHOLE
        await stranger.channel.close()
        assert len(worker.submissions) == 2
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            await until(lambda: not held_by(store) and not held_by(store, "b"))


async def test_a_key_whose_request_came_to_nothing_is_free_again(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes=LONG) as (client, (router,), _):
        refusal = TrunklineError(Reason.WOULD_MISS, "it would be late")
        router.before.append(fails_with(refusal))
        asked = kept(idempotency_key="again")
        with pytest.raises(TrunklineError) as caught:
            await client.stream(asked)
        assert caught.value.reason is Reason.WOULD_MISS
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            await until(lambda: not store.exists(keys.idem("a", "again")))
        assert_whole(await client.stream(asked))


@pytest.mark.timeout(120)
async def test_duplicates_while_their_gateway_is_killed_make_one_transcript(redis_url: str, tmp_path: Path) -> None:
    async with (
        fake_mesh(**LONG | {"lengths": (2, 20, 300)}) as ((router,), (worker,)),
        gateway_process(router, directory=tmp_path, store=redis_url) as doomed,
        serving(router, directory=tmp_path, store=redis_url, gateway_id="g2") as client,
    ):
        asked = kept(idempotency_key="once")
        said, call = Said(), doomed.client.generate(asked)
        await read_on(call, said, 6)
        following = [asyncio.create_task(client.stream(asked)) for _ in range(4)]
        await asyncio.sleep(0.2)
        await doomed.kill()
        await broken(call, said)
        whole = {choice: expected(PROMPT, choice, length) for choice, length in enumerate((2, 20, 300))}
        for task in following:
            assert (await task).texts == whole
        assert (await client.stream(asked)).texts == whole
        assert [(sub.epoch, sub.attempt) for sub in worker.submissions] == [(1, 1), (2, 1)]


@pytest.mark.timeout(600)
async def test_many_duplicate_keys_under_a_kill_make_one_transcript_each(redis_url: str, tmp_path: Path) -> None:
    async with (
        two_gateways(redis_url, tmp_path, lengths=LENGTHS, step_s=0.01) as (one, two, router, (worker,)),
        gateway_process(router, directory=tmp_path, store=redis_url) as doomed,
    ):
        room, begun = asyncio.Semaphore(24), asyncio.Event()
        gateways = (one, two, doomed.client)

        async def ask(number: int, first: int) -> str | None:
            prompt, said = (number % 280, number // 280, 9), Said()
            async with room:
                for turn in range(first, first + 20):
                    said = Said()
                    try:
                        client = gateways[turn % 3]
                        await client.stream(kept(prompt, idempotency_key=f"key {number}"), said)
                        break
                    except TrunklineError as error:
                        if not error.row.retryable:
                            raise
                        await asyncio.sleep(0.2)
            assert said.texts == {choice: expected(prompt, choice, length) for choice, length in enumerate(LENGTHS)}
            if number == MANY // 4:
                begun.set()
            return said.started.request_id if said.started is not None else None

        async def kill() -> None:
            await begun.wait()
            await doomed.kill()

        async with asyncio.TaskGroup() as tasks:
            asked = [[tasks.create_task(ask(number, number + turn)) for turn in range(3)] for number in range(MANY)]
            tasks.create_task(kill())
        assert all(len({task.result() for task in same}) == 1 for same in asked)
        by_prompt: dict[tuple[int, ...], set[bytes]] = {}
        for sub in worker.submissions:
            by_prompt.setdefault(tuple(sub.generate.prompt), set()).add(sub.request_id)
        assert len(by_prompt) == MANY
        assert all(len(ids) == 1 for ids in by_prompt.values())
        assert any(sub.epoch == 2 for sub in worker.submissions), "the kill hit nothing"
