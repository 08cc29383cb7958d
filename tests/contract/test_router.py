"""A router in this process, over real sockets, against workers that keep or break the wire's rules."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

from router.app import Router, running
from router.config import BatchConfig, FleetConfig, QueueConfig, RouterConfig
from shared.clock import SYSTEM_CLOCK
from shared.config import TracingConfig
from shared.errors import Reason, TrunklineError, from_rpc
from shared.ids import Identity, incarnation_text
from shared.peers import Peers, Registration
from shared.rpc import Channels
from shared.state import Store
from shared.wire import Version
from tests.fakes import worker as fake
from tests.fakes.otlp import OtlpReceiver
from tests.fakes.worker import ASSET, FakeWorker, Mismatch
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc
from trunkline.router.v1 import router_pb2, router_pb2_grpc
from trunkline.worker.v1 import worker_pb2

RNG = random.Random(7)
QUICK = QueueConfig(no_replica_wait_ms=300)


async def until(condition: Callable[[], bool], timeout_s: float = 6.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for belongs to someone else
            await asyncio.sleep(0.01)


class Client:
    """A gateway's side of one router."""

    def __init__(self, router: Router, channels: Channels) -> None:
        self.router = router
        self.stub = router_pb2_grpc.RouterServiceStub(channels.get(router.grpc))
        self.channels = channels

    def submit(self, request: router_pb2.SubmitRequest) -> asyncio.Task[router_pb2.SubmitResponse]:
        async def call() -> router_pb2.SubmitResponse:
            try:
                return await self.stub.Submit(request, timeout=20)
            except grpc.aio.AioRpcError as exc:
                raise from_rpc(exc) from exc

        return asyncio.create_task(call())

    async def queued(self, request: router_pb2.SubmitRequest) -> router_pb2.LookupResponse:
        return await self.stub.Lookup(router_pb2.LookupRequest(request_id=request.submission.request_id))

    async def wait_queued(self, count: int) -> None:
        await until(lambda: len(self.router.core.dispatcher) == count)

    async def wait_ready(self) -> None:
        await until(lambda: self.router.core.fleet.states().get("ready", 0) > 0)


@asynccontextmanager
async def serving(*workers: FakeWorker, **settings: Any) -> AsyncIterator[Client]:
    """A router that knows these workers; when the scope ends without error, each submission taken has ended once."""
    registry = CollectorRegistry()
    given = {"queue": QUICK, "drain_settle_ms": 0, **settings}
    config = RouterConfig(id="r1", workers=tuple(w.address for w in workers), **given)
    channels = Channels(Identity("gateway", "g1", 99), TracerProvider().get_tracer("test"))
    try:
        async with running(config, rng=random.Random(1), registry=registry) as router:
            yield Client(router, channels)
    finally:
        await channels.close()
    submitted = registry.get_sample_value("trunkline_router_submitted_total")
    assert submitted == sum(outcomes(registry).values()), "INV-1"


def outcomes(registry: CollectorRegistry) -> dict[str, float]:
    samples = [s for metric in registry.collect() for s in metric.samples if s.name == "trunkline_router_ended_total"]
    return {sample.labels["outcome"]: sample.value for sample in samples}


def request(
    request_id: bytes | None = None,
    *,
    attempt: int = 1,
    artefact: str = "artefact",
    budget_ms: int = 10_000,
    **fields: Any,
) -> router_pb2.SubmitRequest:
    submission = worker_pb2.Submission(
        request_id=request_id or RNG.randbytes(16),
        epoch=1,
        attempt=attempt,
        gateway_id="g1",
        gateway_incarnation=99,
        generate=worker_pb2.GenerateWork(prompt=[1, 2, 3], choices=[worker_pb2.ChoiceProgress()], max_tokens=5),
        artefact_hash=artefact,
        tokenizer_hash="tok",
        budget_ms=budget_ms,
    )
    values = {"tenant": "t", "model": "m", "kv_tokens": 8, "prefill_tokens": 3, **fields}
    return router_pb2.SubmitRequest(submission=submission, **values)


