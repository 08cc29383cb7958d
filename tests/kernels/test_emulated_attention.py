"""The code of the CUDA library's attention, run on the CPU against fp64: see `tests.kernels.emulator.emulated`.

Pages are shuffled, and whatever a query must not see is NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.emulator.arrays import Bits, exact, poisoned_bf16, to_bf16
from tests.kernels.emulator.emulated import Emulator, broken
from tests.kernels.guarded import ints, untouched
from tests.kernels.paged import Geometry, scattered
from trunkline_kernels.cuda.attention import AttentionDecodeArgs, AttentionPrefillArgs
from trunkline_kernels.cuda.door import arguments
from trunkline_kernels.door import PAGE_TOKENS

UNUSED = -7  # a page id that must not be looked at
pytestmark = pytest.mark.timeout(180)  # the first test compiles
SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


@dataclass
class World:
    """Sequences of (queries, context) tokens in a paged cache, and queries at their ends."""

    geometry: Geometry
    spans: Sequence[tuple[int, int]]
    rng: np.random.Generator
    window: int = 0
    softcap: float = 0.0
    keys: list[Bits] = field(init=False)  # of each sequence, [context, kv_heads, head_dim]
    values: list[Bits] = field(init=False)

    def __post_init__(self) -> None:
        heads, dim = self.geometry.kv_heads, self.geometry.head_dim
        pages, self.pages = scattered([context for _, context in self.spans], self.rng)
        self.rows = sum(queries for queries, _ in self.spans)
        width = max([1, *map(len, pages)])
        self.lengths = ints([context for _, context in self.spans])
        self.starts = ints(np.cumsum([0, *(queries for queries, _ in self.spans)]))
        self.tables = ints([[*own, *[UNUSED] * (width - len(own))] for own in pages])
        self.key_pool, self.value_pool = (poisoned_bf16(self.pages, heads, PAGE_TOKENS, dim) for _ in range(2))
        self.keys, self.values = ([self.normal(context, heads, dim) for _, context in self.spans] for _ in range(2))
        for index, (queries, context) in enumerate(self.spans):
            seen = np.arange(max(0, context - queries + 1 - self.window) if self.window else 0, context)
            place = self.tables[index][seen // PAGE_TOKENS], slice(None), seen % PAGE_TOKENS
            self.key_pool.array[place], self.value_pool.array[place] = self.keys[index][seen], self.values[index][seen]
        # As in a row of q, k and v together: what follows the queries is not theirs.
        self.q = poisoned_bf16(self.rows, self.geometry.width)
        self.queries = self.normal(self.rows, self.geometry.heads, dim)
        self.q.array[:, : self.geometry.heads * dim] = self.queries.reshape(self.rows, -1)

    def normal(self, *shape: int) -> Bits:
        return to_bf16(self.rng.standard_normal(shape))

    def run(self, emulator: Emulator, seed: int, **decode: int) -> Bits:
        """The outputs, [rows, heads, head_dim]: of a decode call if it has `splits` and `stages`, else of prefill."""
        out = poisoned_bf16(self.rows, self.geometry.heads, self.geometry.head_dim)
        common: dict[str, Any] = {
            "q": self.q.address, "keys": self.key_pool.address, "values": self.value_pool.address, "out": out.address,
            "context_lens": self.lengths.ctypes.data, "block_tables": self.tables.ctypes.data,
            "q_stride": self.geometry.width, "spans": len(self.spans), "pages": self.pages,
            "table_width": self.tables.shape[1], "heads": self.geometry.heads,
            "kv_heads": self.geometry.kv_heads, "head_dim": self.geometry.head_dim, "window": self.window,
            "scale": self.geometry.head_dim**-0.5, "softcap": self.softcap,
        }  # fmt: skip
        reads = (self.q.array, self.lengths, self.starts, self.tables)
        with untouched(self.q, self.key_pool, self.value_pool):
            if decode:
                emulator.call(
                    "tl_cuda_attention_decode", arguments(AttentionDecodeArgs, **common, **decode), reads, seed
                )
            else:
                rows = {"query_starts": self.starts.ctypes.data, "rows": self.rows}
                emulator.call(
                    "tl_cuda_attention_prefill", arguments(AttentionPrefillArgs, **common, **rows), reads, seed
                )
        assert out.intact
        return out.array

    def exact(self) -> np.ndarray:
        """The outputs in fp64."""
        rows = [
            self._exact_row(index, self.starts[index] + query, context - queries + query)
            for index, (queries, context) in enumerate(self.spans)
            for query in range(queries)
        ]
        return np.stack(rows)

    def _exact_row(self, index: int, row: int, position: int) -> np.ndarray:
        out = np.zeros((self.geometry.heads, self.geometry.head_dim))
        seen = slice(max(0, position + 1 - self.window) if self.window else 0, position + 1)
        for head in range(self.geometry.heads if position >= 0 else 0):
            kv_head = head // (self.geometry.heads // self.geometry.kv_heads)
            keys, values = exact(self.keys[index][seen, kv_head]), exact(self.values[index][seen, kv_head])
            scores = keys @ exact(self.queries[row, head]) * self.geometry.head_dim**-0.5
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            weights = np.exp(scores - scores.max())
            out[head] = weights @ values / weights.sum()
        return out


def assert_close(found: Bits, wanted: np.ndarray) -> None:
    """Weights and outputs are rounded to bf16, 2^-9 of their size each; no NaN."""
    np.testing.assert_allclose(exact(found), wanted, rtol=1.6e-2, atol=4e-3, equal_nan=False)


def singles(*contexts: int) -> list[tuple[int, int]]:
    return [(1, context) for context in contexts]


# ---- decode


@SEEDS
@pytest.mark.parametrize(
    ("geometry", "contexts", "splits", "stages", "rules"),
    [
        (Geometry(4, 1, 64), (1, 15, 16, 17, 63, 64, 65, 0), 1, 2, {}),
        (Geometry(9, 3, 64), (200, 513), 8, 2, {}),
        (Geometry(10, 1, 64), (130, 0, 300), 2, 3, {}),  # heads of two tiles
        (Geometry(7, 1, 128), (777,), 4, 2, {}),
        (Geometry(8, 1, 128), (257, 64), 2, 4, {"window": 100}),
        (Geometry(2, 1, 64), (257, 64), 1, 2, {"window": 33, "softcap": 2.0}),
    ],
)
def test_decode_is_right_in_any_order_of_its_threads(
    emulator: Emulator, rng: np.random.Generator, geometry: Geometry, contexts: Sequence[int], splits: int,
    stages: int, rules: dict[str, Any], seed: int,
) -> None:  # fmt: skip
    world = World(geometry, singles(*contexts), rng, **rules)
    assert_close(world.run(emulator, seed, splits=splits, stages=stages), world.exact())


def test_decode_has_the_same_bits_in_every_order_and_with_any_ring(
    emulator: Emulator, rng: np.random.Generator
) -> None:
    world = World(Geometry(4, 2, 64), singles(300, 70), rng)
    runs = [world.run(emulator, seed, splits=2, stages=2 + seed % 3) for seed in range(6)]
    assert all((run == runs[0]).all() for run in runs)


# ---- prefill


@SEEDS
@pytest.mark.parametrize(
    ("geometry", "spans", "rules"),
    [
        (Geometry(4, 1, 64), [(70, 70)], {}),  # a block of several tiles of rows
        (Geometry(4, 1, 128), [(40, 100), (1, 65), (17, 17)], {}),
        # More spans than a warp has lanes, some of them empty.
        (Geometry(3, 1, 64), [*singles(1, 15, 16, 17, 63, 64, 65, 130), (0, 20), *singles(*[3] * 30)], {}),
        (Geometry(6, 2, 64), [(33, 200), (5, 5)], {}),
        (Geometry(7, 1, 128), [(20, 150)], {"window": 50}),
        (Geometry(1, 1, 64), [(140, 300)], {"window": 70, "softcap": 2.0}),
    ],
)
def test_prefill_is_right_in_any_order_of_its_threads(
    emulator: Emulator, rng: np.random.Generator, geometry: Geometry, spans: Sequence[tuple[int, int]],
    rules: dict[str, Any], seed: int,
) -> None:  # fmt: skip
    world = World(geometry, spans, rng, **rules)
    assert_close(world.run(emulator, seed), world.exact())


@pytest.mark.parametrize("window", [0, 64])
@pytest.mark.parametrize("geometry", [Geometry(3, 1, 64), Geometry(4, 2, 128)])
def test_how_a_prompt_is_cut_into_calls_does_not_change_its_bits(
    emulator: Emulator, geometry: Geometry, window: int
) -> None:
    length = 150

    def part(start: int, end: int) -> Bits:
        # The whole sequence's values, of which the later ones are not written yet.
        whole = World(geometry, [(length, length)], np.random.default_rng(3), window=window)
        cut = World(geometry, [(end - start, end)], np.random.default_rng(3), window=window)
        seen = np.arange(max(0, start + 1 - window) if window else 0, end)
        place = cut.tables[0][seen // PAGE_TOKENS], slice(None), seen % PAGE_TOKENS
        for pool, values in ((cut.key_pool, whole.keys[0]), (cut.value_pool, whole.values[0])):
            pool.array[place] = values[seen]
        cut.q.array[...] = whole.q.array[start:end]
        return cut.run(emulator, seed=start)

    whole = part(0, length)
    for cuts in ([0, 1, length], [0, 17, 64, length], [0, length - 1, length]):
        parts = [part(start, end) for start, end in itertools.pairwise(cuts)]
        assert (np.concatenate(parts) == whole).all()


# ---- what lies in device memory is taken as it is


@pytest.mark.parametrize("decode", [{}, {"splits": 2, "stages": 2}], ids=["prefill", "decode"])
def test_a_page_outside_the_pools_reads_as_zeros(
    emulator: Emulator, rng: np.random.Generator, decode: dict[str, int]
) -> None:
    world = World(Geometry(2, 1, 64), singles(130, 40), rng)
    world.tables[0, 0], world.tables[1, 1] = 10**9, -1
    for each in (world.keys, world.values):
        each[0][:16], each[1][16:32] = 0, 0
    assert_close(world.run(emulator, 1, **decode), world.exact())


@pytest.mark.parametrize("decode", [{}, {"splits": 2, "stages": 2}], ids=["prefill", "decode"])
def test_lengths_without_sense_neither_fault_nor_hang(
    emulator: Emulator, rng: np.random.Generator, decode: dict[str, int]
) -> None:
    world = World(Geometry(2, 1, 64), singles(40, 40, 40), rng)
    world.lengths[:] = (10**9, -3, 2**31 - 1)
    world.starts[:] = (-7, 2, 1, 10**9)
    out = world.run(emulator, 1, **decode)
    assert not exact(out)[1].any() or not decode  # a length below zero is an empty row


# ---- what these tests are worth: each of these errors is noticed

DECODE_ERRORS = {
    "values that no query sees are NaN times zero": ("a[0] &= upper, a[1] &= upper, a[2] &= lower, a[3] &= lower;", ""),
    "keys beyond the sequence count": ("wanted.holds(upper + i / 2 * 8)", "true"),
    "tiles are read before they came": ("barrier_wait(ring.full(turn.stage), turn.phase);", ""),
    "tiles come before their places are free": ("barrier_wait(ring.empty(turn.stage), turn.phase ^ 1);", ""),
    "parts are written over tiles in use": ("__syncthreads();  // all warps", "//"),
    "parts of other blocks are read before they are there": ("cluster_barrier();\n  const", "const"),
    "a block ends while others read its part": ("cluster_barrier();  // nobody leaves", "//"),
    "copies do not see the writes before them": ("global_to_copies();", ""),
}
PREFILL_ERRORS = {
    "values that no query sees are NaN times zero": ("if (kMasked) b[0] &= upper, b[1] &= lower,", "if (false)"),
    "a tile that some rows see all of is not masked": ("common[warp].covers(key", "common[warp].touches(key"),
    "tiles are read before they came": ("barrier_wait(full(stage), turn / kStages & 1);", ""),
    "tiles come before their places are free": ("barrier_wait(empty(other), ((turn + 1) / kStages & 1) ^ 1);", ""),
}


def assert_right(emulator: Emulator, world: World, **decode: int) -> None:
    """In any of some orders."""
    wanted = world.exact()
    for seed in range(20):
        assert_close(world.run(emulator, seed, **decode), wanted)


@pytest.mark.parametrize("error", DECODE_ERRORS.values(), ids=DECODE_ERRORS)
def test_an_error_in_decode_is_noticed(
    emulator: Emulator, tmp_path: Path, rng: np.random.Generator, error: tuple[str, str]
) -> None:
    world = World(Geometry(4, 2, 64), singles(400, 70), rng, window=300)
    wrong = broken(emulator, tmp_path, "attention_decode.cu", *error)
    with pytest.raises(AssertionError):
        assert_right(wrong, world, splits=2, stages=2)


@pytest.mark.parametrize("error", PREFILL_ERRORS.values(), ids=PREFILL_ERRORS)
def test_an_error_in_prefill_is_noticed(
    emulator: Emulator, tmp_path: Path, rng: np.random.Generator, error: tuple[str, str]
) -> None:
    world = World(Geometry(2, 1, 64), [(64, 250)], rng, window=150)  # rows for each warp of a block
    wrong = broken(emulator, tmp_path, "attention_prefill.cu", *error)
    with pytest.raises(AssertionError):
        assert_right(wrong, world)
