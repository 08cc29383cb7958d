"""What a number was measured on. The one rule: no result is written without it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine_facts() -> dict[str, object]:
    """CPU, memory, software, and how busy the machine was just before."""
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
    }


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
