"""`make bench`, second half: time to first token and what each hop of the real mesh costs, on the real model.

Starts a mesh of its own, asks it one request at a time and then many at once, and reads the answers' receipts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.facts import machine_facts, write_result
from tests.e2e.harness import Answer, Mesh, clients, spec
from trunkline.inference.v1 import inference_pb2

STAGES = (
    "admit_ms", "tokenise_ms", "router_queue_ms", "dispatch_ms", "worker_queue_ms", "prefill_ms", "decode_ms",
    "detokenise_ms", "client_wait_ms", "unattributed_ms",
)  # fmt: skip
HOPS = ("admit_ms", "tokenise_ms", "router_queue_ms", "dispatch_ms")  # what the mesh adds before the engine's own work
RESULT = Path(__file__).parent / "results" / "cpu" / "mesh.json"


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _spec(index: int, tokens: int) -> inference_pb2.GenerationSpec:
    """A short prompt given as token ids, so that no tokenising is measured."""
    return spec([100 + index, 504, 3575, 282, 4649, 314], tokens, ignore_eos=True)


async def _one_by_one(mesh: Mesh, count: int) -> list[Answer]:
    async with clients(mesh) as (client, *_):
        return [
            await client.stream(spec([100 + i, 504, 3575, 282, 4649, 314], 16, ignore_eos=True)) for i in range(count)
        ]


async def _at_once(mesh: Mesh, count: int) -> list[Answer]:
    async with clients(mesh) as (client, *_), asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.stream(_spec(i, 32))) for i in range(count)]
    return [task.result() for task in tasks]


def _row(name: str, answers: list[Answer]) -> dict[str, object]:
    stages = {stage: statistics.median(getattr(answer.receipt, stage) for answer in answers) for stage in STAGES}
    added = [sum(getattr(answer.receipt, hop) for hop in HOPS) for answer in answers]
    first = [answer.first_s * 1e3 for answer in answers]
    return {
        "workload": name,
        "ttft_ms_p50": quantile(first, 0.5),
        "ttft_ms_p99": quantile(first, 0.99),
        "mesh_added_ms_p50": quantile(added, 0.5),
        "mesh_added_ms_p99": quantile(added, 0.99),
        "itl_ms_p50": statistics.median(gap * 1e3 for answer in answers for gap in answer.gaps_s),
        **{f"{stage}_p50": value for stage, value in stages.items()},
    }


def main() -> None:
    """Measures, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--models", type=Path, default=Path(".trunkline/models"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        mesh = Mesh.start(Path(home) / "mesh", args.models.absolute())
        try:
            asyncio.run(_one_by_one(mesh, 3))  # warms caches and connections
            rows = [_row("idle, one at a time", asyncio.run(_one_by_one(mesh, args.requests)))]
            rows.append(_row("16 at once", asyncio.run(_at_once(mesh, 16))))
        finally:
            mesh.stop()
    write_result(RESULT, machine_facts(), "make bench", rows)
    for key in rows[0]:
        cells = [f"{row[key]:>20.2f}" if isinstance(row[key], float) else f"{row[key]:>20}" for row in rows]
        print(f"{key:<24}" + "".join(cells))  # noqa: T201


if __name__ == "__main__":
    main()
