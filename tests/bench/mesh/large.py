"""Large prompts as text, many at once: what they wait for beyond their own tokenising, and what others feel meanwhile.

The engine prefills at no cost and the router holds nothing back for its sake, so that all that is left is the mesh.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.bench import language
from tests.bench.fleet import WIDE, Fleet, running
from tests.bench.mesh.asking import Asker, Told, askers, ids, run, spec
from tests.bench.mesh.row import Row, milliseconds

BYTES = 220_000
CONCURRENT = 200
STEP_MS = 10.0
PAUSE_S = 0.05  # between small requests
BEFORE_S = 4.0
STAGES = ("admit", "router_queue", "dispatch")
PARTS = (*STAGES, "tokenise")
MOST = 1 << 30  # tokens that may wait for prefill at a worker


def measure(home: Path) -> list[Row]:
    """Both sides."""
    engine = {"max_seqs": 1024, "max_batch_tokens": 100_000_000, "kv_blocks": 4_000_000}
    router = {**WIDE["router"], "batch": {"prefill_tokens": MOST}}
    with running(
        home / "mesh", engine=engine, flags={"step-ms": STEP_MS}, settings={**WIDE, "router": router}
    ) as fleet:
        large, before, meanwhile = run(_both(fleet))
    beyond = [each.added_s - each.receipt.tokenise_ms / 1e3 for each in large]
    tokenise = statistics.median(each.receipt.tokenise_ms for each in large)
    was, now = (milliseconds([each.first_s for each in told], 0.5) for told in (before, meanwhile))
    parts = {name: statistics.median(getattr(each.receipt, f"{name}_ms") for each in large) for name in STAGES}
    outside = statistics.median(
        1e3 * each.added_s - sum(getattr(each.receipt, f"{n}_ms") for n in PARTS) for each in large
    )
    remark = (
        f"p99 {milliseconds(beyond, 0.99):.0f}; medians: "
        + ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
        + f", before acceptance and after the engine {outside:.0f}; tokenising {tokenise:,.0f} (shared threads), "
        f"total {milliseconds([each.first_s for each in large], 0.5):,.0f}"
    )
    spread = f"{len(meanwhile)} requests meanwhile: {now:.1f} ms p50 after {was:.1f}; p99 " + " after ".join(
        f"{milliseconds([each.first_s for each in told], 0.99):.1f}" for told in (meanwhile, before)
    )
    return [
        Row(
            "220 KB prompts, 200 at once: added beyond tokenising, p50",
            "ms",
            milliseconds(beyond, 0.5),
            100,
            remark=remark,
        ),
        Row("others' first token meanwhile, p50 ratio", "×", round(now / was, 2), 1.5, remark=spread),
    ]


async def _both(fleet: Fleet) -> tuple[Sequence[Told], Sequence[Told], Sequence[Told]]:
    texts = [language.text(seed, BYTES) for seed in range(CONCURRENT)]
    async with askers(fleet) as (asker, *_), asyncio.TaskGroup() as group:
        small = Small(asker)
        running = group.create_task(small.run())
        await asyncio.sleep(BEFORE_S)
        before = small.take()
        async with asyncio.TaskGroup() as burst:
            tasks = [burst.create_task(asker.stream(spec(text, 2))) for text in texts]
        meanwhile = small.take()
        running.cancel()
    return [task.result() for task in tasks], before, meanwhile


class Small:
    """Small requests, one after the other."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._told: list[Told] = []

    async def run(self) -> None:
        """Until cancelled."""
        number = 0
        while True:
            number += 1
            self._told.append(await self._asker.stream(spec(ids(number, 32), 2)))
            await asyncio.sleep(PAUSE_S)

    def take(self) -> list[Told]:
        """Those since the last call."""
        told, self._told = self._told, []
        return told
