"""A decoder whose "attention" is exact arithmetic: it reads every cached position and notices any wrong one.

Keys hold a hash of (token, position), values hold the position; a row's state is the sum of all keys up to it. So a
lost, stale, shared-and-overwritten or misplaced block changes the tokens or fails an assertion at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.batch import BLOCK_SIZE, KVCache, RaggedBatch

VOCAB = 48
END = 1
POISON = VOCAB - 1  # a context with it has scores that are not numbers
_SICK = -1  # what the cache holds for it

Longs = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


def mix(values: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser."""
    with np.errstate(over="ignore"):
        x = np.asarray(values).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def keys_of(tokens: Longs, positions: Longs) -> Longs:
    """What the cache holds for each token: 44 bits, so that states stay exact in float64 and pooled sums do not."""
    mixed = mix(tokens.astype(np.uint64) * np.uint64(1_000_003) + positions.astype(np.uint64))
    return np.where(tokens == POISON, _SICK, (mixed >> np.uint64(20)).astype(np.int64))


def sums_of(keys: Longs) -> Doubles:
    """The state of each position of a context: the sum of its keys so far, not a number from a sick one on."""
    return np.where(np.cumsum(keys == _SICK) > 0, np.nan, np.cumsum(keys).astype(np.float64))


def states(tokens: Sequence[int]) -> Doubles:
    """The state of every position of `tokens`, without any cache."""
    ids = np.asarray(tokens, np.int64)
    return sums_of(keys_of(ids, np.arange(len(ids))))


def scores(state: Doubles) -> torch.Tensor:
    """fp32 logits [R, VOCAB] of states [R]."""
    sick = np.isnan(state)
    words = mix(mix(np.where(sick, 0.0, state)[:, None].astype(np.int64)) + np.arange(VOCAB, dtype=np.uint64))
    logits = (words >> np.uint64(40)).astype(np.float32) / np.float32(2**21) - np.float32(4)
    logits[:, POISON] = -np.inf
    logits[sick] = np.nan
    return torch.from_numpy(logits)


class HashModel:
    """`workers.engine.runner.Model` over int64 pools of one layer, one head, one number."""

    @staticmethod
    def cache(blocks: int) -> KVCache:
        """A pool full of nonsense, as memory is."""
        cache = KVCache.zeros(1, blocks, 1, 1, torch.int64, torch.device("cpu"))
        cache.keys.fill_(-77)
        cache.values.fill_(-77)
        return cache

    def forward(self, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        keys, values = kv.keys.numpy().reshape(-1), kv.values.numpy().reshape(-1)
        tokens, positions = batch.tokens.numpy().astype(np.int64), batch.positions.numpy().astype(np.int64)
        slots, starts = batch.slots.numpy(), batch.query_starts.tolist()
        assert len(set(slots.tolist())) == len(slots), "one slot is written twice in a step"
        keys[slots] = keys_of(tokens, positions)
        values[slots] = positions
        rows = []
        for span, context in enumerate(batch.context_lens.tolist()):
            where = np.arange(context)
            read = batch.block_tables[span].numpy()[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
            assert np.array_equal(values[read], where), "a cached position is not what the table says"
            rows.append(sums_of(keys[read])[context - (starts[span + 1] - starts[span]) :])
        return torch.from_numpy(np.concatenate(rows))[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return scores(hidden[:, 0].numpy())
