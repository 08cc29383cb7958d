"""Writing and mapping safetensors files, one tensor at a time.

The one rule: bytes are hashed while they pass, so a file is never read twice, and memory use is one tensor whatever
the file's size. The format is public: u64 header length, JSON header, tensors back to back.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from workers.weights.manifest import ArtefactError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000
_ALIGNMENT = 64  # of the first tensor: mapped tensors can be read with wide vector loads


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a tensor lies in a file: absolute offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Written:
    """What was written: the tensors with their hashes, and the file's size and hash."""

    tensors: tuple[tuple[Placed, str], ...]
    size: int
    sha256: str
    header_sha256: str


def write_tensors(
    path: Path,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    dtype: torch.dtype,
    read: Callable[[str], torch.Tensor],
    progress: Callable[[float], None],
) -> Written:
    """Write the tensors named in `shapes`, asking `read` for each in turn (any float dtype; converted to `dtype`)."""
    placed, header = _layout(shapes, _NAMES[dtype], dtype.itemsize)
    total = placed[-1].offset + placed[-1].size if placed else len(header)
    whole, tensors = hashlib.sha256(header), []
    with path.open("xb") as file, ThreadPoolExecutor(2) as pool:
        file.write(header)
        for each in placed:
            content = _bytes_of(read(each.name).to(dtype).contiguous())
            own, counted = pool.submit(hashlib.sha256, content), pool.submit(whole.update, content)
            file.write(content)
            counted.result()
            tensors.append((each, own.result().hexdigest()))
            progress((each.offset + each.size) / total)
    return Written(tuple(tensors), total, whole.hexdigest(), hashlib.sha256(header).hexdigest())


def _layout(shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: str, itemsize: int) -> tuple[list[Placed], bytes]:
    offset, placed = 0, []
    for name, shape in shapes:
        size = itemsize * torch.Size(shape).numel()
        placed.append(Placed(name, shape, dtype, offset, size))
        offset += size
    entries = {
        each.name: {"dtype": dtype, "shape": each.shape, "data_offsets": (each.offset, each.offset + each.size)}
        for each in placed
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return [replace(each, offset=each.offset + len(header)) for each in placed], header


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    content: npt.NDArray[np.uint8] = tensor.flatten().view(torch.uint8).numpy()
    return content.data


class TensorFile:
    """A mapped safetensors file. Tensors are views of the mapping; it lives as long as they do."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            with path.open("rb") as file:
                header = _read_header(file, path.name, path.stat().st_size)
                self.header_sha256 = hashlib.sha256(header).hexdigest()
                self.placed = {each.name: each for each in _parse_header(header, path.name, path.stat().st_size)}
                # Private copy-on-write: nothing is ever written, but torch insists on writable memory.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as error:
            raise ArtefactError(path.name, "missing") from error

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._map)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, a view."""
        placed = self.placed[name]
        dtype = DTYPES[placed.dtype]
        if not placed.size:
            return torch.empty(placed.shape, dtype=dtype)
        count = placed.size // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=placed.offset).view(placed.shape)

    def sha256(self, name: str) -> str:
        """sha256 of the tensor's bytes; drops the interpreter lock while hashing."""
        placed = self.placed[name]
        with memoryview(self._map)[placed.offset : placed.offset + placed.size] as content:
            return hashlib.sha256(content).hexdigest()

    def drop_pages(self) -> None:
        """Hand the mapped pages back to the system; the next look reads them again."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(file: BinaryIO, name: str, size: int) -> bytes:
    """The length field and the JSON after it."""
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER
    if length > min(size - 8, _MAX_HEADER):
        raise ArtefactError(name, "cut short: the header ends beyond the file")
    return start + file.read(length)


def _parse_header(header: bytes, name: str, size: int) -> list[Placed]:
    try:
        entries = json.loads(header[8:])
        placed = [_placed(key, entry, len(header)) for key, entry in entries.items() if key != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(name, "damaged: the header cannot be read") from error
    end = len(header)
    for each in sorted(placed, key=lambda each: each.offset):
        if each.offset != end or each.size != DTYPES[each.dtype].itemsize * torch.Size(each.shape).numel():
            raise ArtefactError(each.name, f"misplaced in {name}")
        end += each.size
        if end > size:
            raise ArtefactError(each.name, f"cut short: it ends beyond {name}")
    if end != size:
        raise ArtefactError(name, f"{size - end} bytes too long")
    return placed


def _placed(name: str, entry: dict[str, list[int] | str], start: int) -> Placed:
    first, last = (int(offset) for offset in entry["data_offsets"])
    dtype = str(entry["dtype"])
    if dtype not in DTYPES or not 0 <= first <= last:
        raise ValueError(name)
    return Placed(name, tuple(int(n) for n in entry["shape"]), dtype, start + first, last - first)
