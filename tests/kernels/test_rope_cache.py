"""tl_rope_cache against fp64: what is rotated, what is written, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.guarded import Guarded, guarded, ints, untouched
from tests.kernels.paged import Geometry, Span, Step, pool, scattered
from trunkline_kernels.door import PAGE_TOKENS, Context, KernelError

Normal = Callable[..., np.ndarray]
CONTEXT = 200
GEOMETRIES = [Geometry(1, 1, 2), Geometry(9, 3, 64), Geometry(7, 1, 80), Geometry(4, 4, 128)]


def tables(geometry: Geometry) -> tuple[Guarded, Guarded]:
    inverse = 1e4 ** (-np.arange(0, geometry.head_dim, 2) / geometry.head_dim)
    angles = np.arange(CONTEXT)[:, None] * inverse
    return guarded(np.cos(angles)), guarded(np.sin(angles))


def rotated(heads: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """fp64, of [rows, heads, head_dim]."""
    low, high = np.split(heads.astype(np.float64), 2, axis=-1)
    cos, sin = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_queries_and_keys_are_rotated_and_the_cache_gets_exactly_the_new_tokens(
    context: Context, normal: Normal, rng: np.random.Generator, geometry: Geometry
) -> None:
    pages, count = scattered([37, 1, 64], rng)
    step = Step([Span(20, 37, pages[0]), Span(1, 1, pages[1]), Span(2, 64, pages[2])])
    original, (cos, sin) = normal(step.rows, geometry.width), tables(geometry)
    qkv, keys, values = guarded(original), pool(geometry, count), pool(geometry, count)
    with untouched(cos, sin):
        context.rope_cache(step.struct, geometry.struct(count, CONTEXT), cos.address, sin.address, qkv.address,
                           keys.address, values.address)  # fmt: skip
    assert qkv.intact
    assert keys.intact
    assert values.intact

    positions, slots = step.arrays["positions"], step.arrays["slots"]
    found, before = (a.reshape(step.rows, -1, geometry.head_dim) for a in (qkv.array, original))
    turned = geometry.heads + geometry.kv_heads
    exact = rotated(before[:, :turned], cos.array[positions], sin.array[positions])
    assert np.allclose(found[:, :turned], exact, rtol=1e-6, atol=1e-6)
    assert found[:, turned:].tobytes() == before[:, turned:].tobytes()
    for cache, new in ((keys, found[:, geometry.heads : turned]), (values, found[:, turned:])):
        by_slot = cache.array.transpose(0, 2, 1, 3).reshape(-1, geometry.kv_heads, geometry.head_dim)
        assert by_slot[slots].tobytes() == new.tobytes()
        assert np.isnan(np.delete(by_slot, slots, axis=0)).all()


@pytest.mark.parametrize(
    ("name", "value"), [("positions", CONTEXT), ("positions", -1), ("slots", -1), ("slots", 4 * PAGE_TOKENS)]
)
def test_a_position_or_slot_out_of_range_is_refused_before_anything_is_written(
    context: Context, normal: Normal, name: str, value: int
) -> None:
    geometry = GEOMETRIES[1]
    step = Step([Span(3, 20, (1, 3))])
    step.arrays[name][1] = value
    qkv, (cos, sin), keys, values = guarded(normal(3, geometry.width)), tables(geometry), pool(geometry, 4), None
    values = pool(geometry, 4)
    with untouched(qkv, keys, values), pytest.raises(KernelError, match="out of range"):
        context.rope_cache(step.struct, geometry.struct(4, CONTEXT), cos.address, sin.address, qkv.address,
                           keys.address, values.address)  # fmt: skip


def test_a_struct_of_another_version_is_refused(context: Context) -> None:
    step, heads = Step([Span(1, 1, (0,))]), Geometry(1, 1, 2).struct(1, 1)
    step.struct.size += 8
    with pytest.raises(KernelError, match="unknown size"):
        context.rope_cache(step.struct, heads, 0, 0, 0, 0, 0)


def test_an_empty_step_is_no_work(context: Context) -> None:
    step = Step([])
    step.arrays["query_starts"] = ints([0])
    context.rope_cache(step.struct, Geometry(1, 1, 2).struct(1, 1), 0, 0, 0, 0, 0)
    context.attention(step.struct, Geometry(1, 1, 2).struct(1, 1), 0, 0, 0, 0)
