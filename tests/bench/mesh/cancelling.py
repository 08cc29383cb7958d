"""From a cancel to the moment when the engine has freed what the request held, as CancelGeneration confirms it.

The hop of the confirmation back to the caller is part of the figure.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.bench.fleet import Fleet, running
from tests.bench.mesh.asking import Asker, Told, askers, ids, run, spec
from tests.bench.mesh.row import Row, milliseconds
from trunkline.inference.v1 import inference_pb2

STEP_MS = 20.0
BESIDE = 32  # streams that go on
CANCELS = 150
LONG = 4_000


def measure(home: Path) -> list[Row]:
    """One row."""
    engine = {"max_seqs": 64, "kv_blocks": 100_000}
    with running(home / "mesh", engine=engine, flags={"step-ms": STEP_MS}) as fleet:
        took = run(_cancels(fleet))
    remark = f"p50 {milliseconds(took, 0.5):.1f}; a step takes {STEP_MS:g} ms, {BESIDE} streams run beside it"
    return [Row("cancel to slot and blocks free, p99", "ms", milliseconds(took, 0.99), STEP_MS + 20, remark=remark)]


async def _cancels(fleet: Fleet) -> list[float]:
    async with askers(fleet) as (asker, *_), asyncio.TaskGroup() as group:
        beside = [group.create_task(asker.stream(spec(ids(-n, 32), LONG))) for n in range(BESIDE)]
        took = [await _cancel(asker, number) for number in range(CANCELS)]
        for task in beside:
            task.cancel()
    return took


async def _cancel(asker: Asker, number: int) -> float:
    """Seconds, for one that has begun to stream."""
    begun: asyncio.Future[Told] = asyncio.get_running_loop().create_future()

    def on_first(told: Told) -> None:
        begun.set_result(told)

    stream = asyncio.create_task(asker.stream(spec(ids(number, 32), LONG), on_first))
    told = await begun
    request = inference_pb2.CancelGenerationRequest(request_id=told.request_id)
    began = time.monotonic()
    answer = await asker.stub.CancelGeneration(request, metadata=asker.metadata, timeout=30)
    took = time.monotonic() - began
    assert answer.confirmed
    await asyncio.wait([stream])
    stream.exception()
    return took