async def refusal(task: asyncio.Task[router_pb2.SubmitResponse]) -> TrunklineError:
    with pytest.raises(TrunklineError) as caught:
        await task
    return caught.value


async def test_a_submission_is_answered_with_the_worker_that_has_it() -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        ask = request(budget_ms=5000)
        answer = await client.submit(ask)
        assert (answer.incarnation, answer.worker_id, answer.address) == (worker.incarnation, "w1", worker.address)
        assert 0 <= answer.queue_ms < 1000
        assert 0 < answer.dispatch_ms < 1000
        item = worker.held[ask.submission.request_id]
        assert 4000 < item.budget_ms <= 5000
        item.budget_ms = 5000
        assert item == ask.submission


async def test_submissions_of_one_moment_travel_in_few_batches_with_ascending_numbers() -> None:
    async with FakeWorker(max_requests=100) as worker, serving(worker, batch=BatchConfig(max_items=8)) as client:
        await asyncio.gather(*(client.submit(request()) for _ in range(60)))
        assert len(worker.held) == 60
        assert len(worker.batches) < 40
        assert max(len(batch.items) for batch in worker.batches) <= 8
        numbers = [batch.batch_seq for batch in worker.batches]
        assert numbers == sorted(set(numbers))
        assert {(b.router_id, b.router_incarnation) for b in worker.batches} == {
            ("r1", client.router.lifecycle.identity.incarnation)
        }


async def test_batches_stay_below_the_largest_message() -> None:
    big = request()
    big.submission.generate.prompt[:] = [2**31 - 1] * 800_000  # 4 MB
    asks = [big]
    for _ in range(7):
        asks.append(router_pb2.SubmitRequest.FromString(big.SerializeToString()))
        asks[-1].submission.request_id = RNG.randbytes(16)
    async with FakeWorker(max_requests=9) as worker, serving(worker) as client:
        worker.hold()
        first = client.submit(request())
        await worker.read()
        rest = [client.submit(ask) for ask in asks]
        await client.wait_queued(8)
        worker.let_go()
        await asyncio.gather(first, *rest)
        assert len(worker.held) == 9
        assert all(batch.ByteSize() <= 16 << 20 for batch in worker.batches)


async def test_load_counts_at_dispatch_so_that_a_burst_is_spread() -> None:
    workers = FakeWorker("w1", max_requests=50), FakeWorker("w2", max_requests=50)
    async with workers[0] as one, workers[1] as two, serving(one, two) as client:
        await asyncio.gather(*(client.submit(request()) for _ in range(40)))
        assert len(one.held) + len(two.held) == 40
        assert abs(len(one.held) - len(two.held)) <= 4


async def test_an_item_that_was_rejected_waits_for_a_newer_report_and_keeps_its_place_and_attempt() -> None:
    async with FakeWorker(max_requests=1, heartbeat_s=0.3) as worker, serving(worker) as client:
        await client.submit(request())
        worker.max_requests = 2
        worker.changed()
        await asyncio.sleep(0.05)
        worker.answers.append(fake.rejected)
        second = request()
        started = SYSTEM_CLOCK.monotonic()
        answer = await client.submit(second)
        assert answer.incarnation == worker.incarnation
        tries = [
            item for batch in worker.batches for item in batch.items if item.request_id == second.submission.request_id
        ]
        assert [item.attempt for item in tries] == [1, 1]
        assert SYSTEM_CLOCK.monotonic() - started < 1.0


async def test_a_worker_that_rejects_everything_is_not_hammered() -> None:
    async with FakeWorker(heartbeat_s=0.1) as worker, serving(worker) as client:
        for _ in range(100):
            worker.answers.append(fake.rejected)
        tasks = [client.submit(request()) for _ in range(5)]
        await asyncio.sleep(1.0)
        assert 2 <= len(worker.batches) <= 10
        assert sum(len(batch.items) for batch in worker.batches[1:]) <= len(worker.batches)
        worker.answers.clear()
        await asyncio.gather(*tasks)


