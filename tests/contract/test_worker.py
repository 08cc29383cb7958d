"""A worker as routers and gateways meet it: real gRPC on loopback, a real engine process behind it, without a model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from prometheus_client import CollectorRegistry

from shared.config import build
from shared.errors import Reason, from_rpc
from shared.ids import Identity
from shared.rpc import Channels
from tests.fakes.artefact import write_artefact
from tests.fakes.door_world import expected, expected_bytes, request_id
from tests.fakes.engine import Shape
from tests.fakes.owner import encode_submission, submission
from tests.fakes.remote_owner import RemoteOwner
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc
from workers.app import Running, running
from workers.config import WorkerConfig
from workers.weights.manifest import Manifest

ONE, TWO, THREE = (request_id(number) for number in (1, 2, 3))
SHAPE = Shape(vocab_size=1000, max_context=4096, hidden_size=64)


@dataclass
class Bench:
    """A running worker and the means to speak to it."""

    run: Running
    manifest: Manifest
    channels: Channels
    stub: worker_pb2_grpc.WorkerServiceAsyncStub
    batches: int = 0

    def owner(self, incarnation: int = 7, lane: worker_pb2.Lane = worker_pb2.LANE_TOKENS) -> RemoteOwner:
        return RemoteOwner(self.channels, self.run.grpc, incarnation, lane)

    def sub(self, request: bytes, *args: Any, **fields: Any) -> worker_pb2.Submission:
        return submission(request, *args, **self._hashes, **fields)

    def encode(self, request: bytes, **fields: Any) -> worker_pb2.Submission:
        return encode_submission(request, **self._hashes, **fields)

    async def submit(self, *items: worker_pb2.Submission) -> list[worker_pb2.ItemResult]:
        self.batches += 1
        batch = worker_pb2.SubmitBatchRequest(router_id="r", router_incarnation=3, batch_seq=self.batches, items=items)
        return list((await self.stub.SubmitBatch(batch)).results)

    @property
    def _hashes(self) -> dict[str, str]:
        return {"artefact_hash": self.manifest.artefact_hash, "tokenizer_hash": self.manifest.tokenizer_hash}

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        return next(int(pid) for pid in children if b"tests.fakes.engine" in Path(f"/proc/{pid}/cmdline").read_bytes())


async def until(what: Callable[[], object], most_s: float = 10.0) -> None:
    async with asyncio.timeout(most_s):
        while True:
            if what():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(tmp_path: Path, **settings: Any) -> AsyncIterator[Bench]:
    manifest = write_artefact(tmp_path / "artefact")
    flags = {"step-ms": 2, **settings.pop("flags", {})}
    given = {
        "id": "w1",
        "model": {"path": str(tmp_path / "artefact"), "name": "nothing", "version": "v1"},
        "engine": {"module": "tests.fakes.engine", "flags": flags, "kv_blocks": 2048, **settings.pop("engine", {})},
        "drain_settle_ms": 0,
        "drain_grace_ms": 200,
        **settings,
    }
    config = build(given, WorkerConfig, source="test")
    channels = Channels(Identity("gateway", "g7", 7), trace.NoOpTracer())
    try:
        async with running(config, registry=CollectorRegistry()) as run:
            await until(lambda: run.lifecycle.ready)
            stub = worker_pb2_grpc.WorkerServiceStub(channels.get(run.grpc, "router"))
            yield Bench(run, manifest, channels, stub)  # type: ignore[arg-type]
    finally:
        await channels.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with serving(tmp_path) as bench:
        yield bench


def check(owner: RemoteOwner, *subs: worker_pb2.Submission) -> None:
    """Every transcript is what the formula says."""
    for sub in subs:
        book = owner.books[sub.request_id]
        assert book.ending == "finished", book.event
        assert book.choices == expected(sub, SHAPE)


async def test_hello_comes_first_then_opened_then_tokens_then_the_end(bench: Bench) -> None:
    owner = bench.owner()
    await owner.connect()
    subs = [bench.sub(request_id(n), emitted=[(), ()], max_tokens=20, prompt=[n + 1] * 30) for n in range(5)]
    for sub in subs:
        owner.expect(sub)
    results = await bench.submit(*subs)
    assert all(result.HasField("admitted") for result in results)
    await owner.finished()
    check(owner, *subs)
    assert owner.worker is not None
    assert owner.worker.incarnation == bench.run.door.incarnation
    assert owner.worker.id == "w1"
    await until(lambda: bench.run.door.held == 0)
    await owner.lose()


async def test_a_stream_opened_after_the_admission_gets_everything(bench: Bench) -> None:
    owner, sub = bench.owner(), bench.sub(ONE, max_tokens=10)
    owner.expect(sub)
    await bench.submit(sub)
    await asyncio.sleep(0.1)
    await owner.connect()
    await owner.finished()
    check(owner, sub)
    await owner.lose()


async def test_a_stream_that_breaks_after_any_message_loses_and_doubles_nothing(bench: Bench) -> None:
    owner = bench.owner()
    subs = [bench.sub(request_id(n), max_tokens=40, prompt=[n + 1] * 9, emitted=[(), ()]) for n in range(3)]
    for sub in subs:
        owner.expect(sub)
    await bench.submit(*subs)
    after = 0
    while any(not book.ending for book in owner.books.values()):
        after += 1
        owner.acknowledges = after % 3 != 0
        await owner.connect(after=after % 5 + 1)
        await owner.until(lambda: owner.broken)
    check(owner, *subs)
    assert after > 5
    owner.acknowledges = True
    await owner.connect()
    await until(lambda: bench.run.door.held == 0)
    await owner.lose()


async def test_a_higher_generation_takes_the_place_and_an_older_one_is_refused(bench: Bench) -> None:
    first, second = bench.owner(), bench.owner()
    sub = bench.sub(ONE, max_tokens=300)
    first.expect(sub)
    await first.connect()
    await bench.submit(sub)
    await first.until(lambda: first.books[ONE].choices[0])
    second.books, second.generation = first.books, 5
    await second.connect()
    await first.until(lambda: first.broken)
    assert first.error is not None
    assert from_rpc(first.error).reason is Reason.OWNER_MOVED
    first.generation = 1
    await first.connect()
    await first.until(lambda: first.broken)
    assert first.error is not None
    assert from_rpc(first.error).reason is Reason.OWNER_MOVED
    await second.finished()
    check(second, sub)
    await second.lose()


async def test_the_next_epoch_on_another_gateway_adopts_and_the_first_owner_is_fenced_out(bench: Bench) -> None:
    old, new = bench.owner(7), bench.owner(8)
    first = bench.sub(ONE, max_tokens=200)
    old.expect(first)
    await old.connect()
    await bench.submit(first)
    await old.until(lambda: len(old.books[ONE].choices[0]) > 5)
    second = bench.sub(ONE, (2, 1), gateway=8, max_tokens=200, emitted=[old.books[ONE].choices[0][:3]])
    new.expect(second)
    await new.connect()
    (result,) = await bench.submit(second)
    assert result.admitted.adopted
    await old.finished()
    await new.finished()
    assert old.books[ONE].ending == "fenced"
    check(new, second)
    (late,) = await bench.submit(first)
    assert late.HasField("fenced")
    await old.lose()
    await new.lose()


async def test_a_cancel_frees_within_the_next_step_and_leaves_a_tombstone(bench: Bench) -> None:
    owner, sub = bench.owner(), bench.sub(ONE, max_tokens=3000)
    owner.expect(sub)
    await owner.connect()
    await bench.submit(sub)
    await owner.until(lambda: owner.books[ONE].choices[0])
    owner.cancel(ONE, (1, 1))
    await owner.until(lambda: owner.books[ONE].freed)
    assert (await bench.submit(sub))[0].HasField("fenced")
    answer = await bench.stub.Cancel(worker_pb2.CancelRequest(request_id=TWO, epoch=1, attempt=4))
    assert not answer.known
    assert (await bench.submit(bench.sub(TWO, (1, 4))))[0].HasField("fenced")
    await until(lambda: bench.run.door.loads.current().kv_tokens_free == 2048 * 16)
    await owner.lose()


async def test_a_stop_ends_one_choice_and_the_others_go_on(bench: Bench) -> None:
    owner, sub = bench.owner(), bench.sub(ONE, max_tokens=60, emitted=[(), ()])
    book = owner.expect(sub)
    await owner.connect()
    await bench.submit(sub)
    await owner.until(lambda: len(book.choices[0]) >= 5)
    book.stop(0, 4)
    owner.stop(ONE, (1, 1), 0, 4)
    await owner.finished()
    full = expected(sub, SHAPE)
    assert book.choices == [full[0][:4], full[1]]
    await owner.lose()


async def test_without_a_stream_a_request_is_dropped_after_the_grace(tmp_path: Path) -> None:
    async with serving(tmp_path, door={"orphan_grace_ms": 300}) as bench:
        owner, sub = bench.owner(), bench.sub(ONE, max_tokens=4000)
        owner.expect(sub)
        await owner.connect()
        await bench.submit(sub)
        await owner.until(lambda: owner.books[ONE].choices[0])
        await owner.lose()
        await until(lambda: bench.run.door.held == 0, 2.0)
        await until(lambda: bench.run.door.loads.current().running == 0, 2.0)
        await owner.connect()
        await owner.finished()
        assert owner.books[ONE].ending == "released"
        await owner.lose()


async def test_a_killed_engine_releases_its_requests_and_the_next_one_is_another_incarnation(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        owner = bench.owner()
        subs = [bench.sub(request_id(n), max_tokens=3000, prompt=[n + 1]) for n in range(3)]
        for sub in subs:
            owner.expect(sub)
        await owner.connect()
        await bench.submit(*subs)
        await owner.until(lambda: all(book.choices[0] for book in owner.books.values()))
        before = bench.run.door.incarnation
        os.kill(bench.engine_pid, signal.SIGKILL)
        await owner.finished()
        await owner.until(lambda: owner.broken)
        events = [book.event for book in owner.books.values() if book.event is not None]
        assert {event.released.why for event in events} == {worker_pb2.Released.WHY_GROUP_FAILED}
        assert "signal 9" in events[0].released.message
        assert owner.error is not None
        assert from_rpc(owner.error).reason is Reason.WORKER_LOST
        await until(lambda: bench.run.door.incarnation not in (0, before))
        for sub in subs:
            sub.attempt += 1
            sub.generate.max_tokens = 8
            again = bench.sub(sub.request_id, (1, 2), max_tokens=8, prompt=list(sub.generate.prompt))
            sub.CopyFrom(again)
            owner.expect(sub)
        await owner.connect()
        assert all(result.HasField("admitted") for result in await bench.submit(*subs))
        await owner.finished()
        check(owner, *subs)
        await owner.lose()


async def test_an_engine_that_cannot_start_again_is_tried_until_it_can(tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    async with serving(tmp_path, flags={"fault-if": str(fault)}) as bench:
        fault.write_text("the device is lost")
        os.kill(bench.engine_pid, signal.SIGKILL)
        await until(lambda: bench.run.supervisor.restarts >= 2)
        assert not bench.run.lifecycle.ready
        (answer,) = await bench.submit(bench.sub(ONE))
        assert answer.HasField("rejected")
        fault.unlink()
        await until(lambda: bench.run.lifecycle.ready)
        (answer,) = await bench.submit(bench.sub(ONE))
        assert answer.HasField("admitted")
        await bench.stub.Cancel(worker_pb2.CancelRequest(request_id=ONE, epoch=1, attempt=1))


async def test_a_gateway_that_falls_silent_loses_its_stream(bench: Bench) -> None:
    owner = bench.owner()
    await owner.connect()
    await owner.until(lambda: owner.broken, 7.0)
    assert owner.error is not None
    assert from_rpc(owner.error).reason is Reason.CLIENT_GONE


async def test_an_engine_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        owner, sub = bench.owner(), bench.sub(ONE, max_tokens=4000)
        owner.expect(sub)
        await owner.connect()
        await bench.submit(sub)
        await owner.until(lambda: owner.books[ONE].choices[0])
        before = bench.run.door.incarnation
        os.kill(bench.engine_pid, signal.SIGSTOP)
        await owner.finished(most_s=5.0)
        assert owner.beats
        assert max(beat.engine_tick_age_ms for beat in owner.beats) > 1000
        event = owner.books[ONE].event
        assert event is not None
        assert "no step" in event.released.message
        await until(lambda: bench.run.door.incarnation not in (0, before))
        await owner.lose()


async def test_embeddings_travel_on_their_own_lane_and_tokens_go_on_meanwhile(tmp_path: Path) -> None:
    async with serving(tmp_path) as bench:
        tokens, bulk = bench.owner(), bench.owner(lane=worker_pb2.LANE_BULK)
        sub = bench.sub(ONE, max_tokens=50)
        encode = bench.encode(TWO, inputs=[[n % 900, n % 7, n % 11] for n in range(1500)])
        tokens.expect(sub)
        bulk.expect(encode)
        await tokens.connect()
        await bulk.connect()
        results = await bench.submit(encode, sub)
        assert all(result.HasField("admitted") for result in results), results
        await tokens.finished()
        await bulk.finished()
        check(tokens, sub)
        assert bytes(bulk.books[TWO].bulk) == expected_bytes(encode, SHAPE)
        await tokens.lose()
        await bulk.lose()


async def test_a_reader_that_stalls_holds_back_no_more_than_the_window_and_nobody_else(tmp_path: Path) -> None:
    async with serving(tmp_path, door={"window_messages": 8}) as bench:
        slow, quick = bench.owner(7), bench.owner(8)
        long, short = bench.sub(ONE, max_tokens=1000), bench.sub(TWO, gateway=8, max_tokens=20)
        slow.expect(long)
        quick.expect(short)
        slow.acknowledges = False
        await slow.connect()
        await quick.connect()
        await bench.submit(long)
        await slow.until(lambda: slow.seq == 8)
        await asyncio.sleep(0.3)
        assert slow.seq == 8
        await bench.submit(short)
        await quick.finished()
        check(quick, short)
        slow.acknowledges = True
        slow.say(ack=worker_pb2.Ack(seq=slow.seq))
        await slow.finished()
        check(slow, long)
        await slow.lose()
        await quick.lose()


async def test_a_gateway_that_says_nothing_sensible_loses_its_stream_with_a_reason(bench: Bench) -> None:
    owner = bench.owner()
    await owner.connect()
    owner.say(ack=worker_pb2.Ack(seq=99))
    await owner.until(lambda: owner.broken)
    assert owner.error is not None
    assert from_rpc(owner.error).reason is Reason.BAD_FIELD
    call = bench.stub.Outputs(iter([worker_pb2.OutputsRequest(heartbeat=worker_pb2.Heartbeat())]))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call.read()
    assert from_rpc(refusal.value).reason is Reason.BAD_FIELD


async def test_watch_reports_versions_once_loads_as_they_change_and_the_echo_with_them(bench: Bench) -> None:
    request = worker_pb2.WatchRequest(router_id="r", router_incarnation=3, protocol_major=1)
    call = bench.stub.Watch(request)
    first = await call.read()
    (version,) = first.versions
    assert (version.model, version.version, version.ready_replicas) == ("nothing", "v1", 1)
    assert sorted(version.assets) == ["chat_template.jinja", "generation_config.json", "tokenizer.json"]
    assert (first.heartbeat_ms, first.echo_batch_seq, first.loads[0].requests) == (2000, 0, 0)
    bench.batches = 41
    await bench.submit(bench.sub(ONE, max_tokens=500))
    report = await call.read()
    assert not report.versions
    assert (report.echo_batch_seq, report.loads[0].requests) == (42, 1)
    assert report.heartbeat_ms == 500
    bench.run.drain.ask(worker_pb2.DrainRequest())
    bench.run.door.drain()
    while not report.draining:
        report = await call.read()
    assert report.versions[0].ready_replicas == 0
    call.cancel()
    await bench.stub.Cancel(worker_pb2.CancelRequest(request_id=ONE, epoch=1, attempt=1))


async def test_assets_are_read_by_hash_in_pieces_and_described(bench: Bench) -> None:
    described = await bench.stub.Describe(worker_pb2.DescribeRequest())
    assert (described.worker_id, described.kv_tokens, described.max_requests) == ("w1", 2048 * 16, 64)
    sha = described.versions[0].assets["tokenizer.json"]
    data = b""
    while True:
        piece = await bench.stub.GetAsset(worker_pb2.GetAssetRequest(sha256=sha, offset=len(data), max_bytes=7000))
        data += piece.data
        if len(data) == piece.total:
            break
    assert data == b'{"of": "no words"}' * 1000
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await bench.stub.GetAsset(worker_pb2.GetAssetRequest(sha256="0" * 64))
    assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
