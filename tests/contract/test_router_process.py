"""`python -m router` as a process: it starts, serves, says what is wrong, and drains on a signal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from shared.lifecycle import listen
from shared.ports import address_of
from tests.fakes.worker import FakeWorker
from trunkline.router.v1 import router_pb2, router_pb2_grpc
from trunkline.worker.v1 import worker_pb2

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def process(config: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--config", str(config), stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def said(running: asyncio.subprocess.Process, event: str) -> dict[str, Any]:
    """The first log line with this event."""
    assert running.stderr is not None
    async with asyncio.timeout(20):
        async for line in running.stderr:
            entry = json.loads(line)
            if entry["event"] == event:
                return dict(entry)
    pytest.fail(f"the router ended without saying `{event}`")


def get(url: str) -> str:
    with urlopen(url, timeout=5) as response:
        return str(response.read().decode())


async def test_a_router_starts_serves_and_ends_its_queue_before_it_exits(tmp_path: Path, redis_url: str) -> None:
    config = tmp_path / "router.yaml"
    async with FakeWorker(max_requests=1) as worker:
        config.write_text(f"id: r1\nredis_url: {redis_url}\nworkers: ['{worker.address}']\n")
        async with process(config) as running:
            ready = await said(running, "ready")
            async with grpc.aio.insecure_channel(ready["grpc"]) as channel:
                stub = router_pb2_grpc.RouterServiceStub(channel)
                asks = [submission(number) for number in (1, 2)]
                assert (await stub.Submit(asks[0])).worker_id == "w1"
                queued = stub.Submit(asks[1])
                lookup = router_pb2.LookupRequest(request_id=asks[1].submission.request_id)
                while not (await stub.Lookup(lookup)).queued:  # noqa: ASYNC110 - another process knows
                    await asyncio.sleep(0.01)
                metrics = await asyncio.to_thread(get, f"http://{ready['http']}/metrics")
                assert "trunkline_router_queue_length 1.0" in metrics
                assert 'trunkline_router_workers{state="ready"} 1.0' in metrics
                assert json.loads(await asyncio.to_thread(get, f"http://{ready['http']}/ready"))["ready"]
                running.send_signal(signal.SIGTERM)
                await said(running, "draining")
                worker.finish()
                assert (await queued).worker_id == "w1"
            async with asyncio.timeout(10):
                assert await running.wait() == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("id: r1\nqueue: {capasity: 3}\n", "unknown key `queue.capasity`; did you mean `capacity`?"),
        ("{}\n", "missing required field `id`"),
        ("id: r1\ngrpc_listen: nowhere\n", "`nowhere` is not an address"),
    ],
)
async def test_a_router_that_cannot_start_says_why_in_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    config = tmp_path / "router.yaml"
    config.write_text(text)
    async with process(config) as running:
        _, stderr = await running.communicate()
        lines = stderr.decode().strip().splitlines()
        assert (running.returncode, len(lines)) == (1, 1)
        assert sentence in lines[0]


async def test_a_taken_port_is_named_with_its_owner(tmp_path: Path) -> None:
    with listen("127.0.0.1:0") as taken:
        config = tmp_path / "router.yaml"
        config.write_text(f"id: r1\ngrpc_listen: {address_of(taken)}\n")
        async with process(config) as running:
            _, stderr = await running.communicate()
            (line,) = stderr.decode().strip().splitlines()
            assert running.returncode == 1
            assert f"port {taken.getsockname()[1]} is taken by process" in line


def submission(number: int) -> router_pb2.SubmitRequest:
    return router_pb2.SubmitRequest(
        submission=worker_pb2.Submission(
            request_id=number.to_bytes(16, "big"),
            epoch=1,
            attempt=1,
            gateway_id="g1",
            gateway_incarnation=9,
            generate=worker_pb2.GenerateWork(prompt=[1], choices=[worker_pb2.ChoiceProgress()], max_tokens=1),
            artefact_hash="artefact",
            tokenizer_hash="tok",
            budget_ms=20_000,
        ),
        tenant="t",
        model="m",
        kv_tokens=2,
        prefill_tokens=1,
    )