async def test_a_full_worker_gets_no_more_until_something_ends() -> None:
    async with FakeWorker(max_requests=2) as worker, serving(worker) as client:
        await asyncio.gather(client.submit(request()), client.submit(request()))
        third = request()
        task = client.submit(third)
        await client.wait_queued(1)
        await asyncio.sleep(0.2)
        assert sum(len(batch.items) for batch in worker.batches) == 2
        worker.finish()
        await task


async def test_a_mismatch_goes_to_another_worker() -> None:
    async with FakeWorker("w1") as one, FakeWorker("w2") as two, serving(one, two) as client:
        for worker in (one, two):
            worker.answers.append(fake.mismatch(Mismatch.WHAT_ARTEFACT))
        ask = request(preferred=[one.incarnation])
        two.answers.clear()
        answer = await client.submit(ask)
        assert answer.incarnation == two.incarnation
        assert [item.attempt for item in two.batches[0].items] == [1]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (Mismatch.WHAT_ARTEFACT, Reason.VERSION_GONE),
        (Mismatch.WHAT_TOKENIZER, Reason.VERSION_GONE),
        (Mismatch.WHAT_ADAPTER, Reason.VERSION_GONE),
        (Mismatch.WHAT_FEATURE, Reason.FEATURE_OFF),
        (Mismatch.WHAT_TOO_LARGE, Reason.TOO_LARGE),
        (Mismatch.WHAT_MALFORMED, Reason.INTERNAL),
    ],
)
async def test_a_mismatch_everywhere_is_told_as_what_it_is(what: Mismatch.What, reason: Reason) -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        worker.answers.append(fake.mismatch(what))
        assert (await refusal(client.submit(request()))).reason is reason
        assert len(worker.batches) == 1


async def test_a_fenced_item_ends_as_moved_with_the_stamp_that_fences_it() -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        worker.answers.append(fake.fenced)
        error = await refusal(client.submit(request()))
        assert (error.reason, error.metadata) == (Reason.OWNER_MOVED, {"epoch": "1", "attempt": "2"})


@pytest.mark.parametrize("how", ["aborted", "killed", "unanswered"])
async def test_an_unknown_outcome_goes_back_with_the_incarnation_and_is_tried_nowhere_else(how: str) -> None:
    batch = BatchConfig(timeout_ms=400)
    async with FakeWorker("w1") as one, FakeWorker("w2") as two, serving(one, two, batch=batch) as client:
        ask = request(preferred=[one.incarnation])
        if how == "aborted":
            one.cut()
        else:
            one.hold()
        task = client.submit(ask)
        await one.read()
        if how == "killed":
            await one.stop()
        error = await refusal(task)
        assert error.reason is Reason.OUTCOME_UNKNOWN
        assert error.metadata["incarnation"] == incarnation_text(one.incarnation)
        assert not two.batches


async def test_an_answer_that_leaves_an_item_out_is_of_unknown_outcome() -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        worker.answers.append(fake.silent)
        assert (await refusal(client.submit(request()))).reason is Reason.OUTCOME_UNKNOWN


async def test_a_batch_that_was_never_written_goes_to_another_worker_at_the_same_attempt() -> None:
    async with FakeWorker("w1") as one, FakeWorker("w2") as two, serving(one, two) as client:
        closing = asyncio.create_task(one.stop(grace_s=5.0))  # its Watch stream goes on, new connections are refused
        await asyncio.sleep(0.05)
        answer = await client.submit(request(preferred=[one.incarnation]))
        assert (answer.incarnation, one.batches) == (two.incarnation, [])
        closing.cancel()
        await one.start()


