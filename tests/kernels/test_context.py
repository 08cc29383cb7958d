"""Contexts, builds and the door: what happens around the operators."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.guarded import guarded, poisoned
from trunkline_kernels import build as building
from trunkline_kernels import door
from trunkline_kernels.door import Context, KernelError, KernelsMissing


def test_the_builds_really_use_different_instructions(context: Context, request: pytest.FixtureRequest) -> None:
    variant = request.node.callspec.params["opened"]
    assert context.isa == variant or variant == "native"


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_an_impossible_number_of_threads_is_refused(opened: ctypes.CDLL, threads: int) -> None:
    with pytest.raises(KernelError, match="count"):
        Context(threads, opened)


def test_more_threads_than_cores_end_every_job_and_end_themselves(opened: ctypes.CDLL) -> None:
    x, weight = guarded(np.ones((64, 32), np.float32)), guarded(np.ones(32, np.float32))
    before = len(list(Path("/proc/self/task").iterdir()))
    for threads in (1, 2, 5, 16):
        context, out = Context(threads, opened), poisoned(64, 32)
        for _ in range(200):
            context.rms_norm(x.address, weight.address, out.address, 64, 32, 1e-5)
        assert not np.isnan(out.array).any()
        del context
    assert len(list(Path("/proc/self/task").iterdir())) == before


def test_contexts_of_different_threads_do_not_disturb_one_another(opened: ctypes.CDLL) -> None:
    x, weight = guarded(np.ones((64, 32), np.float32)), guarded(np.ones(32, np.float32))

    def work(_: int) -> bytes:
        context, out = Context(2, opened), poisoned(64, 32)
        for _ in range(100):
            context.rms_norm(x.address, weight.address, out.address, 64, 32, 1e-5)
        return out.array.tobytes()

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(work, range(3)))) == 1


def test_a_missing_library_says_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(door, "library_path", lambda: tmp_path / "absent.so")
    door.library.cache_clear()
    with pytest.raises(KernelsMissing, match="make kernels"):
        door.library()
    door.library.cache_clear()


def test_a_library_built_from_other_sources_is_not_used(
    opened: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "old.so"
    copy.write_bytes(Path(opened._name).read_bytes())
    monkeypatch.setattr(door, "library_path", lambda: copy)
    monkeypatch.setattr(door, "build_key", lambda: "another key")
    door.library.cache_clear()
    with pytest.raises(KernelsMissing, match="other sources"):
        door.library()
    door.library.cache_clear()


def test_a_damaged_library_says_what_to_run(tmp_path: Path) -> None:
    path = tmp_path / "damaged.so"
    path.write_bytes(b"not a library")
    with pytest.raises(KernelsMissing, match="make kernels"):
        door.open_library(path)


def test_building_again_is_quick_and_changes_nothing() -> None:
    path = building.library_path()
    building.build()
    stamp = path.stat().st_mtime_ns
    result = subprocess.run(
        [sys.executable, "-m", "trunkline_kernels.build"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("current")
    assert path.stat().st_mtime_ns == stamp


def test_a_machine_without_a_compiler_gets_a_plain_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(building.BuildError, match="needs a C\\+\\+ compiler"):
        building.build(tmp_path / "new.so")


def test_the_header_is_plain_c99(tmp_path: Path) -> None:
    unit = tmp_path / "unit.c"
    unit.write_text('#include "tl_kernels.h"\nint main(void) { return tl_abi_version() - TL_ABI_VERSION; }\n')
    include = building.SOURCES / "include"
    flags = ["-x", "c", "-std=c99", "-pedantic-errors", "-Wall", "-Wextra", "-Werror", "-I", str(include), "-c"]
    subprocess.run([*building.find_compiler(), *flags, str(unit), "-o", str(tmp_path / "unit.o")], check=True)
