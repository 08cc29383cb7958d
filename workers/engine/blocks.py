"""The paged KV pool as bookkeeping: which block is free, cached or held, and which prefix it carries.

Owns block ids, reference counts, the prefix index (wire rule 15) and LRU eviction; no tensor. The one rule: a block is
published only when all its tokens are known and launched, and a published block is never written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.engine.batch import BLOCK_SIZE

Key = bytes  # 32 bytes of the hash chain


class PoolExhaustedError(Exception):
    """More blocks were asked for than are free or evictable."""


def next_key(parent: Key, tokens: npt.NDArray[np.int32]) -> Key:
    """h(i+1) = sha256(h(i) ‖ 16 tokens as int32 LE). `tokens` is int32 [16]."""
    return hashlib.sha256(parent + tokens.astype("<i4", copy=False).tobytes()).digest()


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state; the sum is the pool (INV-4)."""

    free: int
    cached: int
    used: int


class BlockPool:
    """`total` blocks with reference counts and a prefix cache.

    A block is free (no content), cached (published, held by nobody, evictable) or used (held by one or more).
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._cached: dict[int, None] = {}  # insertion order = least recently released first
        self._references = np.zeros(total, np.int32)
        self._published = np.zeros(total, np.bool_)
        self._keys: dict[int, Key] = {}
        self._index: dict[Key, int] = {}

    @property
    def counts(self) -> PoolCounts:
        """Blocks by state."""
        return PoolCounts(len(self._free), len(self._cached), int(np.count_nonzero(self._references)))

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out now."""
        return len(self._free) + len(self._cached)

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Blocks of the longest published prefix of `keys`; no reference is taken."""
        blocks: list[int] = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are cached: sharing them takes that many from `available`."""
        return sum(block in self._cached for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Takes a reference on each published block."""
        for block in blocks:
            self._cached.pop(block, None)
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """`count` unpublished blocks with one reference each, evicting the least recently used if need be.

        Raises PoolExhaustedError, having taken nothing, when fewer are available.
        """
        if count > self.available:
            raise PoolExhaustedError(f"{count} blocks wanted, {self.available} available")
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        self._references[blocks] = 1
        return blocks

    def publish(self, block: int, key: Key) -> None:
        """Makes a held block findable that a launched step fills; nothing happens if the key is published already."""
        assert self._references[block] > 0, "only a held block is published"
        if key not in self._index:
            self._index[key] = block
            self._keys[block] = key
            self._published[block] = True

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference on each; deeper blocks are evicted first, so that a prefix outlives what hangs on it."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, "a block was released twice"
            if self._references[block] == 0:
                self._rest(block)

    def forget(self, keys: Iterable[Key]) -> None:
        """Withdraws keys from the index; blocks nobody holds become free."""
        for key in keys:
            block = self._index.pop(key, None)
            if block is None:
                continue
            self._unname(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def writable(self, blocks: npt.NDArray[np.int32]) -> bool:
        """True when each of `blocks` (int32 [n]) has exactly one holder and is not published."""
        return bool(((self._references[blocks] == 1) & ~self._published[blocks]).all())

    def check(self, tables: Sequence[npt.NDArray[np.int32]]) -> None:
        """Asserts INV-4 against the block tables (int32 [held]) of all holders."""
        held = np.concatenate(tables) if tables else np.zeros(0, np.int32)
        assert np.array_equal(np.bincount(held, minlength=self.total), self._references), "reference count != holders"
        counts = self.counts
        assert counts.free + counts.cached + counts.used == self.total, f"blocks leaked: {counts} of {self.total}"
        assert len(self._index) == len(self._keys), "two keys for one block"

    def _rest(self, block: int) -> None:
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._index[self._keys[block]]
        self._unname(block)
        return block

    def _unname(self, block: int) -> None:
        del self._keys[block]
        self._published[block] = False
