"""The CUDA library's own code, compiled for the CPU: what runs here is what nvcc compiles, but for its assembly.

A temporary copy of the sources is made, in which functions that consist of assembly are left out (`instructions.h` says
them in C++) and shared memory is the emulated block's; a C++ compiler and this folder's few lines of CUDA's headers do
the rest. No GPU, no nvcc and no toolkit are needed.

What tests with it show: indexing, masks, barriers, phases, who waits for whom, races between copies and readers and
between threads that do not wait for one another (any order of the threads may come up, and a copy's bytes land at any
moment), bounds and alignment of shared memory and of loads, divergence at a warp's collectives, that every thread waits
for the kernels before. What they cannot show: whether the assembly says what `instructions.h` says, that memory fences
suffice, the last bits of sums inside one mma, registers, time.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trunkline_kernels.build import SOURCES, find_compiler, run
from trunkline_kernels.cuda.door import open_library

HERE = Path(__file__).parent
# Warnings are nvcc's affair. A fortified longjmp() takes the fibers for a broken stack.
FLAGS = (
    "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE", "-w",
)  # fmt: skip

FUNCTION = re.compile(r"^__device__ __forceinline__ [^;{]*\{(?:[^\n]*\}\n|.*?^\}\n)", re.MULTILINE | re.DOTALL)
DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\w+\) )?(\w+) (\w+)\[\];")
STATIC = re.compile(r"__shared__ (\w+) (\w+)(\[\w+\])?;")


class EmulationError(AssertionError):
    """A kernel did what a GPU does not allow, or did not end."""


@dataclass(frozen=True)
class Emulator:
    """An emulated library, and the object files that it was linked from."""

    opened: ctypes.CDLL
    objects: Mapping[str, Path]

    def call(self, name: str, args: ctypes.Structure, reads: Iterable[np.ndarray], seed: int = 0) -> None:
        """Run a call of the library in a random order of its threads.

        Addresses in `args` are the host's; `reads` are all arrays that the kernel may load from. Raises EmulationError.
        """
        self.opened.emulator_begin(seed)
        for array in reads:
            self.opened.emulator_readable(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
        self.opened.emulator_problem.restype = ctypes.c_char_p
        status = getattr(self.opened, name)(ctypes.byref(args), None)
        if status:
            problem = self.opened.emulator_problem() or self.opened.tl_cuda_status_text(status)
            raise EmulationError(f"{name}: {problem.decode()}")


def emulate(folder: Path) -> Emulator:
    """Build the library in an empty folder, and open it."""
    _copy_sources(folder)
    units = [*sorted((folder / "src" / "cuda").glob("*.cu")), HERE / "machine.cc"]
    return _link(folder, {unit.name: _compile(folder, unit) for unit in units})


def broken(whole: Emulator, folder: Path, unit: str, line: str, instead: str) -> Emulator:
    """The library with a piece of one unit replaced, built in an empty folder: for tests of the tests."""
    _copy_sources(folder)
    copy = folder / "src" / "cuda" / unit
    text = copy.read_text()
    assert text.count(line) == 1, f"{unit} has not one {line!r}"
    copy.write_text(text.replace(line, instead))
    return _link(folder, {**whole.objects, unit: _compile(folder, copy)})


def _copy_sources(folder: Path) -> None:
    for source in (*(SOURCES / "include").glob("*.h"), *(SOURCES / "src").rglob("*.*")):
        copy = folder / source.relative_to(SOURCES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text()
        copy.write_text(_adapted(text) if source.suffix in (".cu", ".cuh") else text)


def _adapted(text: str) -> str:
    """A source without its assembly, and with emulated shared memory."""
    text = FUNCTION.sub(lambda found: "" if re.search(r"\basm\b", found[0]) else found[0], text)
    text = DYNAMIC.sub(r"\1 *const \2 = emulator::dynamic_shared<\1>();", text)
    return STATIC.sub(r"auto &\2 = emulator::shared_variable<\1\3, __LINE__>();", text)


def _compile(folder: Path, unit: Path) -> Path:
    out = folder / f"{unit.stem}.o"
    cuda = ["-I", str(HERE / "toolkit"), "-include", str(HERE / "instructions.h")]
    run([*find_compiler(), *FLAGS, *cuda, "-c", "-o", str(out), "-x", "c++", str(unit)])
    return out


def _link(folder: Path, objects: Mapping[str, Path]) -> Emulator:
    library = folder / "libemulated.so"
    run([*find_compiler(), "-shared", "-o", str(library), *map(str, objects.values()), "-ldl"])
    return Emulator(open_library(library), objects)
