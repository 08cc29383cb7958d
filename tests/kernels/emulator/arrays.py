"""bf16 in numpy: arrays of its bits, guarded like those of `tests.kernels.guarded`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.kernels.guarded import Guarded, poisoned

NAN = 0x7FFF
Bits = npt.NDArray[np.uint16]


def to_bf16(values: npt.ArrayLike) -> Bits:
    """The nearest bf16, ties to even; finite values only."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def exact(bits: Bits) -> npt.NDArray[np.float64]:
    """The values, in fp64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def poisoned_bf16(*shape: int) -> Guarded:
    """A bf16 array of NaN; its last extent is even."""
    memory = poisoned(*shape[:-1], shape[-1] // 2)
    array = memory.array.view(np.uint16)
    array[...] = NAN
    return Guarded(memory.memory, array)


def guarded_bf16(bits: Bits) -> Guarded:
    """A copy of an array of bf16."""
    copy = poisoned_bf16(*bits.shape)
    copy.array[...] = bits
    return copy