async def test_a_submission_that_is_cancelled_while_queued_never_reaches_a_worker() -> None:
    async with FakeWorker(max_requests=1) as worker, serving(worker) as client:
        await client.submit(request())
        task = client.submit(request())
        await client.wait_queued(1)
        task.cancel()
        await client.wait_queued(0)
        worker.finish()
        await client.submit(request())
        assert sum(len(batch.items) for batch in worker.batches) == 2
        assert worker.cancelled == []


async def test_a_submission_that_is_cancelled_while_dispatched_is_cancelled_at_the_worker_after_its_answer() -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        worker.hold()
        ask = request(attempt=3)
        task = client.submit(ask)
        await worker.read()
        task.cancel()
        await asyncio.sleep(0.1)
        assert worker.cancelled == []
        worker.let_go()
        await until(lambda: bool(worker.cancelled))
        assert worker.cancelled == [(ask.submission.request_id, 1, 3)]
        assert worker.held == {}


async def test_a_duplicate_joins_the_pending_submission_and_outlives_the_first_caller() -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        worker.hold()
        ask = request()
        first, second = client.submit(ask), client.submit(ask)
        await worker.read()
        third = client.submit(ask)
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.05)
        worker.let_go()
        assert (await second).incarnation == (await third).incarnation == worker.incarnation
        assert sum(len(batch.items) for batch in worker.batches) == 1
        assert worker.cancelled == []


async def test_a_later_attempt_fences_the_pending_one_and_an_earlier_one_is_refused() -> None:
    async with FakeWorker(max_requests=1) as worker, serving(worker) as client:
        await client.submit(request())
        ask = request(attempt=2)
        pending = client.submit(ask)
        await client.wait_queued(1)
        assert (
            await refusal(client.submit(request(ask.submission.request_id, attempt=1)))
        ).reason is Reason.OWNER_MOVED
        later = client.submit(request(ask.submission.request_id, attempt=3))
        assert (await refusal(pending)).reason is Reason.OWNER_MOVED
        worker.finish()
        await later
        assert worker.held[ask.submission.request_id].attempt == 3


