"""What a token costs between door and gateway: the parts alone in this process, then the processes as a whole.

The parts are those of `tests.bench.token_path`. The processes do more: sockets, the engine's frames, spans, and telling
a client the answer, here one unary answer for each request.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.bench import token_path
from tests.bench.fleet import Fleet, running
from tests.bench.mesh.asking import askers, ids, run, spec
from tests.bench.mesh.row import Row

RUNNING = 256
STEPS = 300
STEP_MS = 20.0
RUNS = 11


def measure(home: Path) -> list[Row]:
    """The parts, the least of some runs; and the processes."""
    parts = token_path.measure(RUNNING, runs=RUNS)
    settings = {"max_seqs": RUNNING, "max_batch_tokens": 16_384, "kv_blocks": 100_000}
    with running(home / "hop", engine=settings, flags={"step-ms": STEP_MS}) as fleet:
        door, gateway = run(_processes(fleet))
    remark = (
        f"least of {RUNS} runs: door {parts['door_least']:.2f} + gateway {parts['gateway_least']:.2f}; median "
        f"{parts['both']:.2f}; whole processes {door:.1f} + {gateway:.1f}"
    )
    return [Row("door to gateway, 256 running, CPU a token, both ends", "µs", parts["both_least"], 2, remark=remark)]


async def _processes(fleet: Fleet) -> tuple[float, float]:
    """Microseconds a token of the door's and the gateway's whole process."""
    async with askers(fleet) as (asker, *_):
        await asker.complete(spec(ids(0, 16), 2))
        before = [fleet.cpu_s(name) for name in ("worker-1", "gateway-1")]
        async with asyncio.TaskGroup() as group:
            for number in range(RUNNING):
                group.create_task(asker.complete(spec(ids(number, 16), STEPS)))
        used = [fleet.cpu_s(name) - was for name, was in zip(("worker-1", "gateway-1"), before, strict=True)]
    door, gateway = (1e6 * each / (RUNNING * STEPS) for each in used)
    return door, gateway
