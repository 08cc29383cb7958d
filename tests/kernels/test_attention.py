"""tl_attention against fp64, on shuffled pages, with NaN in every slot that must not be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from tests.kernels.guarded import Guarded, guarded, poisoned, untouched
from tests.kernels.paged import Geometry, Span, Step, pool, scattered
from trunkline_kernels.door import PAGE_TOKENS, Context, KernelError

Normal = Callable[..., np.ndarray]
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 130]
GEOMETRIES = [Geometry(9, 3, 64), Geometry(4, 4, 16), Geometry(7, 1, 80), Geometry(8, 2, 128), Geometry(2, 1, 256),
              Geometry(60, 1, 2)]  # fmt: skip
SCALE = 0.125


@dataclass(frozen=True)
class World:
    """Sequences with their q, k and v, and the pools that hold k and v."""

    geometry: Geometry
    qkv: list[np.ndarray]  # per sequence [tokens, heads + 2 * kv_heads, head_dim]
    pages: list[tuple[int, ...]]
    keys: Guarded
    values: Guarded


def world(geometry: Geometry, lengths: Sequence[int], normal: Normal, rng: np.random.Generator) -> World:
    pages, count = scattered(lengths, rng)
    qkv = [normal(length, geometry.heads + 2 * geometry.kv_heads, geometry.head_dim) for length in lengths]
    keys, values = pool(geometry, count), pool(geometry, count)
    for tokens, own in zip(qkv, pages, strict=True):
        for position in range(len(tokens)):
            place = own[position // PAGE_TOKENS], slice(None), position % PAGE_TOKENS
            keys.array[place] = tokens[position, geometry.heads : geometry.heads + geometry.kv_heads]
            values.array[place] = tokens[position, geometry.heads + geometry.kv_heads :]
    return World(geometry, qkv, pages, keys, values)


def attend(context: Context, given: World, parts: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Attention of (sequence, first, last) query ranges, each seeing its sequence up to `last`: [rows, heads, dim]."""
    geometry = given.geometry
    step = Step([Span(last - first, last, given.pages[index]) for index, first, last in parts])
    qkv = guarded(np.concatenate([given.qkv[index][first:last] for index, first, last in parts]))
    out = poisoned(step.rows, geometry.heads, geometry.head_dim)
    with untouched(qkv, given.keys, given.values):
        context.attention(step.struct, geometry.struct(len(given.keys.array), 1, SCALE), qkv.address,
                          given.keys.address, given.values.address, out.address)  # fmt: skip
    assert out.intact
    return out.array


def exact(given: World, index: int, first: int = 0) -> np.ndarray:
    """fp64 causal attention of a sequence's queries from `first` on."""
    geometry, tokens = given.geometry, given.qkv[index].astype(np.float64)
    group, count = geometry.heads // geometry.kv_heads, len(tokens)
    queries = tokens[first:, : geometry.heads]
    keys = np.repeat(tokens[:, geometry.heads : geometry.heads + geometry.kv_heads], group, axis=1)
    values = np.repeat(tokens[:, geometry.heads + geometry.kv_heads :], group, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) * SCALE
    scores[:, ~np.tri(count, dtype=bool)[first:]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_whole_sequences_of_awkward_lengths_are_right_to_fp32(
    context: Context, normal: Normal, rng: np.random.Generator, geometry: Geometry
) -> None:
    given = world(geometry, LENGTHS, normal, rng)
    found = attend(context, given, [(index, 0, length) for index, length in enumerate(LENGTHS)])
    reference = np.concatenate([exact(given, index) for index in range(len(LENGTHS))])
    assert np.allclose(found, reference, rtol=1e-5, atol=3e-6)


def test_a_long_sequence_is_right_to_fp32(context: Context, normal: Normal, rng: np.random.Generator) -> None:
    given = world(GEOMETRIES[0], [3584], normal, rng)
    found = attend(context, given, [(0, 3583, 3584), (0, 3500, 3511)])
    reference = exact(given, 0, 3500)
    assert np.allclose(found, reference[[83, *range(11)]], rtol=1e-5, atol=3e-6)


def test_scores_of_a_thousand_do_not_overflow(context: Context, normal: Normal, rng: np.random.Generator) -> None:
    given = world(GEOMETRIES[0], [100], lambda *shape: 60 * normal(*shape), rng)
    assert np.allclose(attend(context, given, [(0, 0, 100)]), exact(given, 0), rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_query_has_the_same_bits_however_its_sequence_is_cut_and_whoever_is_beside_it(
    context: Context, single: Context, normal: Normal, rng: np.random.Generator, geometry: Geometry
) -> None:
    given = world(geometry, LENGTHS, normal, rng)
    whole = attend(context, given, [(7, 0, 130)])
    for position in (0, 15, 16, 63, 64, 100, 129):
        alone = attend(single, given, [(7, position, position + 1)])
        assert alone[0].tobytes() == whole[position].tobytes()
    for cut in (1, 17, 64, 129):
        chunks = [attend(context, given, [(7, 0, cut)]), attend(context, given, [(7, cut, 130)])]
        assert np.concatenate(chunks).tobytes() == whole.tobytes()
    mixed = attend(context, given, [(4, 62, 63), (7, 90, 130), (1, 0, 15), (6, 64, 65)])
    assert mixed[1:41].tobytes() == whole[90:].tobytes()


def _damaged(given: World, name: str, value: int) -> Step:
    step = Step([Span(5, 20, given.pages[0])])
    step.arrays[name].flat[0 if name != "query_starts" else 1] = value
    return step


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("positions", 20, "out of range"),
        ("positions", -1, "out of range"),
        ("context_lens", 33, "out of range"),
        ("context_lens", -1, "out of range"),
        ("block_tables", 5, "out of range"),
        ("block_tables", -1, "out of range"),
        ("query_starts", 6, "fit"),
        ("query_starts", -1, "fit"),
    ],
)
def test_a_batch_that_points_outside_is_refused_before_anything_is_written(
    context: Context, normal: Normal, rng: np.random.Generator, name: str, value: int, problem: str
) -> None:
    given = world(GEOMETRIES[0], [20], normal, rng)
    step, out = _damaged(given, name, value), poisoned(5, 9, 64)
    qkv = guarded(given.qkv[0][15:])
    with untouched(out), pytest.raises(KernelError, match=problem):
        context.attention(step.struct, given.geometry.struct(5, 1, SCALE), qkv.address, given.keys.address,
                          given.values.address, out.address)  # fmt: skip


@pytest.mark.parametrize(
    ("geometry", "problem"),
    [
        (Geometry(4, 3, 64), "fit"),
        (Geometry(4, 4, 63), "fit"),
        (Geometry(1, 1, 258), "count"),
        (Geometry(0, 1, 4), "count"),
    ],
)
def test_heads_that_do_not_fit_are_refused(context: Context, geometry: Geometry, problem: str) -> None:
    step = Step([Span(1, 1, (0,))])
    with pytest.raises(KernelError, match=problem):
        context.attention(step.struct, geometry.struct(1, 1), 64, 64, 64, 64)
