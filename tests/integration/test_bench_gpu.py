"""The GPU benches run through: on the CPU, with a small model of random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers.weights.random_model import make_random


@pytest.mark.parametrize("mode", ["fused", "standard"])
def test_every_kind_of_row_of_the_engine_is_measured_and_written(mode: str, tmp_path: Path) -> None:
    make_random(tmp_path / "model", "135m", layers=1)
    sizes = ("--prompt=20", "--tokens=5", "--batches", "1", "2", "--workloads", "3x8/4", "--max-seqs=4")
    engine = ("--max-batch-tokens=32", "--threads=1", "--device=cpu", f"--kernel-mode={mode}", "--shape=135m")
    files = (f"--model={tmp_path / 'model'}", f"--out={tmp_path / 'result.json'}")
    command = [sys.executable, "-m", "tests.bench.engine_gpu", *engine, *files, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
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
    assert len([line for line in done.stdout.splitlines() if line.startswith("135m ")]) == len(result["rows"])
