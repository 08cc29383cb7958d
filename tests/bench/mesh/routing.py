"""The router: what a request costs it, and how long a decision among a thousand workers takes.

Workers are servers in this process that admit everything and end it at once; the gateways' calls are made here, too.
The router is a process of its own and all that is measured of it is its CPU time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc

from router.fleet import Fleet as Workers
from router.policy import Need, Policy, Weights
from router.scorers import Limits
from shared.rpc import CLIENT_OPTIONS
from shared.wire import spec_hash
from tests.bench.fleet import Counts, Fleet, running
from tests.bench.mesh.asking import run
from tests.bench.mesh.row import Row, milliseconds
from tests.fakes.clock import FakeClock
from tests.fakes.worker import FakeWorker
from trunkline.common.v1 import common_pb2
from trunkline.router.v1 import router_pb2, router_pb2_grpc
from trunkline.worker.v1 import worker_pb2

WORKERS = 4
MOST_HELD = 256
CALLERS = 64
REQUESTS = 8_000
PROMPT = 128
DECISIONS = 2_000
ROUNDS = 5
BARELY_S = 5e-5  # less than that is no judging, only the look at the clock
RATE = 800  # decisions a second
MANY = 1_000
LANE = ("artefact", "tok")


def measure(home: Path) -> list[Row]:
    """Both."""
    return [run(_requests(home)), _decisions()]


async def _requests(home: Path) -> Row:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(f"w{n}", max_requests=MOST_HELD)) for n in range(WORKERS)]
        settings = {
            "router": {
                "redis_url": "",
                "workers": [worker.address for worker in workers],
                "queue": {"capacity": 4096, "per_tenant_share": 1.0},
                "tracing": {"redis_spans": False},
            }
        }
        mesh = running(home, Counts(workers=0, gateways=0), engine={}, flags={}, settings=settings)
        fleet = await asyncio.to_thread(mesh.__enter__)
        try:
            ending = asyncio.create_task(_end_all(workers))
            used, wall = await _submit(fleet)
            ending.cancel()
        finally:
            await asyncio.to_thread(mesh.__exit__, None, None, None)
    remark = f"{1e6 * used / REQUESTS:.0f} µs of CPU each; {REQUESTS / wall:,.0f}/s by the wall from {CALLERS} callers"
    return Row("router, requests a second and process", "/s", round(REQUESTS / used), 800, "least", remark)


async def _end_all(workers: list[FakeWorker]) -> None:
    """What workers hold ends after a moment."""
    while True:
        await asyncio.sleep(0.05)
        for worker in workers:
            worker.batches.clear()
            worker.finish()


async def _submit(fleet: Fleet) -> tuple[float, float]:
    """Seconds of the router's CPU, and seconds."""
    (spec,) = fleet.specs("router")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{spec.ports['grpc']}", options=CLIENT_OPTIONS) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        requests = iter([_request(number) for number in range(REQUESTS + CALLERS)])

        async def one_after_another(most: int) -> None:
            for request in itertools.islice(requests, most):
                await stub.Submit(request, timeout=30)

        async def all_callers(most: int) -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(CALLERS):
                    group.create_task(one_after_another(most))

        await all_callers(1)
        used, began = fleet.cpu_s(spec.name), time.monotonic()
        await all_callers(REQUESTS)
        return fleet.cpu_s(spec.name) - used, time.monotonic() - began


def _request(number: int) -> router_pb2.SubmitRequest:
    sub = worker_pb2.Submission(
        request_id=number.to_bytes(16, "big"),
        epoch=1,
        attempt=1,
        gateway_id="g1",
        gateway_incarnation=99,
        generate=worker_pb2.GenerateWork(prompt=range(PROMPT), choices=[worker_pb2.ChoiceProgress()], max_tokens=128),
        artefact_hash=LANE[0],
        tokenizer_hash=LANE[1],
        budget_ms=60_000,
    )
    sub.spec_hash = spec_hash(sub)
    return router_pb2.SubmitRequest(
        submission=sub, tenant=f"t{number % 4}", model="m", kv_tokens=PROMPT + 128, prefill_tokens=PROMPT
    )


def _decisions() -> Row:
    """The least of some rounds, which is what a quiet machine would show."""
    rounds = [_round() for _ in range(ROUNDS)]
    p99, p50 = (1e3 * min(milliseconds(chose, share) for chose, _ in rounds) for share in (0.99, 0.5))
    judging = 1e3 * min(milliseconds([each for each in judged if each > BARELY_S], 0.5) for _, judged in rounds)
    remark = f"least of {ROUNDS} rounds; p50 {p50:.0f}; judging all of them, every 0.1 s, takes {judging:,.0f} µs"
    return Row("router, decision among 1,000 workers, p99", "µs", round(p99, 1), 200, remark=remark)


def _round() -> tuple[list[float], list[float]]:
    """Seconds that each decision took, and the judging before it: as the dispatcher makes them, at the target's rate.
    Each worker reports twice a second, and all are judged ten times a second. Times are of this thread's CPU."""
    clock, rng = FakeClock(), random.Random(0)
    policy = Policy(Weights(), Limits(), rng)
    workers = Workers(clock, policy, lambda: 0.0, max_report_age_s=7.0)
    known = [workers.add(f"w:{number}") for number in range(MANY)]
    for number, worker in enumerate(known):
        workers.reported(worker, _report(number, rng))
    need = Need(artefact=LANE[0], prefill_tokens=PROMPT, kv_tokens=PROMPT + 128)
    chose, judged, reporting = [], [], itertools.cycle(enumerate(known))
    for turn in range(DECISIONS):
        clock.advance(1 / RATE)
        for number, worker in itertools.islice(reporting, 2 * MANY * (turn + 1) // RATE - 2 * MANY * turn // RATE):
            workers.reported(worker, _report(number, rng))
        began = time.thread_time()
        workers.judge()
        met = time.thread_time()
        chosen = policy.choose(workers.candidates(LANE), need)
        ended = time.thread_time()
        chose.append(ended - met)
        judged.append(met - began)
        assert chosen is not None
        holder = workers.holder(chosen)
        workers.place(holder, need)
        workers.answered(holder, workers.sealed(holder), [need], refused=False, draining=False)
    return chose, judged


def _report(number: int, rng: random.Random) -> worker_pb2.WatchResponse:
    requests = rng.randrange(32)
    load = common_pb2.Load(
        artefact_hash=LANE[0],
        requests=requests,
        running=requests,
        max_requests=1_000,
        kv_tokens_free=1_000_000,
        kv_tokens_total=1_000_000,
    )
    version = common_pb2.ModelVersion(model="m", version="1", artefact_hash=LANE[0], tokenizer_hash=LANE[1])
    return worker_pb2.WatchResponse(
        worker_id=f"w{number}",
        incarnation=number + 1,
        loads=[load],
        heartbeat_ms=500,
        echo_batch_seq=1 << 30,
        versions=[version],
    )
