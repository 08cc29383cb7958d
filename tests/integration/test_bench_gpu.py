"""The GPU benches run through: on the CPU, with a tiny model of random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.checkpoints import CONFIG
from workers.weights.random_model import SHAPES, make_random


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with room for the longest request."""
    monkeypatch.setitem(SHAPES, "tiny", {**CONFIG, "bos_token_id": 1, "max_position_embeddings": 16_384})
    make_random(tmp_path / "tiny", "tiny")
    return tmp_path / "tiny"


def run(module: str, *flags: str, timeout_s: float = 50) -> str:
    """Runs a bench to its end and answers what it printed; it and what it started are gone afterwards."""
    with _group([sys.executable, "-m", f"tests.bench.{module}", *flags]) as child:
        said, complaint = child.communicate(timeout=timeout_s)
        assert child.returncode == 0, complaint
    return said


@contextmanager
def _group(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as child:
        try:
            yield child
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


@pytest.mark.parametrize("mode", ["fused", "standard"])
def test_every_kind_of_row_of_the_engine_is_measured_and_written(mode: str, model: Path, tmp_path: Path) -> None:
    sizes = ("--prompt=20", "--tokens=5", "--batches", "1", "2", "--workloads", "3x8/4", "--max-seqs=4")
    engine = ("--max-batch-tokens=32", "--threads=1", "--device=cpu", f"--kernel-mode={mode}", "--shape=135m")
    said = run("engine_gpu", *engine, f"--model={model}", f"--out={tmp_path / 'result.json'}", *sizes)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["machine"]["cpus"]
    assert result["engine"]["kernel_mode"] == mode
    for row in result["rows"]:
        assert row["value"] > 0
        assert (row["shape"], row["tp"], row["pp"], row["mode"]) == ("135m", 1, 1, mode)
        assert "peer" not in row, "other lengths than the targets' are not held against them"
    assert [(row.get("batch"), row.get("workload"), row["metric"]) for row in result["rows"]] == [
        (1, None, "ttft_ms"),
        (1, None, "tpot_ms"),
        (2, None, "ttft_ms"),
        (2, None, "tpot_ms"),
        (None, "3x8/4", "out_tok_s"),
    ]
    assert len([line for line in said.splitlines() if line.startswith("135m ")]) == len(result["rows"])


@pytest.mark.timeout(150)
def test_the_online_load_streams_from_a_whole_mesh_and_is_written(model: Path, tmp_path: Path) -> None:
    engine = ("--device=cpu", "--kernel-mode=fused", "--shape=135m", "--max-batch-tokens=256", "--max-seqs=16")
    load = ("--servers", "trunkline", "--rates", "4", "--seconds=1")
    run("online_gpu", *engine, f"--model={model}", f"--out={tmp_path / 'online.json'}", *load, timeout_s=140)
    (row,) = json.loads((tmp_path / "online.json").read_text())["rows"]
    assert (row["server"], row["shape"], row["mode"], row["rate"]) == ("trunkline", "135m", "fused", 4)
    assert row["completed"] == row["sent"] > 0
    assert row["errors"] == 0
    assert row["itl_ms"][0] > 0
