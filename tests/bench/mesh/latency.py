"""What the mesh adds to a token's way: idle to the first one, and between tokens of 64 streams."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.bench.fleet import Fleet, running
from tests.bench.mesh.asking import Told, askers, ids, run, spec
from tests.bench.mesh.row import Row, milliseconds

STEP_MS = 5.0
STREAM_STEP_MS = 20.0
IDLE_REQUESTS = 300
WARM_UP = 20
PAUSE_S = 0.01
STREAMS = 64
TOKENS = 200


def measure(home: Path) -> list[Row]:
    """Both."""
    with running(home / "idle", engine={"max_seqs": 8}, flags={"step-ms": STEP_MS}) as fleet:
        told, bare = run(_one_by_one(fleet, IDLE_REQUESTS))
    with running(home / "streams", engine={"max_seqs": STREAMS}, flags={"step-ms": STREAM_STEP_MS}) as fleet:
        streams = run(_at_once(fleet))
    return [*_first_token(told, bare), _between(streams)]


def _first_token(told: Sequence[Told], bare: Sequence[float]) -> list[Row]:
    added = [each.added_s for each in told]
    stages = ("admit_ms", "tokenise_ms", "router_queue_ms", "dispatch_ms")
    parts = {stage: statistics.median(getattr(each.receipt, stage) for each in told) for stage in stages}
    remark = "median " + ", ".join(f"{stage.removesuffix('_ms')} {value:.2f}" for stage, value in parts.items())
    return [
        Row("added to first token, idle, p50", "ms", milliseconds(added, 0.5), 3, remark=remark),
        Row("added to first token, idle, p99", "ms", milliseconds(added, 0.99), 10, remark=_bare(bare)),
    ]


def _bare(seconds: Sequence[float]) -> str:
    """What the transport alone takes here: a request goes over three such calls and comes back over two streams."""
    p50, p99 = (milliseconds(seconds, share) for share in (0.5, 0.99))
    return f"an empty call to the gateway takes {p50:.2f} p50, {p99:.2f} p99"


def _between(told: Sequence[Told]) -> Row:
    gaps = [gap for each in told for gap in each.gaps_s]
    step = statistics.median(each.receipt.decode_ms / (TOKENS - 1) for each in told)
    added = statistics.median(gaps) * 1e3 - step
    remark = f"engine {step:.2f}, pieces {milliseconds(gaps, 0.5):.2f} p50 {milliseconds(gaps, 0.99):.2f} p99"
    return Row("added between tokens, 64 streams, p50", "ms", round(added, 3), 1, remark=remark)


async def _one_by_one(fleet: Fleet, count: int) -> tuple[list[Told], list[float]]:
    """Requests, and empty calls between them."""
    async with askers(fleet) as (asker, *_):
        health = health_pb2_grpc.HealthStub(asker.channel)
        told, bare = [], []
        for number in range(-WARM_UP, count):
            told.append(await asker.stream(spec(ids(number, 64), 2)))
            await asyncio.sleep(PAUSE_S)
            began = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest())
            bare.append(time.monotonic() - began)
            await asyncio.sleep(PAUSE_S)
        return told[WARM_UP:], bare[WARM_UP:]


async def _at_once(fleet: Fleet) -> list[Told]:
    async with askers(fleet) as (asker, *_), asyncio.TaskGroup() as group:
        tasks = [group.create_task(asker.stream(spec(ids(n, 64), TOKENS))) for n in range(STREAMS)]
    return [task.result() for task in tasks]