async def test_a_deadline_that_passes_in_the_queue_is_told() -> None:
    async with FakeWorker(max_requests=1) as worker, serving(worker) as client:
        await client.submit(request())
        started = SYSTEM_CLOCK.monotonic()
        error = await refusal(client.submit(request(budget_ms=200)))
        assert (error.reason, error.row.code) == (Reason.QUEUE_EXPIRED, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert 0.15 < SYSTEM_CLOCK.monotonic() - started < 1.0


async def test_a_full_queue_refuses_with_advice_and_one_tenant_cannot_fill_it() -> None:
    queue = QueueConfig(capacity=4, per_tenant_share=0.5)
    async with FakeWorker(max_requests=1) as worker, serving(worker, queue=queue) as client:
        await client.submit(request())
        waiting = [client.submit(request()) for _ in range(2)]
        await client.wait_queued(2)
        error = await refusal(client.submit(request()))
        assert (error.reason, error.metadata["subject"]) == (Reason.QUEUE_FULL, "t")
        assert error.retry_after_s is not None
        assert 0.1 <= error.retry_after_s <= 40
        waiting += [client.submit(request(tenant="u")) for _ in range(2)]
        await client.wait_queued(4)
        assert (await refusal(client.submit(request(tenant="v")))).reason is Reason.QUEUE_FULL
        worker.max_requests = 10
        worker.finish()
        await asyncio.gather(*waiting)


async def test_a_deadline_that_cannot_be_met_is_refused_once_the_drain_rate_is_known() -> None:
    async with FakeWorker(max_requests=1, heartbeat_s=0.05) as worker, serving(worker) as client:
        tasks = [client.submit(request(budget_ms=60_000)) for _ in range(60)]
        await client.wait_queued(59)
        for number in range(25):
            await worker.read(number + 1)
            await asyncio.sleep(0.03)
            worker.finish()
        error = await refusal(client.submit(request(budget_ms=100)))
        assert error.reason is Reason.WOULD_MISS
        assert int(error.metadata["expected_wait_ms"]) > 200
        worker.max_requests = 100
        worker.finish()
        await asyncio.gather(*tasks)


async def test_higher_priority_overtakes_in_the_queue_and_lookup_tells_the_place() -> None:
    async with FakeWorker(max_requests=1) as worker, serving(worker) as client:
        await client.submit(request())
        low, high = request(), request()
        high.submission.priority = 5
        tasks = [client.submit(low)]
        await client.wait_queued(1)
        tasks.append(client.submit(high))
        await client.wait_queued(2)
        places = [await client.queued(ask) for ask in (low, high, request())]
        assert [(p.queued, p.position, p.queue_length) for p in places] == [(True, 1, 2), (True, 0, 2), (False, 0, 2)]
        worker.max_requests = 2
        worker.changed()
        await tasks[1]
        assert not tasks[0].done()
        worker.finish()
        await tasks[0]


@pytest.mark.parametrize(
    ("artefact", "model", "reason"),
    [("nowhere", "m", Reason.VERSION_GONE), ("nowhere", "another", Reason.NO_REPLICA)],
)
async def test_a_version_that_nobody_serves_is_gone_and_a_model_that_nobody_serves_has_no_replica(
    artefact: str, model: str, reason: Reason
) -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        error = await refusal(client.submit(request(artefact=artefact, model=model)))
        assert error.reason is reason
        assert error.row.code is grpc.StatusCode.UNAVAILABLE


async def test_an_excluded_worker_never_gets_the_request() -> None:
    async with FakeWorker("w1") as one, FakeWorker("w2") as two, serving(one, two) as client:
        for _ in range(8):
            answer = await client.submit(request(excluded=[one.incarnation], preferred=[one.incarnation]))
            assert answer.incarnation == two.incarnation
        error = await refusal(client.submit(request(excluded=[one.incarnation, two.incarnation])))
        assert error.reason is Reason.NO_REPLICA


async def test_a_silent_worker_gets_no_new_work_and_what_waits_for_it_goes_on_when_it_is_heard() -> None:
    async with FakeWorker(heartbeat_s=0.1) as worker, serving(worker) as client:
        worker.reporting = False
        await asyncio.sleep(0.6)
        task = client.submit(request())
        await asyncio.sleep(0.3)
        assert not worker.batches
        worker.reporting = True
        worker.changed()
        await task


async def test_a_worker_that_dies_and_comes_back_is_refused_for_then_used_again() -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        await worker.stop()
        error = await refusal(client.submit(request()))
        assert error.reason is Reason.NO_REPLICA
        worker.reborn()
        await worker.start()
        await client.wait_ready()
        assert (await client.submit(request())).incarnation == worker.incarnation


async def test_a_stream_that_is_reopened_within_a_second_loses_nobody_in_the_queue() -> None:
    async with FakeWorker(max_requests=1) as worker, serving(worker) as client:
        await client.submit(request())
        task = client.submit(request())
        await client.wait_queued(1)
        await worker.stop()
        await worker.start()
        worker.finish()
        await task


async def test_a_stalled_engine_gets_no_new_work() -> None:
    async with FakeWorker("w1") as one, FakeWorker("w2") as two, serving(one, two) as client:
        await client.submit(request(preferred=[one.incarnation]))
        one.tick_age_ms = 3000
        one.changed()
        await asyncio.sleep(0.1)
        for _ in range(6):
            assert (await client.submit(request(preferred=[one.incarnation]))).incarnation == two.incarnation


async def test_the_models_served_are_merged_and_told_at_every_change() -> None:
    both = FakeWorker("w2", fake.version(), fake.version("n", "other"))
    async with FakeWorker("w1") as one, both as two, serving(one, two) as client:
        call = client.stub.WatchModels(router_pb2.WatchModelsRequest(gateway_id="g1", gateway_incarnation=99))
        try:
            first = await call.read()
            assert {(v.model, v.ready_replicas) for v in first.versions} == {("m", 2), ("n", 1)}
            assert (first.router_id, first.heartbeat, first.draining) == ("r1", False, False)
            beat = await call.read()
            assert (beat.heartbeat, list(beat.versions), beat.heartbeat_ms) == (True, [], 500)
            two.draining = True
            two.changed()
            while (message := await call.read()).heartbeat:
                pass
            assert {(v.model, v.ready_replicas) for v in message.versions} == {("m", 1), ("n", 0)}
            health = health_pb2_grpc.HealthStub(client.channels.get(client.router.grpc))
            status = [
                (await health.Check(health_pb2.HealthCheckRequest(service=name))).status
                for name in ("", "trunkline.router.v1.RouterService", "model/m", "model/n")
            ]
            assert status == [1, 1, 1, 2]
        finally:
            call.cancel()


async def test_an_asset_is_relayed_whole_read_once_and_refused_when_it_is_not_what_was_asked_for() -> None:
    sha = hashlib.sha256(ASSET).hexdigest()

    async def read(client: Client, sha256: str) -> bytes:
        pieces = [piece async for piece in client.stub.GetAsset(router_pb2.GetAssetRequest(sha256=sha256))]
        assert all(len(piece.data) <= 1 << 20 and piece.total == len(ASSET) for piece in pieces)
        return b"".join(piece.data for piece in pieces)

    async with FakeWorker("bad") as bad, FakeWorker("good") as good, serving(bad, good) as client:
        bad.assets[sha] = ASSET[:-1] + b"!"
        assert await asyncio.gather(*(read(client, sha) for _ in range(3))) == [ASSET] * 3
        assert good.asset_reads == 2  # 2.8 MB in pieces of 2 MiB
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client, "0" * 64)
        assert from_rpc(caught.value).reason is Reason.VERSION_GONE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(client, "../etc/passwd")
        assert from_rpc(caught.value).reason is Reason.BAD_FIELD


