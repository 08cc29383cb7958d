"""Building the CPU library with nothing but a C++ compiler: `python -m trunkline_kernels.build`.

The one rule: the library carries a key of its sources, flags and processor; it is rebuilt when the key changes, and
never opened when the key is not the one of this machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE.parents[1]  # kernels/, in a checkout
NAME = "libtrunkline_cpu.so"
# No -ffast-math, no contraction: the compiler changes neither the order of sums nor their rounding, so that bits are
# what the sources say on every compiler.
FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread",
    "-Wall", "-Wextra",
)  # fmt: skip
# For this very processor where the compiler can; the library's key holds the processor's features.
TARGETS = (("-march=native",), ("-mcpu=native",), ("-mavx2", "-mfma"), ())


class BuildError(RuntimeError):
    """The library could not be built; the message is for people."""


def library_path() -> Path:
    """Where the library lies: beside this file."""
    return PACKAGE / NAME


@functools.cache
def build_key() -> str:
    """Names the sources, the flags and the processor's features."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in (*_units(), *_headers()):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(_processor().encode())
    return digest.hexdigest()[:24]


def build(target: Path | None = None, targets: Sequence[Sequence[str]] = TARGETS) -> bool:
    """Build the library unless it is current; True if it was built. Raises BuildError.

    `target` is the file to make (beside this one); `targets` are sets of processor flags, the first that works is used.
    """
    target = target or library_path()
    if carries(target, build_key()):
        return False
    if not _units():
        raise BuildError(f"the kernel sources are not in {SOURCES}")
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="trunkline-kernels-") as scratch:
        flags = [*FLAGS, *_target_flags(compiler, targets, Path(scratch)), f'-DTL_BUILD_KEY="{build_key()}"']
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda unit: _compile(compiler, flags, unit, Path(scratch)), _units()))
        linked = Path(scratch) / NAME
        run([*compiler, "-shared", "-pthread", "-o", str(linked), *map(str, objects)])
        install(linked, target)
    return True


def run(command: Sequence[str]) -> str:
    """Run a compiler; what it wrote to its standard error. Raises BuildError with that if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)}\n{result.stderr.strip()}")
    return result.stderr


def install(linked: Path, target: Path) -> None:
    """Put a finished library in its place, at once: whoever has the old one mapped keeps it."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copy(linked, draft)
    draft.replace(target)


def carries(path: Path, key: str) -> bool:
    """Whether a built library carries this key; read without running it."""
    return path.exists() and key.encode() in path.read_bytes()


def _units() -> list[Path]:
    return sorted((SOURCES / "src").rglob("*.cc"))


def _headers() -> list[Path]:
    inner = (path for folder in ("abi", "cpu") for path in (SOURCES / "src" / folder).glob("*.h"))
    return sorted((*inner, SOURCES / "include" / "tl_kernels.h"))


def _compile(compiler: Sequence[str], flags: Sequence[str], unit: Path, scratch: Path) -> Path:
    out = scratch / f"{unit.parent.name}-{unit.stem}.o"
    run([*compiler, *flags, "-c", str(unit), "-o", str(out)])
    return out


def _target_flags(compiler: Sequence[str], targets: Sequence[Sequence[str]], scratch: Path) -> Sequence[str]:
    """The first set of flags this compiler accepts."""
    probe = scratch / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    for flags in targets:
        command = [*compiler, *flags, "-Werror", "-c", str(probe), "-o", str(scratch / "probe.o")]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return flags
    raise BuildError(f"{shlex.join(compiler)} cannot compile an empty program")


def find_compiler() -> list[str]:
    """The C++ compiler: $CXX, or what is on the path. Raises BuildError."""
    named = os.environ.get("CXX")
    for candidate in [named] if named else ["c++", "g++", "clang++"]:
        command = shlex.split(candidate)
        if shutil.which(command[0]):
            return command
    raise BuildError(f"building the kernels needs a C++ compiler ({named or 'c++, g++ or clang++'}); none was found")


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "CPU part", "model name")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def said(name: str, build: Callable[[], bool]) -> int:
    """Build, say what was done with the library `name`, and answer with an exit code."""
    try:
        built = build()
    except BuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{'built' if built else 'current'}: {name}\n")
    return 0


def main() -> int:
    """See `said`."""
    return said(NAME, build)


if __name__ == "__main__":
    sys.exit(main())
