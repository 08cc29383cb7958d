"""The GGUF reader: exact numbers from every block type, and a plain refusal of everything else."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.checkpoints import ARRAY, STRING, U32, write_gguf
from workers.weights.gguf import TYPES, GGUFError, GGUFFile

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
scales = st.floats(-100, 100, width=16)
nibbles = st.lists(st.integers(0, 15), min_size=32, max_size=32)


def read(path: Path, kind: int, shape: tuple[int, ...], content: bytes) -> np.ndarray:
    with GGUFFile(write_gguf(path, {}, [("t", shape, kind, content)])) as file:
        return file.tensor("t")


def packed_nibbles(values: list[int]) -> bytes:
    """Element i in the low half of byte i, element i + 16 in the high half."""
    return bytes(values[i] | values[i + 16] << 4 for i in range(16))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(scales, nibbles), min_size=2, max_size=2))
def test_q4_0_is_scale_times_nibble_minus_eight(tmp_path_factory: pytest.TempPathFactory, blocks: list) -> None:
    content = b"".join(struct.pack("<e", scale) + packed_nibbles(values) for scale, values in blocks)
    found = read(tmp_path_factory.mktemp("q") / "f", Q4_0, (2, 32), content)
    assert found.tolist() == [[float(np.float32(scale) * (v - 8)) for v in values] for scale, values in blocks]


@settings(max_examples=30, deadline=None)
@given(scales, scales, nibbles)
def test_q4_1_is_scale_times_nibble_plus_minimum_rounded_to_fp32(
    tmp_path_factory: pytest.TempPathFactory, scale: float, least: float, values: list[int]
) -> None:
    content = struct.pack("<ee", scale, least) + packed_nibbles(values)
    found = read(tmp_path_factory.mktemp("q") / "f", Q4_1, (1, 32), content)
    assert found.tolist() == [[float(np.float32(scale * v + least)) for v in values]]


@settings(max_examples=30, deadline=None)
@given(scales, st.lists(st.integers(-128, 127), min_size=32, max_size=32))
def test_q8_0_is_scale_times_signed_byte(
    tmp_path_factory: pytest.TempPathFactory, scale: float, values: list[int]
) -> None:
    content = struct.pack("<e32b", scale, *values)
    found = read(tmp_path_factory.mktemp("q") / "f", Q8_0, (1, 32), content)
    assert found.tolist() == [[float(np.float32(scale) * v) for v in values]]


def test_floats_of_every_width_come_out_exactly(tmp_path: Path) -> None:
    values = [0.0, -1.5, 65504.0, 6e-8]
    assert read(tmp_path / "a", F32, (2, 2), struct.pack("<4f", *values)).flatten().tolist() == [
        float(np.float32(value)) for value in values
    ]
    assert read(tmp_path / "b", F16, (4,), struct.pack("<4e", *values)).tolist() == [
        float(np.float16(value)) for value in values
    ]
    upper = [struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in values]
    assert read(tmp_path / "c", BF16, (4,), struct.pack("<4H", *upper)).tolist() == [
        struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in upper
    ]


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "f", {"a": (STRING, "é"), "b": (U32, 7), "c": (ARRAY, (STRING, ["x", ""])), "d": (7, True)}, []
    )
    with GGUFFile(path) as file:
        assert file.metadata == {"a": "é", "b": 7, "c": ["x", ""], "d": True}


@pytest.mark.parametrize(("kind", "name"), [(12, "Q4_K"), (6, "Q5_0"), (39, "MXFP4"), (200, "number 200")])
def test_another_tensor_type_is_refused_by_its_name(tmp_path: Path, kind: int, name: str) -> None:
    path = write_gguf(tmp_path / "f", {}, [("blk.0.attn_q.weight", (256,), kind, b"\0" * 999)])
    with pytest.raises(GGUFError, match=f"'blk.0.attn_q.weight' has type {name}.*not supported"):
        GGUFFile(path)


def test_a_file_cut_anywhere_is_refused_as_cut_short(tmp_path: Path) -> None:
    whole = write_gguf(
        tmp_path / "f", {"k": (ARRAY, (STRING, ["abc", "d"])), "n": (U32, 1)}, [("t", (2, 32), Q8_0, b"\1" * 68)]
    ).read_bytes()
    for length in [0, 1, *range(3, len(whole) - 28)]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(GGUFError):
            GGUFFile(tmp_path / "cut")


def test_lengths_beyond_the_file_are_refused_without_reading_them(tmp_path: Path) -> None:
    for body in (
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", ARRAY, 4, 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q1sI2QIQ", 1, b"t", 2, 1 << 40, 1 << 40, F32, 0),
    ):
        (tmp_path / "f").write_bytes(body)
        with pytest.raises(GGUFError):
            GGUFFile(tmp_path / "f")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"PK\3\4" + b"\0" * 64, "not a GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q1sI", 1, b"t", 5) + b"\0" * 64, "5 dimensions"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77), "metadata type 77"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1s", 1, b"\xff"), "not UTF-8"),
    ],
)
def test_what_is_not_gguf_is_refused_by_what_is_wrong(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(GGUFError, match=problem):
        GGUFFile(tmp_path / "f")


def test_rows_that_do_not_divide_into_blocks_and_names_used_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="do not divide"):
        GGUFFile(write_gguf(tmp_path / "a", {}, [("t", (2, 16), Q8_0, b"\0" * 34)]))
    with pytest.raises(GGUFError, match="one name"):
        GGUFFile(write_gguf(tmp_path / "b", {}, [("t", (1,), F32, b"\0" * 4)] * 2))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with GGUFFile(write_gguf(tmp_path / "f", {}, [])) as file, pytest.raises(GGUFError, match="'absent'"):
        file.tensor("absent")


def test_block_sizes_are_those_of_the_format() -> None:
    assert {each.name: (each.elements, each.bytes) for each in TYPES.values()} == {
        "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34),
    }  # fmt: skip
