"""What processes take before anything is asked of them: memory at rest, and time from start to taking work."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench import language
from tests.bench.fleet import Fleet, running
from tests.bench.mesh.asking import askers, ids, run, spec
from tests.bench.mesh.row import Row

STARTS = 5
SETTLE_S = 3.0
KIT = """
import pathlib, sys
import gateway.app
import tokenizers
from gateway.tokens import Tokenizer
from tests.bench.fleet import resident_mib
data = pathlib.Path(sys.argv[1]).read_bytes()
import os
before = resident_mib(os.getpid())
kept = Tokenizer(data)
print(resident_mib(os.getpid()) - before)
"""


def measure(home: Path) -> list[Row]:
    """Memory after one request, so that the tokenizer is there; then starts."""
    with running(home / "mesh", engine={}, flags={"step-ms": 5}) as fleet:
        run(_one(fleet))
        time.sleep(SETTLE_S)
        router, gateway = fleet.rss_mib("router-1"), fleet.rss_mib("gateway-1")
        started = {name: [_restart(fleet, name) for _ in range(STARTS)] for name in ("router-1", "gateway-1")}
    tokenizer = _tokenizer_mib(home)
    remark = f"{gateway:.1f} with a tokenizer of {tokenizer:.1f} ({language.VOCAB:,} tokens)"
    return [
        Row("resident at rest, router", "MiB", round(router, 1), 90),
        Row("resident at rest, gateway without tokenizer", "MiB", round(gateway - tokenizer, 1), 90, remark=remark),
        *(_start(name.removesuffix("-1"), starts) for name, starts in started.items()),
    ]


def _restart(fleet: Fleet, name: str) -> tuple[float, float]:
    """Seconds from a process's start until it takes work, and those of its CPU."""
    return fleet.restarted_s(name), fleet.cpu_s(name)


def _start(role: str, starts: list[tuple[float, float]]) -> Row:
    seconds, cpu = zip(*starts, strict=True)
    remark = f"median of {STARTS}, {min(seconds):.2f} to {max(seconds):.2f}; CPU time {statistics.median(cpu):.2f} s"
    return Row(f"start to ready, {role}", "s", round(statistics.median(seconds), 3), 1.5, remark=remark)


async def _one(fleet: Fleet) -> None:
    async with askers(fleet) as (asker, *_):
        await asker.stream(spec(ids(1, 16), 4))
        await asker.stream(spec(language.text(1, 200), 4))


def _tokenizer_mib(home: Path) -> float:
    """What the tokenizer alone takes of a gateway's memory."""
    path = home / "tokenizer.json"
    path.write_bytes(language.tokenizer_json())
    done = subprocess.run([sys.executable, "-c", KIT, str(path)], capture_output=True, text=True, check=True)
    return float(done.stdout)
