"""A worker as a process: how it starts, what it shows, how it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import trace

from shared import keys
from shared.errors import Reason, from_rpc
from shared.ids import Identity, incarnation_text
from shared.rpc import Channels
from tests.fakes.artefact import write_artefact
from tests.fakes.door_world import request_id
from tests.fakes.owner import submission
from tests.fakes.remote_owner import RemoteOwner
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

ROOT = Path(__file__).parent.parent.parent
ONE = request_id(1)
TRACE, SPAN = "ab" * 16, "cd" * 8


class Process:
    """`python -m workers --config FILE`, with the engine that has no model."""

    def __init__(self, tmp_path: Path, name: str = "w1", **settings: Any) -> None:
        flags = {"step-ms": 2, **settings.pop("flags", {})}
        self.config = {
            "id": name,
            "model": {"path": str(tmp_path / "artefact"), "name": "nothing", "version": "v1"},
            "engine": {"module": "tests.fakes.engine", "flags": flags, **settings.pop("engine", {})},
            "drain_settle_ms": 0,
            **settings,
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(self.config))
        command = [sys.executable, "-m", "workers", "--config", str(path)]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def ready(self) -> dict[str, str]:
        """The line that says that it takes work."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            said = json.loads(line)
            if said["event"] == "ready":
                return dict(said)
        raise AssertionError("it ended before it was ready")

    def end(self) -> tuple[int, str]:
        """Waits for its end: exit code and the rest of what it said."""
        _, said = self.process.communicate(timeout=15)
        return self.process.returncode, said

    @property
    def engine(self) -> int:
        """Pid of the engine."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(path.read_text().split()[0])


@contextmanager
def worker(tmp_path: Path, name: str = "w1", **settings: Any) -> Iterator[Process]:
    if not (tmp_path / "artefact").exists():
        write_artefact(tmp_path / "artefact")
    process = Process(tmp_path, name, **settings)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate()


@asynccontextmanager
async def channels() -> AsyncIterator[Channels]:
    made = Channels(Identity("gateway", "g7", 7), trace.NoOpTracer())
    try:
        yield made
    finally:
        await made.close()


def sub(tmp_path: Path, number: int = 1, **fields: Any) -> worker_pb2.Submission:
    manifest = json.loads((tmp_path / "artefact" / "manifest.json").read_bytes())
    hashes = {"artefact_hash": manifest["artefact_hash"], "tokenizer_hash": manifest["tokenizer_hash"]}
    return submission(request_id(number), **hashes, **fields)


async def submit(made: Channels, address: str, item: worker_pb2.Submission) -> worker_pb2.ItemResult:
    stub = worker_pb2_grpc.WorkerServiceStub(made.get(address, "router"))
    batch = worker_pb2.SubmitBatchRequest(router_id="r", router_incarnation=3, batch_seq=1, items=[item])
    return (await stub.SubmitBatch(batch)).results[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": {"module": "tests.fakes.nowhere"}}, "the engine ended with status 1"),
        ({"engine": {"treads": 2}}, "unknown key `engine.treads`; did you mean `threads`?"),
    ],
)
def test_what_keeps_a_worker_from_starting_is_said_in_one_sentence(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with worker(tmp_path, **settings) as process:
        code, text = process.end()
        assert code == 1
        assert said in text.splitlines()[-1]


def test_an_engine_that_lacks_memory_keeps_a_worker_from_starting_and_says_how_much(tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("3,100 MiB are needed for weights and cache, 900 MiB are there")
    with worker(tmp_path, flags={"fault-if": str(tmp_path / "fault")}) as process:
        code, text = process.end()
        assert (code, text.splitlines()[-1]) == (1, (tmp_path / "fault").read_text())


def test_an_altered_tokenizer_keeps_a_worker_from_starting(tmp_path: Path) -> None:
    write_artefact(tmp_path / "artefact")
    path = tmp_path / "artefact" / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"words", b"w0rds", 1))
    with worker(tmp_path) as process:
        code, text = process.end()
        assert code == 1
        assert "tokenizer.json: altered" in text


def test_a_taken_port_is_named_with_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with worker(tmp_path, grpc_listen=f"127.0.0.1:{port}") as process:
            code, text = process.end()
            assert code == 1
            assert f"port {port} is taken by process {os.getpid()}" in text


def test_the_engine_does_not_outlive_a_killed_door(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        process.ready()
        engine = process.engine
        os.kill(engine, signal.SIGSTOP)  # it could not see its mailbox close
        process.process.kill()
        process.process.wait()
        for _ in range(100):
            if not Path(f"/proc/{engine}").exists():
                return
            asyncio.run(asyncio.sleep(0.02))
        state = Path(f"/proc/{engine}/stat").read_text().split()[2]
        assert state == "Z"


async def test_a_drain_finishes_what_runs_refuses_what_is_new_and_ends_with_zero(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        ready = process.ready()
        async with channels() as made:
            owner = RemoteOwner(made, ready["grpc"])
            item = sub(tmp_path, max_tokens=300)
            owner.expect(item)
            await owner.connect()
            assert (await submit(made, ready["grpc"], item)).HasField("admitted")
            await owner.until(lambda: owner.books[ONE].choices[0])
            process.process.send_signal(signal.SIGTERM)
            while True:
                answer = await submit(made, ready["grpc"], sub(tmp_path, 2))
                if answer.HasField("rejected"):
                    break
            assert answer.rejected.draining
            await owner.finished()
            assert owner.books[ONE].ending == "finished"
            assert len(owner.books[ONE].choices[0]) == 300
            code, _ = await asyncio.to_thread(process.end)
            assert code == 0
            assert owner.error is not None
            assert from_rpc(owner.error).reason is Reason.DRAINING
            await owner.lose()


async def test_a_worker_told_to_end_serves_a_moment_longer_and_hands_back_what_another_can_go_on_with(
    tmp_path: Path, redis_url: str
) -> None:
    settings = {"redis_url": redis_url, "drain_settle_ms": 500}
    with worker(tmp_path, "w1", **settings) as one, worker(tmp_path, "w2", **settings) as two:
        said, _ = [await asyncio.to_thread(process.ready) for process in (one, two)]
        async with channels() as made:
            owner = RemoteOwner(made, said["grpc"])
            items = [sub(tmp_path, number, max_tokens=2000) for number in (1, 2)]
            for item in items:
                owner.expect(item)
            await owner.connect()
            await submit(made, said["grpc"], items[0])
            watch = worker_pb2_grpc.WorkerServiceStub(made.get(said["grpc"], "watch")).Watch(
                worker_pb2.WatchRequest(router_id="r", router_incarnation=3, protocol_major=1)
            )
            assert not (await watch.read()).draining
            one.process.send_signal(signal.SIGTERM)
            while not (await watch.read()).draining:
                pass
            assert (await submit(made, said["grpc"], items[1])).HasField("admitted"), "from who has not heard of it"
            await owner.until(lambda: owner.books[ONE].ending and owner.books[request_id(2)].ending)
            assert {owner.books[request_id(number)].ending for number in (1, 2)} == {"released"}
            code, _ = await asyncio.to_thread(one.end)
            assert code == 0
            watch.cancel()
            await owner.lose()


async def test_of_two_workers_that_drain_together_neither_counts_on_the_other(tmp_path: Path, redis_url: str) -> None:
    settings = {"redis_url": redis_url, "drain_settle_ms": 500}
    with worker(tmp_path, "w1", **settings) as one, worker(tmp_path, "w2", **settings) as two:
        ready = [await asyncio.to_thread(process.ready) for process in (one, two)]
        async with channels() as made:
            owners = [RemoteOwner(made, said["grpc"]) for said in ready]
            for owner, said in zip(owners, ready, strict=True):
                item = sub(tmp_path, max_tokens=600)
                owner.expect(item)
                await owner.connect()
                await submit(made, said["grpc"], item)
            for process in (one, two):
                process.process.send_signal(signal.SIGTERM)
            for owner in owners:
                await owner.finished()
                assert owner.books[ONE].ending == "finished"
                await owner.lose()
            assert [(await asyncio.to_thread(process.end))[0] for process in (one, two)] == [0, 0]


async def test_an_older_minor_offers_what_it_had_and_refuses_what_is_new(tmp_path: Path) -> None:
    with worker(tmp_path, protocol_minor=0) as process:
        ready = await asyncio.to_thread(process.ready)
        async with channels() as made:
            owner = RemoteOwner(made, ready["grpc"])
            item = sub(tmp_path, max_tokens=3, features=["generate"])
            owner.expect(item)
            await owner.connect()
            assert (await submit(made, ready["grpc"], item)).HasField("admitted")
            await owner.finished()
            newer = sub(tmp_path, 2, features=["generate", "logprobs"])
            refused = (await submit(made, ready["grpc"], newer)).mismatch
            assert (refused.what, refused.message) == (
                worker_pb2.Mismatch.WHAT_FEATURE, "not served here: logprobs",
            )  # fmt: skip
            described = await worker_pb2_grpc.WorkerServiceStub(made.get(ready["grpc"])).Describe(
                worker_pb2.DescribeRequest()
            )
            assert (described.protocol_major, described.protocol_minor) == (1, 0)
            assert list(described.features) == ["encode", "generate"]
            assert list(described.versions[0].features) == ["encode", "generate"]
            await owner.lose()


async def test_a_drain_with_release_hands_back_what_runs_unless_it_is_the_last_replica(
    tmp_path: Path, redis_url: str
) -> None:
    with worker(tmp_path, "w1", redis_url=redis_url) as one, worker(tmp_path, "w2", redis_url=redis_url) as two:
        ready = [await asyncio.to_thread(process.ready) for process in (one, two)]
        async with channels() as made:
            for process, said, ending in zip((one, two), ready, ("released", "finished"), strict=True):
                owner = RemoteOwner(made, said["grpc"])
                item = sub(tmp_path, max_tokens=400)
                owner.expect(item)
                await owner.connect()
                await submit(made, said["grpc"], item)
                await owner.until(lambda owner=owner: owner.books[ONE].choices[0])
                stub = worker_pb2_grpc.WorkerServiceStub(made.get(said["grpc"], "router"))
                await stub.Drain(worker_pb2.DrainRequest(release=True))
                await owner.finished()
                assert owner.books[ONE].ending == ending
                code, _ = await asyncio.to_thread(process.end)
                assert code == 0
                await owner.lose()


async def test_health_metrics_status_and_registration_tell_the_same_story(tmp_path: Path, redis_url: str) -> None:
    with worker(tmp_path, redis_url=redis_url, engine={"kv_blocks": 100}) as process:
        ready = process.ready()
        async with channels() as made:
            health = health_pb2_grpc.HealthStub(made.get(ready["grpc"]))
            for name in ("", "trunkline.worker.v1.WorkerService", "model/nothing"):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = worker_pb2_grpc.WorkerServiceStub(made.get(ready["grpc"]))
            described = await stub.Describe(worker_pb2.DescribeRequest())
            admin = admin_pb2_grpc.AdminServiceStub(made.get(ready["admin"]))
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{ready['http']}/metrics").read().decode()
        )
        assert 'vllm:num_requests_waiting{engine="0",model_name="nothing"} 0.0' in text
        assert 'vllm:kv_cache_usage_perc{engine="0",model_name="nothing"} 0.0' in text
        assert "trunkline_worker_kv_tokens_total 1600.0" in text
        incarnation = incarnation_text(described.incarnation)
        assert (status.role, status.incarnation, status.ready) == ("worker", incarnation, True)
        with redis.Redis.from_url(redis_url, decode_responses=True) as store:
            for _ in range(50):
                peer = store.hgetall(keys.peer("worker", "w1"))
                if peer:
                    break
                await asyncio.sleep(0.05)
            assert (peer["address"], peer["incarnation"], peer["model"]) == (ready["grpc"], incarnation, "nothing")
            os.kill(process.engine, signal.SIGKILL)
            for _ in range(100):
                peer = store.hgetall(keys.peer("worker", "w1"))
                if peer["incarnation"] not in (incarnation, incarnation_text(0)):
                    break
                await asyncio.sleep(0.05)
            assert peer["incarnation"] not in (incarnation, incarnation_text(0))


async def test_a_traced_request_leaves_its_stages_and_some_engine_steps_in_its_trace(
    tmp_path: Path, redis_url: str
) -> None:
    with worker(tmp_path, redis_url=redis_url, tracing={"redis_spans": True}) as process:
        ready = process.ready()
        async with channels() as made:
            owner = RemoteOwner(made, ready["grpc"])
            item = sub(tmp_path, max_tokens=10, traceparent=f"00-{TRACE}-{SPAN}-01")
            owner.expect(item)
            await owner.connect()
            await submit(made, ready["grpc"], item)
            await owner.finished()
            await owner.lose()
        with redis.Redis.from_url(redis_url) as store:
            for _ in range(100):
                spans = [json.loads(row) for row in store.lrange(keys.trace(TRACE), 0, -1)]
                if len(spans) >= 7:
                    break
                await asyncio.sleep(0.05)
        by_name = {span["name"]: span for span in spans}
        stages = [by_name[f"worker.{stage}"] for stage in ("queue", "prefill", "decode")]
        assert {span["parent_id"] for span in spans} == {SPAN}
        for before, after in itertools.pairwise(stages):
            assert before["end_us"] == after["start_us"]
        assert stages[-1]["attrs"]["trunkline.outcome"] == "finished"
        steps = [span for span in spans if span["name"] == "engine.step"]
        assert len(steps) == 4
        assert all(span["links"] == [f"{TRACE}:{SPAN}"] for span in steps)


async def test_a_port_of_ours_speaks_reflection(tmp_path: Path) -> None:
    with worker(tmp_path) as process:
        ready = process.ready()
        async with grpc.aio.insecure_channel(ready["grpc"]) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            answer = await call.read()
            names = [service.name for service in answer.list_services_response.service]
            assert "trunkline.worker.v1.WorkerService" in names
            call.cancel()