async def test_explain_tells_filters_scores_and_the_choice() -> None:
    strange = FakeWorker("w3", fake.version("n", "other"))
    async with FakeWorker("w1") as one, FakeWorker("w2") as two, strange, serving(one, two, strange) as client:
        await client.submit(request(preferred=[one.incarnation]))
        told = await client.stub.Explain(router_pb2.ExplainRequest(request=request()))
        by_id = {candidate.worker_id: candidate for candidate in told.candidates}
        assert told.chosen == "w2"
        assert (by_id["w1"].filtered_by, by_id["w3"].filtered_by) == ("", "version")
        assert by_id["w2"].total > by_id["w1"].total
        assert set(by_id["w1"].scores) == {"load", "prefill", "kv", "preferred"}


async def test_drain_refuses_what_is_new_answers_what_is_queued_and_tells_gateways() -> None:
    async with FakeWorker(max_requests=1) as worker:
        async with serving(worker) as client:
            call = client.stub.WatchModels(router_pb2.WatchModelsRequest())
            await call.read()
            await client.submit(request())
            queued = client.submit(request())
            await client.wait_queued(1)
            client.router.core.dispatcher.drain()
            await client.stub.Drain(router_pb2.DrainRequest(grace_ms=5000))
            assert (await refusal(client.submit(request()))).reason is Reason.DRAINING
            while not (message := await call.read()).draining:
                pass
            assert message.draining
            assert not client.router.lifecycle.ready
            worker.finish()
        assert (await queued).incarnation == worker.incarnation
        while (message := await call.read()) is not grpc.aio.EOF:
            assert message.draining


@asynccontextmanager
async def beside_another_router(redis_url: str) -> AsyncIterator[None]:
    """Another router is registered inside the scope."""
    store = Store(redis_url, SYSTEM_CLOCK, name="beside")
    await store.start()
    other = Registration(store, Identity("router", "r2", 2), {"address": "127.0.0.1:2"})
    try:
        await other.refresh()
        yield
    finally:
        await other.close()
        await store.close()


