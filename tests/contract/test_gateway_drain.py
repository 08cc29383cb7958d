"""A gateway that drains: it says so, serves a moment longer, sends what can move to others, and ends with the rest."""

from __future__ import annotations

import asyncio
import http.client
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.app import _finish
from shared.errors import Reason, TrunklineError
from tests.fakes.gateway_client import Client, Said, expected, first_token, rest, serving, spec, until, world
from tests.fakes.mesh import FakeRouter, MeshWorker, fake_mesh
from tests.fakes.resuming import Process, broken, come_back, gateway_process, read_on, resumed
from tests.fakes.valkey import Valkey
from trunkline.inference.v1 import inference_pb2 as pb

PROMPT = (5, 6, 7)
LENGTHS = (2, 20, 60)
WHOLE = {choice: expected(PROMPT, choice, length) for choice, length in enumerate(LENGTHS)}
SLOW = {"lengths": LENGTHS, "step_s": 0.04}
SETTLE_MS = 400


def asked(**fields: Any) -> pb.GenerationSpec:
    return spec(PROMPT, n=3, **fields)


@asynccontextmanager
async def one_to_drain(
    store: str, directory: Path, **settings: Any
) -> AsyncIterator[tuple[Process, Client, FakeRouter, MeshWorker]]:
    """A gateway in a process of its own, and another one beside it."""
    (directory / "b").mkdir()
    async with (
        fake_mesh(**SLOW) as ((router,), (worker,)),
        gateway_process(
            router, directory=directory, store=store, **{"drain_settle_ms": SETTLE_MS, **settings}
        ) as process,
        serving(router, directory=directory / "b", store=store, gateway_id="g2") as other,
    ):
        yield process, other, router, worker


def ready(process: Process) -> tuple[int, str | None]:
    """Status and what becomes of the connection."""
    with closing(http.client.HTTPConnection(process.client.http, timeout=5)) as connection:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        return answer.status, answer.headers["connection"]


async def test_what_can_move_moves_at_once_and_the_rest_comes_to_its_end(redis_url: str, tmp_path: Path) -> None:
    async with one_to_drain(redis_url, tmp_path) as (process, other, _, worker):
        one, loop = process.client, asyncio.get_running_loop()
        ordinary = one.generate(asked())
        told = await first_token(ordinary)
        said, call = Said(), one.generate(asked(resume_window_ms=60_000))
        await read_on(call, said, 3)
        whole = asyncio.create_task(one.call("Complete", pb.CompleteRequest(spec=asked(resume_window_ms=60_000))))
        await until(lambda: len(worker.submissions) == 3)
        process.signal(signal.SIGTERM)
        error = await broken(call, said)
        assert error.reason is Reason.MOVED
        assert error.metadata["cursor"] == said.deltas[-1].cursor
        moved_at = loop.time()
        resumption = resumed(other, error.metadata["request_id"], error.metadata["cursor"])
        said.started = None
        said.take(await resumption.read())
        said.take(await resumption.read())
        assert loop.time() - moved_at < 2.0, "its lease was not let go"
        await rest(resumption, said)
        await rest(ordinary, told)
        assert told.texts == said.texts == WHOLE
        assert {choice.index: choice.text for choice in (await whole).choices} == WHOLE
        async with asyncio.timeout(10):
            assert await process.process.wait() == 0
        moved = bytes.fromhex(error.metadata["request_id"])
        assert {sub.epoch for sub in worker.submissions if sub.request_id == moved} == {1, 2}
        assert {sub.epoch for sub in worker.submissions if sub.request_id != moved} == {1}


