"""The gateway's edge: how many tokens a second one process tells its clients when more come than it can tell one by
one.

Clients run in processes of their own. The engine offers a quarter more than the target; what is measured is tokens for
each second of the gateway's CPU time, since the machine is shared with engine, door and clients.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench.fleet import MODEL, Fleet, running
from tests.bench.mesh.row import Row
from trunkctl.bench.clients import Target
from trunkctl.bench.load import Pace
from trunkctl.bench.measures import Outcome
from trunkctl.bench.processes import Job, run_load
from trunkctl.bench.workload import Lengths, Mix

TARGETS = {64: 15_000, 512: 40_000}  # streams: tokens a second
OFFERED = 1.25  # of the target
SECONDS = 8.0
PROMPT = 16


def measure(home: Path) -> list[Row]:
    """Both protocols, both numbers of streams."""
    return [
        _row(Path(tempfile.mkdtemp(dir=home)), protocol, streams)
        for streams in TARGETS
        for protocol in ("grpc", "openai-http")
    ]


def _row(home: Path, protocol: str, streams: int) -> Row:
    step_s = streams / (TARGETS[streams] * OFFERED)
    tokens = round(SECONDS / step_s)
    engine = {"max_seqs": streams, "max_batch_tokens": 65_536, "kv_blocks": 1_000_000}
    with running(home / "mesh", engine=engine, flags={"step-ms": 1e3 * step_s}) as fleet:
        before = {name: fleet.cpu_s(name) for name in ("gateway-1", "worker-1", "worker-1/engine")}
        outcomes, client_cpu = _load(fleet, protocol, streams, tokens)
        used = {name: fleet.cpu_s(name) - was for name, was in before.items()}
    got = sum(outcome.tokens for outcome in outcomes)
    pieces = sum(len(outcome.times) for outcome in outcomes)
    wall = max(outcome.ended for outcome in outcomes) - min(outcome.times[0] for outcome in outcomes)
    assert got == streams * tokens, [outcome.error for outcome in outcomes if outcome.error][:3]
    remark = (
        f"{got / wall:,.0f}/s by the wall, {used['gateway-1'] / wall:.2f} CPUs, {got / pieces:.1f} tokens a piece; "
        f"CPUs: door {used['worker-1'] / wall:.2f}, engine {used['worker-1/engine'] / wall:.2f}, "
        f"busiest client {client_cpu:.2f}"
    )
    name = "gRPC" if protocol == "grpc" else "HTTP"
    value = round(got / used["gateway-1"])
    return Row(f"gateway edge, {streams} streams, {name}", "tok/s", value, TARGETS[streams], "least", remark)


def _load(fleet: Fleet, protocol: str, streams: int, tokens: int) -> tuple[Sequence[Outcome], float]:
    target = Target(
        protocol="grpc" if protocol == "grpc" else "openai-http",
        addresses=tuple(fleet.grpc if protocol == "grpc" else fleet.http),
        key=fleet.key,
        model=MODEL,
        timeout_s=300.0,
        temperature=0.0,
        ignore_eos=True,
    )
    mix = Mix(seed=1, prompt=Lengths(PROMPT), output=Lengths(tokens), vocab=8192)
    pace = Pace(rate=None, concurrency=streams, seconds=None, count=streams)
    processes = max(2, min(8, len(os.sched_getaffinity(0)) // 3))
    results = run_load(Job(target, mix, pace, warm_up=0), processes)
    return [each for result in results for each in result.outcomes], max(result.health.cpu for result in results)
