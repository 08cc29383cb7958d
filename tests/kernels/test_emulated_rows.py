"""The code of the CUDA library's operators on rows, run on the CPU: see `tests.kernels.emulator.emulated`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.emulator.arrays import Bits, exact, guarded_bf16, poisoned_bf16, to_bf16
from tests.kernels.emulator.emulated import Emulator
from tests.kernels.guarded import Guarded, guarded, ints, untouched
from trunkline_kernels.cuda.door import arguments
from trunkline_kernels.cuda.rows import AddRmsNormArgs, EmbedArgs, RmsNormArgs, RopeCacheArgs, SwigluArgs
from trunkline_kernels.cuda.step import StepBegin
from trunkline_kernels.door import PAGE_TOKENS

pytestmark = pytest.mark.timeout(180)  # the first test compiles
EPS = 1e-5
WIDTHS = pytest.mark.parametrize("width", [8, 264, 576, 8200, 16384])
OUTSIDE = (-1, 2**31 - 1, -(2**31))


def normal(rng: np.random.Generator, *shape: int) -> Guarded:
    return guarded_bf16(to_bf16(rng.standard_normal(shape)))


def assert_close(found: Bits, wanted: np.ndarray, roundings: int = 1) -> None:
    """Within so many roundings to bf16 of the exact values; no NaN."""
    np.testing.assert_allclose(exact(found), wanted, rtol=1.01 * roundings * 2.0**-8, atol=1e-5, equal_nan=False)


# ---- embed


@pytest.mark.parametrize("width", [8, 576])
def test_rows_of_a_table_are_gathered_and_tokens_outside_are_zero(
    emulator: Emulator, rng: np.random.Generator, width: int
) -> None:
    tokens, table = ints([110, 0, 57, 57, 111, *OUTSIDE]), normal(rng, 111, width)
    out = poisoned_bf16(len(tokens), width)
    args = arguments(
        EmbedArgs, tokens=tokens.ctypes.data, table=table.address, out=out.address, rows=len(tokens), width=width,
        vocabulary=111,
    )  # fmt: skip
    with untouched(table):
        emulator.call("tl_cuda_embed", args, (tokens, table.array))
    assert out.intact
    assert (out.array[:4] == table.array[tokens[:4]]).all()
    assert not out.array[4:].any()


# ---- norms


def norm(emulator: Emulator, x: Guarded, weight: Guarded, delta: Guarded | None = None, seed: int = 0) -> Bits:
    out = poisoned_bf16(*x.array.shape)
    rows, width = x.array.shape
    common = {"x": x.address, "weight": weight.address, "out": out.address, "rows": rows, "width": width, "eps": EPS}
    if delta is None:
        with untouched(x, weight):
            emulator.call("tl_cuda_rms_norm", arguments(RmsNormArgs, **common), (x.array, weight.array), seed)
    else:
        with untouched(delta, weight):
            args = arguments(AddRmsNormArgs, delta=delta.address, **common)
            emulator.call("tl_cuda_add_rms_norm", args, (x.array, delta.array, weight.array), seed)
    assert out.intact
    assert x.intact
    return out.array


@WIDTHS
def test_the_norm_is_right_in_any_order_of_its_threads(
    emulator: Emulator, rng: np.random.Generator, width: int
) -> None:
    x, weight = normal(rng, 3, width), normal(rng, width)
    wide = exact(x.array)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * exact(weight.array)
    for seed in range(2):
        assert_close(norm(emulator, x, weight, seed=seed), wanted, roundings=2)


@WIDTHS
def test_adding_first_rounds_the_residual_and_equals_adding_apart(
    emulator: Emulator, rng: np.random.Generator, width: int
) -> None:
    x, delta, weight = normal(rng, 3, width), normal(rng, 3, width), normal(rng, width)
    total = guarded_bf16(to_bf16(exact(x.array) + exact(delta.array)))
    found = norm(emulator, x, weight, delta, seed=1)
    assert (x.array == total.array).all()
    assert (found == norm(emulator, total, weight)).all()


# ---- rope_cache


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (3, 1, 16), (2, 2, 80), (4, 1, 128)])
def test_heads_are_rotated_and_stored_at_their_slots_alone(
    emulator: Emulator, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int
) -> None:
    rows, pages, table_positions = 12, 5, 50
    angles = 7 * rng.random((table_positions, head_dim // 2))
    cosines, sines = guarded(np.cos(angles)), guarded(np.sin(angles))
    qkv = normal(rng, rows, (heads + 2 * kv_heads) * head_dim)
    keys, values = (poisoned_bf16(pages, kv_heads, PAGE_TOKENS, head_dim) for _ in range(2))
    positions = ints(rng.integers(0, table_positions, rows))
    slots = ints(rng.permutation(pages * PAGE_TOKENS)[:rows])
    slots[:4], positions[4:8] = (pages * PAGE_TOKENS, *OUTSIDE), (table_positions, *OUTSIDE)
    before = exact(qkv.array).reshape(rows, -1, head_dim)
    args = arguments(
        RopeCacheArgs, positions=positions.ctypes.data, slots=slots.ctypes.data, cosines=cosines.address,
        sines=sines.address, qkv=qkv.address, keys=keys.address, values=values.address, rows=rows, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, pages=pages, table_positions=table_positions,
    )  # fmt: skip
    with untouched(cosines, sines):
        emulator.call("tl_cuda_rope_cache", args, (positions, slots, cosines.array, sines.array, qkv.array))
    assert qkv.intact
    wanted = before.copy()
    low, high = np.split(before[8:, :-kv_heads], 2, axis=-1)
    cosine, sine = (each.array[positions[8:], None].astype(np.float64) for each in (cosines, sines))
    wanted[8:, :-kv_heads] = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    found = qkv.array.reshape(rows, -1, head_dim)
    assert_close(found, wanted)
    for pool, stored in ((keys, found[8:, -2 * kv_heads : -kv_heads]), (values, found[8:, -kv_heads:])):
        assert pool.intact
        expected = poisoned_bf16(*pool.array.shape).array
        expected[slots[8:] // PAGE_TOKENS, :, slots[8:] % PAGE_TOKENS] = stored
        assert (pool.array == expected).all()


# ---- swiglu


@pytest.mark.parametrize("width", [8, 1544])
def test_swiglu_is_right(emulator: Emulator, rng: np.random.Generator, width: int) -> None:
    gate_up, out = normal(rng, 3, 2 * width), poisoned_bf16(3, width)
    gate_up.array[0, :4] = to_bf16([-200.0, 200.0, 0.0, -88.5])
    args = arguments(SwigluArgs, gate_up=gate_up.address, out=out.address, rows=3, width=width)
    with untouched(gate_up):
        emulator.call("tl_cuda_swiglu", args, (gate_up.array,))
    assert out.intact
    gate, up = np.split(exact(gate_up.array), 2, axis=-1)
    assert_close(out.array, gate / (1 + np.exp(-gate)) * up, roundings=2)


# ---- step_begin


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 3), (70, 257)])
def test_columns_tables_and_pending_tokens_arrive(emulator: Emulator, rows: int, width: int) -> None:
    stride, table_stride, picks = rows + 5, width + 3, ints([70, -1, 72])  # the second row had no finite scores
    uploaded = ints(np.arange(4 * rows)).reshape(4, rows)
    uploaded[0, ::2] = -1 - np.arange(len(uploaded[0, ::2])) % 4  # picks 0, 1, 2, and 3, which is none
    tables = ints(np.arange(rows * width)).reshape(rows, width)
    columns_out, tables_out = np.full((4, stride), -1, np.int32), np.full((rows, table_stride), -1, np.int32)
    args = arguments(
        StepBegin, columns=uploaded.ctypes.data, picks=picks.ctypes.data, columns_out=columns_out.ctypes.data,
        tables=tables.ctypes.data, tables_out=tables_out.ctypes.data, rows=rows, column_count=4, column_stride=stride,
        picks_count=len(picks), table_rows=rows, width=width, table_stride=table_stride,
    )  # fmt: skip
    emulator.call("tl_cuda_step_begin", args, (uploaded, picks, tables))
    wanted = uploaded.copy()
    wanted[0, ::2] = np.tile([70, 0, 72, 0], rows)[: len(uploaded[0, ::2])]
    assert (columns_out[:, :rows] == wanted).all()
    assert (columns_out[:, rows:] == -1).all()
    assert (tables_out[:, :width] == tables).all()
    assert (tables_out[:, width:] == -1).all()
