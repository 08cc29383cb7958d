"""What a number was measured on. The one rule: no result is written without it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def write_result(
    path: Path, machine: Mapping[str, object], command: str, rows: Sequence[object], **more: object
) -> None:
    """Rows and how they came about (`machine_facts` from before), as JSON; the file appears whole."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {"machine": machine, "command": command, "date": date, **more, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.replace(path)


def machine_facts() -> dict[str, object]:
    """CPU, memory, GPUs if there are any, software, and how busy the machine was just before."""
    cpu = _field("/proc/cpuinfo", "model name")
    flags = set(_field("/proc/cpuinfo", "flags").split())
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "simd": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if name in flags],
        "memory_mib": int(_field("/proc/meminfo", "MemTotal").split()[0]) // 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "load_average": round(os.getloadavg()[0], 2),
        **({"gpus": found} if (found := _gpus()) else {}),
    }


def _gpus() -> list[str]:
    """Name, memory, driver, highest clock and power limit of each GPU, as its driver says; none where there is none."""
    if not shutil.which("nvidia-smi"):
        return []
    query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return said.stdout.splitlines() if said.returncode == 0 else []


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown 0"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