async def test_readiness_goes_first_then_what_is_new_is_refused_while_what_runs_goes_on(
    redis_url: str, tmp_path: Path
) -> None:
    async with one_to_drain(redis_url, tmp_path) as (process, _, _, _):
        one = process.client
        health = health_pb2_grpc.HealthStub(one.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await asyncio.to_thread(ready, process) == (200, None)
        call = one.generate(asked())
        told = await first_token(call)
        process.signal(signal.SIGTERM)
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await asyncio.to_thread(ready, process) == (503, "close")
        late = await one.stream(spec(PROMPT, max_tokens=1))  # by a client that has not noticed
        assert late.texts == {0: expected(PROMPT, 0, 1)}
        await asyncio.sleep(SETTLE_MS / 1000)
        with pytest.raises(TrunklineError) as refused:
            await one.stream(spec(PROMPT))
        assert refused.value.row.code is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(ready, process) == (503, "close")
        await rest(call, told)
        assert told.texts == WHOLE
        health.cancel()


async def test_who_reads_here_what_another_gateway_owns_is_sent_there(redis_url: str, tmp_path: Path) -> None:
    async with one_to_drain(redis_url, tmp_path) as (process, other, _, worker):
        owned, call = Said(), other.generate(asked(resume_window_ms=60_000))
        await read_on(call, owned, 2)
        assert owned.started is not None
        said, following = Said(), resumed(process.client, owned.started.request_id, "")
        await read_on(following, said, 3)
        process.signal(signal.SIGTERM)
        assert (await broken(following, said)).reason is Reason.MOVED
        await come_back(other, said)
        await rest(call, owned)
        assert said.texts == owned.texts == WHOLE
        assert {sub.epoch for sub in worker.submissions} == {1}
        async with asyncio.timeout(10):
            assert await process.process.wait() == 0


async def test_what_the_grace_is_too_short_for_is_cancelled_or_left_to_others(redis_url: str, tmp_path: Path) -> None:
    async with one_to_drain(redis_url, tmp_path, drain_settle_ms=0, drain_grace_ms=300) as (process, other, _, worker):
        one = process.client
        call = one.generate(asked())
        told = await first_token(call)
        unread = Said()
        left = one.generate(asked(resume_window_ms=60_000))
        await read_on(left, unread, 2)
        left.cancel()  # nobody reads it: it goes on here as long as it can
        process.signal(signal.SIGTERM)
        assert (await broken(call, told)).reason is Reason.DRAINING
        async with asyncio.timeout(10):
            assert await process.process.wait() == 0
        await come_back(other, unread)
        assert unread.texts == WHOLE
        await until(lambda: not worker.held)


async def test_a_gateway_that_no_other_stays_beside_finishes_what_could_move(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    async with fake_mesh(**SLOW) as ((router,), (worker,)):
        settings = {"store": redis_url, "drain_settle_ms": 1500}  # so that each sees the other's mark
        async with (
            gateway_process(router, directory=tmp_path, gateway_id="g1", **settings) as one,
            gateway_process(router, directory=tmp_path / "b", gateway_id="g2", **settings) as two,
        ):
            for process in (one, two):
                process.signal(signal.SIGTERM)
            calls = [process.client.generate(asked(resume_window_ms=60_000)) for process in (one, two)]
            for call in calls:
                said = await first_token(call)
                await rest(call, said)
                assert said.texts == WHOLE
        assert {sub.epoch for sub in worker.submissions} == {1}


async def test_a_second_signal_ends_it_at_once(redis_url: str, tmp_path: Path) -> None:
    async with one_to_drain(redis_url, tmp_path) as (process, _, _, _):
        call = process.client.generate(asked())
        await first_token(call)
        process.signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        process.signal(signal.SIGTERM)
        async with asyncio.timeout(1):
            assert await process.process.wait() == -signal.SIGTERM
        call.cancel()


async def test_a_request_that_is_being_admitted_when_the_drain_looks_is_waited_for(
    valkey: Valkey, tmp_path: Path
) -> None:
    async with world(valkey.url, tmp_path, fakes=SLOW) as (client, _, _):
        valkey.pause()
        call = client.generate(asked())
        await until(lambda: client.gateway.core.table.busy)
        assert not len(client.gateway.core.table)
        finishing = asyncio.create_task(_finish(client.gateway.core, 10.0))
        await asyncio.sleep(0.1)
        assert not finishing.done()
        valkey.resume()
        told = await first_token(call)
        assert not finishing.done()
        await rest(call, told)
        assert told.texts == WHOLE
        await finishing
