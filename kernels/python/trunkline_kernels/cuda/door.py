"""Opening the CUDA library and calling it.

The one rule: `prepare` once per process, after the device is chosen and before anything else; a status other than OK
becomes a KernelError, and no call fails quietly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import Structure, byref, c_char_p, c_int32, c_uint32, c_void_p, sizeof
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from trunkline_kernels.cuda.build import is_current, library_path
from trunkline_kernels.door import KernelError, KernelsMissing

ABI_VERSION = 1
PDL = 1  # flag: may start before the kernel before it has ended
Address = int


class Args(Structure):
    """What every argument struct begins with."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("size", c_uint32), ("flags", c_uint32))


AnyArgs = TypeVar("AnyArgs", bound=Args)


def arguments(kind: type[AnyArgs], flags: int = 0, **fields: Any) -> AnyArgs:
    """An argument struct with its size filled in."""
    return kind(size=sizeof(kind), flags=flags, **fields)


@functools.cache
def library() -> ctypes.CDLL:
    """The opened library; raises KernelsMissing with what to do. Needs no GPU and no driver."""
    path = library_path()
    if not path.exists():
        raise KernelsMissing(f"the CUDA kernels are not built ({path.name} is missing): run make kernels-cuda")
    opened = open_library(path)
    if not is_current(opened.tl_cuda_build_key().decode()):
        raise KernelsMissing("the CUDA kernels were built from other sources: run make kernels-cuda")
    return opened


def open_library(path: Path) -> ctypes.CDLL:
    """Open a library file whatever it was built from; raises KernelsMissing if it is not one of this ABI."""
    try:
        opened = ctypes.CDLL(str(path))
        opened.tl_cuda_abi_version.restype = c_int32
        opened.tl_cuda_init.restype = c_int32
        opened.tl_cuda_build_key.restype = opened.tl_cuda_status_text.restype = c_char_p
    except (OSError, AttributeError) as error:
        raise KernelsMissing(f"the CUDA kernels cannot be opened ({error}): run make kernels-cuda") from error
    if opened.tl_cuda_abi_version() != ABI_VERSION:
        found = opened.tl_cuda_abi_version()
        raise KernelsMissing(f"the CUDA kernels have ABI {found}, not {ABI_VERSION}: run make kernels-cuda")
    return opened


def prepare() -> None:
    """Check the current device and ready its kernels; raises KernelError if they cannot run on it."""
    check("tl_cuda_init", library().tl_cuda_init())


def call(name: str, args: Args, stream: int) -> None:
    """Put the call on the stream; raises KernelError if it is refused."""
    check(name, function(name, c_void_p, c_void_p)(byref(args), stream))


@functools.cache
def function(name: str, *types: Any) -> Any:
    """A function of the library that takes `types` and answers with a status."""
    found = getattr(library(), name)
    found.argtypes, found.restype = types, c_int32
    return found


def check(name: str, status: int) -> None:
    """Raises KernelError with the words of a status that is not OK."""
    if status:
        text: bytes = library().tl_cuda_status_text(status)
        raise KernelError(f"{name}: {text.decode()}")
