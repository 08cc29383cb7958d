"""Building the CUDA library with nothing but nvcc: `python -m trunkline_kernels.cuda.build`.

The one rule: the library carries a key of its sources and flags; it is rebuilt when the key changes, and never opened
when the key is another. Where no nvcc is, nothing is built and nothing is wrong: only GPU workers need the library.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trunkline_kernels.build import PACKAGE, SOURCES, BuildError, carries, install, run, said

NAME = "libtrunkline_cuda.so"
# No -use_fast_math: it flushes denormals and changes divisions for a whole file.
FLAGS = (
    "-std=c++17", "-O3", "-lineinfo", "-Xfatbin=-compress-all", "-Xptxas=-v,-warn-spills",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
)  # fmt: skip
HOPPER = ("-gencode=arch=compute_90a,code=sm_90a",)
# Files without instructions that only Hopper has also run on what came before (8.0, 8.9) and, compiled by the driver
# from PTX, on what came after.
PORTABLE = (
    *HOPPER,
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_89,code=sm_89",
    "-gencode=arch=compute_90,code=compute_90",
)
PORTABLE_UNITS = frozenset({"abi", "linear", "rows", "step"})


def library_path() -> Path:
    """Where the library lies: beside the CPU one."""
    return PACKAGE / NAME


def find_nvcc() -> str | None:
    """The CUDA compiler: named by $NVCC, on the path, or where the toolkit installs itself."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(os.environ.get("NVCC", "nvcc")) or shutil.which(f"{home}/bin/nvcc")


@functools.cache
def build_key() -> str:
    """Names the sources and the flags."""
    digest = hashlib.sha256(" ".join((*FLAGS, *PORTABLE, *sorted(PORTABLE_UNITS))).encode())
    for path in (*_units(), *_headers()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def is_current(key: str) -> bool:
    """Whether a library's key is that of the sources; where there are no sources (in a wheel), any is."""
    return not _units() or key == build_key()


def build(target: Path | None = None, report: Callable[[str], object] = lambda text: None) -> bool:
    """Build the library unless it is current; True if it was built. Raises BuildError.

    `target` is the file to make (beside the package); `report` gets what the compiler says of registers and spills.
    """
    target = target or library_path()
    if carries(target, build_key()):
        return False
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("building the CUDA kernels needs nvcc of CUDA 12.8 or newer; none was found ($NVCC names one)")
    if not _units():
        raise BuildError(f"the kernel sources are not in {SOURCES}")
    with tempfile.TemporaryDirectory(prefix="trunkline-kernels-") as scratch:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(lambda unit: _compile(nvcc, unit, Path(scratch)), _units()))
        linked = Path(scratch) / NAME
        # The runtime is linked in: it shares the device's primary context with torch's, and no version must match.
        run([nvcc, "-shared", "-cudart=static", "-o", str(linked), *(str(out) for out, _ in compiled)])
        install(linked, target)
    for _, words in compiled:
        report(words)
    return True


def _units() -> list[Path]:
    return sorted((SOURCES / "src" / "cuda").glob("*.cu"))


def _headers() -> list[Path]:
    own = (path for pattern in ("*.h", "*.cuh") for path in (SOURCES / "src" / "cuda").glob(pattern))
    shared = (path for folder in ("src", "src/abi", "include") for path in (SOURCES / folder).glob("*.h"))
    return sorted((*own, *shared))


def _compile(nvcc: str, unit: Path, scratch: Path) -> tuple[Path, str]:
    """The object file, and what the compiler said."""
    out = scratch / f"{unit.stem}.o"
    targets = PORTABLE if unit.stem in PORTABLE_UNITS else HOPPER
    key = f'-DTL_BUILD_KEY="{build_key()}"'
    return out, run([nvcc, *FLAGS, *targets, key, "-c", str(unit), "-o", str(out)])


def main() -> int:
    """Build, say what was done, and answer with an exit code. `-v` prints registers and spills of every kernel."""
    if find_nvcc() is None:
        sys.stdout.write(f"skipped: {NAME} needs nvcc, and none was found; only GPU workers need it\n")
        return 0
    report = sys.stdout.write if "-v" in sys.argv[1:] else lambda text: None
    return said(NAME, lambda: build(report=report))


if __name__ == "__main__":
    sys.exit(main())
