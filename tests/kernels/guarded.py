"""Arrays with guard bytes around them, poisoned with NaN: what a kernel leaves out or overruns shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

GUARD = 64  # bytes before and after
PATTERN = 0xA5


@dataclass(frozen=True)
class Guarded:
    """`array` lies inside `memory`, GUARD bytes from either end, aligned to 64 bytes."""

    memory: npt.NDArray[np.uint8]
    array: npt.NDArray[np.float32]

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    @property
    def intact(self) -> bool:
        start = self.address - self.memory.ctypes.data
        end = start + self.array.nbytes
        return bool((self.memory[:start] == PATTERN).all() and (self.memory[end:] == PATTERN).all())


def poisoned(*shape: int) -> Guarded:
    """An fp32 array of NaN."""
    size = 4 * int(np.prod(shape))
    memory = np.full(size + 3 * GUARD, PATTERN, dtype=np.uint8)
    start = GUARD + -(memory.ctypes.data + GUARD) % 64
    array = memory[start : start + size].view(np.float32).reshape(shape)
    array[...] = np.nan
    return Guarded(memory, array)


def guarded(values: npt.ArrayLike) -> Guarded:
    """A copy of `values` as fp32."""
    source = np.asarray(values, dtype=np.float32)
    copy = poisoned(*source.shape)
    copy.array[...] = source
    return copy


@contextmanager
def untouched(*arrays: Guarded) -> Iterator[None]:
    """The arrays are the same afterwards, bit for bit."""
    before = [each.array.tobytes() for each in arrays]
    yield
    assert [each.array.tobytes() for each in arrays] == before
    assert all(each.intact for each in arrays)


def ints(values: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Contiguous int32."""
    return np.ascontiguousarray(values, dtype=np.int32)