async def test_a_router_that_drains_hands_back_what_waits_where_another_one_serves(redis_url: str) -> None:
    """A gateway of the minor before would take that for a word on the mesh: its requests are placed here."""
    older = Channels(Identity("gateway", "g0", 98, Version(1, 0)), TracerProvider().get_tracer("test"))
    loop, ends = asyncio.get_running_loop(), dict[str, float]()
    async with beside_another_router(redis_url), FakeWorker(max_requests=1) as worker:
        async with serving(worker, redis_url=redis_url, drain_settle_ms=300) as client:
            before = Client(client.router, older)
            await client.submit(request())
            tasks = {"waits": client.submit(request()), "older": before.submit(request())}
            await client.wait_queued(2)

            async def comes_late() -> router_pb2.SubmitResponse:
                await asyncio.sleep(0.1)
                return await client.submit(request())

            async def finishes() -> None:
                await asyncio.sleep(1.0)
                worker.finish()

            tasks["late"] = asyncio.create_task(comes_late())
            for name, task in tasks.items():
                task.add_done_callback(lambda _, name=name: ends.setdefault(name, loop.time()))
            finishing = asyncio.create_task(finishes())
            began = loop.time()
        for name in ("waits", "late"):
            assert (await refusal(tasks[name])).reason is Reason.DRAINING
            assert 0.3 <= ends[name] - began < 0.9
        assert (await tasks["older"]).incarnation == worker.incarnation
        await finishing
        assert ends["older"] - began >= 1.0
    await older.close()


async def test_a_router_of_the_minor_before_places_what_waits(redis_url: str) -> None:
    async with beside_another_router(redis_url), FakeWorker(max_requests=1) as worker:
        async with serving(worker, redis_url=redis_url, protocol_minor=0) as client:
            await client.submit(request())
            queued = client.submit(request())
            await client.wait_queued(1)
            asyncio.get_running_loop().call_later(0.3, worker.finish)
        assert (await queued).incarnation == worker.incarnation


async def test_the_last_router_places_what_waits_while_it_drains(redis_url: str) -> None:
    async with FakeWorker(max_requests=1) as worker:
        async with serving(worker, redis_url=redis_url) as client:
            await client.submit(request())
            queued = client.submit(request())
            await client.wait_queued(1)
            asyncio.get_running_loop().call_later(0.3, worker.finish)
        assert (await queued).incarnation == worker.incarnation


async def test_what_is_still_queued_when_the_drains_grace_is_over_is_refused() -> None:
    async with FakeWorker(max_requests=1) as worker:
        async with serving(worker, drain_grace_ms=200) as client:
            await client.submit(request())
            queued = client.submit(request())
            await client.wait_queued(1)
        assert (await refusal(queued)).reason is Reason.DRAINING


async def test_a_submission_that_breaks_the_protocol_is_refused_with_all_its_faults() -> None:
    async with FakeWorker() as worker, serving(worker) as client:
        error = await refusal(client.submit(router_pb2.SubmitRequest()))
        assert error.reason is Reason.BAD_FIELD
        assert {v.field for v in error.violations} >= {"submission.request_id", "submission.work", "submission.attempt"}


async def test_the_trace_goes_through_queue_and_dispatch_to_the_worker(otlp: OtlpReceiver) -> None:
    async with FakeWorker() as worker:  # noqa: SIM117 - read after the router has exported
        async with serving(worker, tracing=TracingConfig(otlp_endpoint=otlp.endpoint)) as client:
            ask = request()
            ask.submission.traceparent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
            await client.submit(ask)
            got = worker.held[ask.submission.request_id].traceparent.split("-")
    spans = {span.name: span for _, span in otlp.spans(2)}
    queue, dispatch = spans["router.queue"], spans["router.dispatch"]
    assert queue.trace_id.hex() == dispatch.trace_id.hex() == got[1] == "a" * 32
    assert queue.parent_span_id.hex() == dispatch.parent_span_id.hex() == "b" * 16
    assert dispatch.span_id.hex() == got[2]


