"""`trunkctl bench` on a real mesh with the latency-model engine."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fleet import Fleet, running

STEP_MS = 4.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("fleet") / "home"
    with running(root, engine={"max_seqs": 32}, flags={"step-ms": STEP_MS}) as fleet:
        yield fleet


def bench(fleet: Fleet, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trunkctl", "--home", str(fleet.home.root), "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    "how",
    [
        ("--protocol", "grpc", "--concurrency", "8", "--requests", "24"),
        ("--protocol", "grpc", "--rate", "40", "--requests", "24", "--processes", "2"),
        ("--protocol", "openai-http", "--vocab", "8192", "--concurrency", "8", "--requests", "24"),
        ("--protocol", "openai-http", "--text", "--rate", "40", "--requests", "24"),
    ],
)
def test_every_token_of_a_load_is_counted_and_timed(fleet: Fleet, how: tuple[str, ...], tmp_path: Path) -> None:
    files = ("--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "picture.svg"))
    done = bench(fleet, *how, "--prompt-length", "16,0.5,4,64", "--output-length", "12", *files)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "to first token" in done.stdout
    report: dict[str, Any] = json.loads((tmp_path / "figures.json").read_bytes())["report"]
    assert (report["sent"], report["completed"], report["errors"]) == (24, 24, {})
    assert report["output_tokens"] == 24 * 12
    assert report["uncounted_tokens"] == 0
    assert report["ttft_ms"]["p50"] >= STEP_MS
    assert report["tpot_ms"]["p50"] >= STEP_MS
    assert report["e2e_ms"]["p50"] >= 12 * STEP_MS
    ElementTree.parse(tmp_path / "picture.svg")


def test_refusals_are_counted_by_type_and_make_the_command_fail(fleet: Fleet) -> None:
    done = bench(fleet, "--requests", "3", "--vocab", "9000000", "--prompt-length", "4")
    assert done.returncode == 1
    assert "3 BAD_FIELD" in done.stdout
    unknown = bench(fleet, "--requests", "3", "--model", "another")
    assert unknown.returncode == 1
    assert "MODEL_UNKNOWN" in unknown.stderr
