"""Kernel tests run on every build that users may get: this processor's own, AVX2, and the portable one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.emulator.emulated import Emulator, emulate
from trunkline_kernels.build import TARGETS, BuildError, build, find_compiler, library_path
from trunkline_kernels.door import Context, open_library

VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "native": TARGETS,
    # Tuned for a processor on which compilers like to split chains of fused multiply-adds, in some loops only.
    "avx2": (("-mavx2", "-mfma", "-mtune=znver3"),),
    "portable": ((),),
}


def _runs_here(variant: str) -> bool:
    if variant != "avx2":
        return True
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx2" in flags and "fma" in flags


@pytest.fixture(scope="session", params=VARIANTS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library, built for one of the variants."""
    variant: str = request.param
    if not _runs_here(variant):
        pytest.skip(f"this processor has no {variant}")
    # The processor's own build is the one that set-up made.
    path = library_path() if variant == "native" else tmp_path_factory.mktemp("kernels") / f"{variant}.so"
    build(path, VARIANTS[variant])
    return open_library(path)


@pytest.fixture(scope="session")
def context(opened: ctypes.CDLL) -> Context:
    """Two threads, as many as the smallest machine has cores."""
    return Context(2, opened)


@pytest.fixture(scope="session")
def single(opened: ctypes.CDLL) -> Context:
    """One thread: no other may answer otherwise."""
    return Context(1, opened)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """fp32 standard normal values of a shape."""
    return lambda *shape: rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """The CUDA library's code, compiled for the CPU."""
    try:
        find_compiler()
    except BuildError as missing:
        pytest.skip(str(missing))
    return emulate(tmp_path_factory.mktemp("emulator"))
