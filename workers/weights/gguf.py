"""Reading GGUF files: metadata, and tensors dequantised to fp32.

The one rule: the file is untrusted. Every length is checked against the file before it is used, and a tensor type
that is not implemented is refused by its name.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NESTING = 2  # arrays of arrays; deeper ones occur in no known file

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFError(ValueError):
    """The file is not GGUF, is damaged, or holds something that is not implemented."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Elements and bytes of one block, and how `n` blocks [n, bytes] become fp32 [n, elements]."""

    name: str
    elements: int
    bytes: int
    decode: Callable[[npt.NDArray[np.uint8]], Array]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major, as in the checkpoint it came from (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # bytes from the start of the file
    size: int  # bytes


def _half(block: npt.NDArray[np.uint8], at: int) -> Array:
    """The fp16 number at byte `at` of every block, as fp32 [n, 1]."""
    return np.ascontiguousarray(block[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: npt.NDArray[np.uint8]) -> Array:
    """Low nibbles, then high nibbles: [n, b] bytes → [n, 2·b]."""
    return np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.float32)


def _q4_0(block: npt.NDArray[np.uint8]) -> Array:
    return (_nibbles(block[:, 2:]) - np.float32(8)) * _half(block, 0)


def _q4_1(block: npt.NDArray[np.uint8]) -> Array:
    return _nibbles(block[:, 4:]) * _half(block, 0) + _half(block, 2)


def _q8_0(block: npt.NDArray[np.uint8]) -> Array:
    return block[:, 2:].view(np.int8).astype(np.float32) * _half(block, 0)


def _bf16(block: npt.NDArray[np.uint8]) -> Array:
    return (block.view("<u2").astype(np.uint32) << 16).view(np.float32)


TYPES = {
    0: TensorType("F32", 1, 4, lambda block: block.view("<f4").astype(np.float32)),
    1: TensorType("F16", 1, 2, lambda block: block.view("<f2").astype(np.float32)),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    30: TensorType("BF16", 1, 2, _bf16),
}
# Names of what exists but is not read, so that a refusal says what it met.
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


class GGUFFile:
    """An open, memory-mapped GGUF file; a context manager. Raises GGUFError for anything malformed."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise GGUFError(f"{path.name} is empty")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _Reader(self._data, path.name)
        tensors, entries = reader.header()
        self.metadata: Mapping[str, Any] = dict(reader.entry() for _ in range(entries))
        self.tensors: Mapping[str, TensorInfo] = reader.tensor_table(
            tensors, int(self.metadata.get("general.alignment", 32))
        )

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def tensor(self, name: str) -> Array:
        """The tensor as fp32, in row-major shape; raises GGUFError if there is none of that name."""
        info = self.tensors.get(name)
        if info is None:
            raise GGUFError(f"tensor {name!r} is missing")
        # A copy, so that no array keeps the mapping open after the file is closed.
        raw = np.frombuffer(self._data[info.offset : info.offset + info.size], dtype=np.uint8)
        return info.type.decode(raw.reshape(-1, info.type.bytes)).reshape(info.shape)


class _Reader:
    """A cursor over the file's header."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self._at = data, name, 0

    def header(self) -> tuple[int, int]:
        """Number of tensors and of metadata entries."""
        if self._take(4) != MAGIC:
            raise GGUFError(f"{self._name} is not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            raise GGUFError(f"{self._name}: GGUF version {version} is not supported (supported: {VERSIONS})")
        return self._number("Q"), self._number("Q")

    def entry(self) -> tuple[str, Any]:
        """One metadata key and its value."""
        key = self._string()
        return key, self._value(self._number("I"), MAX_NESTING)

    def tensor_table(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """The tensors, with offsets from the start of the file."""
        entries = [self._tensor_entry() for _ in range(count)]
        start = -(-self._at // alignment) * alignment
        table = {name: self._locate(name, shape, kind, start + offset) for name, shape, kind, offset in entries}
        if len(table) != count:
            raise GGUFError(f"{self._name}: two tensors have one name")
        return table

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise GGUFError(f"{self._name}: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        return name, shape, self._number("I"), self._number("Q")

    def _locate(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        known = TYPES.get(kind)
        if known is None:
            supported = ", ".join(each.name for each in TYPES.values())
            found = _OTHER_TYPES.get(kind, f"number {kind}")
            raise GGUFError(f"tensor {name!r} has type {found}, which is not supported (supported: {supported})")
        elements = int(np.prod(shape, dtype=object))
        if shape[-1] % known.elements:
            raise GGUFError(f"tensor {name!r}: rows of {shape[-1]} do not divide into blocks of {known.elements}")
        size = elements // known.elements * known.bytes
        if offset + size > len(self._data):
            raise GGUFError(f"{self._name} is cut short: tensor {name!r} ends beyond the file")
        return TensorInfo(name, shape, known, offset, size)

    def _value(self, kind: int, nesting: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY and nesting:
            return self._array(nesting)
        raise GGUFError(f"{self._name}: unknown metadata type {kind}")

    def _array(self, nesting: int) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if count > len(self._data):
            raise GGUFError(f"{self._name} is cut short: an array of {count} values")
        if kind in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
            return list(layout.unpack(self._take(layout.size)))
        return [self._value(kind, nesting - 1) for _ in range(count)]

    def _number(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        try:
            return self._take(self._number("Q")).decode()
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self._name}: a name or text is not UTF-8") from error

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise GGUFError(f"{self._name} is cut short: the header ends beyond the file")
        taken = self._data[self._at : end]
        self._at = end
        return taken