async def test_workers_are_found_in_the_store_and_the_router_is_found_there(redis_url: str) -> None:
    async with FakeWorker() as worker:
        store = Store(redis_url, SYSTEM_CLOCK, name="test")
        await store.start()
        try:
            await Registration(store, Identity("worker", "w1", 5), {"address": worker.address}).refresh()
            async with serving(redis_url=redis_url) as client:
                await client.wait_ready()
                await client.submit(request())
                routers = Peers(store, "router")
                await routers.look()
                assert routers.snapshot()["r1"].address == client.router.grpc
            await routers.look()
            assert routers.snapshot() == {}
        finally:
            await store.close()


async def test_a_worker_that_nobody_names_and_that_is_dead_is_forgotten() -> None:
    async with FakeWorker() as worker, serving(worker, fleet=FleetConfig(forget_s=1)) as client:
        client.router.core.discovery._peers._static.clear()
        await asyncio.sleep(1.2)
        assert len(list(client.router.core.fleet.workers())) == 1
        await worker.stop()
        await until(lambda: not list(client.router.core.fleet.workers()))
        call = client.stub.WatchModels(router_pb2.WatchModelsRequest())
        assert list((await call.read()).versions) == []
        call.cancel()


async def test_in_a_storm_every_submission_ends_once_and_is_held_by_the_worker_that_was_named_only() -> None:
    rng = random.Random(11)

    def whim(item: worker_pb2.Submission, worker: FakeWorker) -> worker_pb2.ItemResult:
        draw = rng.random()
        if draw < 0.15:
            return fake.rejected(item)
        if draw < 0.20:
            return fake.mismatch(Mismatch.WHAT_FEATURE)(item)
        if draw < 0.25:
            return fake.fenced(item)
        return worker.admit(item)

    workers = [FakeWorker(f"w{n}", max_requests=12, heartbeat_s=0.05) for n in range(3)]
    async with workers[0], workers[1], workers[2], serving(*workers, queue=QueueConfig(capacity=150)) as client:
        for worker in workers:
            worker.decide = functools.partial(whim, worker=worker)
        asks, tasks = [], []
        for _ in range(250):
            asks.append(request(tenant=rng.choice("abc"), budget_ms=rng.choice([100, 4000])))
            asks[-1].submission.priority = rng.randrange(3)
            tasks.append(client.submit(asks[-1]))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if rng.random() < 0.2:
                rng.choice(workers).finish_some(rng)
            await asyncio.sleep(rng.random() * 0.004)
        for worker in workers:
            worker.max_requests = 1000
            worker.changed()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: client.router.core.dispatcher.in_flight == 0)
        await asyncio.sleep(0.1)
        reasons = {end.reason for end in ends if isinstance(end, TrunklineError)}
        assert reasons <= {
            Reason.OWNER_MOVED,
            Reason.FEATURE_OFF,
            Reason.QUEUE_EXPIRED,
            Reason.QUEUE_FULL,
            Reason.WOULD_MISS,
        }
        for ask, end in zip(asks, ends, strict=True):
            admitted = [worker for worker in workers if ask.submission.request_id in worker.admitted]
            assert len(admitted) <= 1
            if isinstance(end, router_pb2.SubmitResponse):
                assert [worker.incarnation for worker in admitted] == [end.incarnation]
            elif isinstance(end, TrunklineError):
                assert not admitted


async def test_the_admin_service_shows_the_router_and_drains_it() -> None:
    async with FakeWorker(max_requests=1) as worker, serving(worker) as client:
        await client.submit(request())
        task = client.submit(request())
        await client.wait_queued(1)
        admin = admin_pb2_grpc.AdminServiceStub(client.channels.get(client.router.admin))
        status = await admin.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.role, status.id, status.ready) == ("router", "r1", True)
        assert (status.gauges["queue_length"], status.gauges["workers_ready"]) == (1, 1)
        worker.finish()
        await task
        await admin.Drain(admin_pb2.DrainRequest())
        assert cast(Router, client.router).lifecycle.draining
