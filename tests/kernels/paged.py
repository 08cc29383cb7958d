"""A step over a paged cache, for the operators that read one: pages shuffled, everything unused poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.kernels.guarded import Guarded, ints, poisoned
from trunkline_kernels.door import PAGE_TOKENS, Batch, Heads, batch_struct, heads_struct


@dataclass(frozen=True)
class Geometry:
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Columns of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def struct(self, pages: int, positions: int, scale: float = 1.0) -> Heads:
        return heads_struct(
            heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, pages=pages, positions=positions,
            scale=scale,
        )  # fmt: skip


@dataclass(frozen=True)
class Span:
    """`queries` last tokens of a sequence of `context` tokens, whose pages are `pages`."""

    queries: int
    context: int
    pages: tuple[int, ...]


@dataclass
class Step:
    """Arrays of a batch, kept alive with the struct that points to them."""

    spans: Sequence[Span]
    arrays: dict[str, np.ndarray] = field(init=False)
    struct: Batch = field(init=False)

    def __post_init__(self) -> None:
        width = max((len(span.pages) for span in self.spans), default=0)
        positions = [p for span in self.spans for p in range(span.context - span.queries, span.context)]
        slots = [
            span.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS
            for span in self.spans
            for p in range(span.context - span.queries, span.context)
        ]
        self.arrays = {
            "positions": ints(positions),
            "slots": ints(slots),
            "query_starts": ints(np.cumsum([0, *(span.queries for span in self.spans)])),
            "context_lens": ints([span.context for span in self.spans]),
            # What lies past a sequence's pages is never looked at: an impossible page proves it.
            "block_tables": ints([[*span.pages, *[-7] * (width - len(span.pages))] for span in self.spans]),
        }
        self.struct = batch_struct(
            spans=len(self.spans), rows=len(positions), table_width=width,
            **{name: array.ctypes.data for name, array in self.arrays.items()},
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return len(self.arrays["positions"])


def scattered(contexts: Sequence[int], rng: np.random.Generator, spare: int = 3) -> tuple[list[tuple[int, ...]], int]:
    """Pages for sequences of these lengths, in random order, and the size of their pool."""
    counts = [-(-context // PAGE_TOKENS) for context in contexts]
    order = rng.permutation(sum(counts) + spare).tolist()
    pages = [tuple(order[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]
    return pages, len(order)


def pool(geometry: Geometry, pages: int) -> Guarded:
    """One layer's keys or values, all NaN."""
    return poisoned(pages, geometry.kv_heads, PAGE_TOKENS, geometry.head_dim)
