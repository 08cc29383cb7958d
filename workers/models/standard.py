"""Plain torch operators: the reference every faster path is checked against, on CPU and on CUDA.

The one rule: on the CPU no product depends on how many rows come together. torch picks other summation orders for
other row counts (fp32 results at one row differ from those at four), so rows go through in blocks of a fixed size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from workers.engine.batch import BLOCK_SIZE, RaggedBatch
from workers.models.ops import LinearWeight
from workers.models.rope import RopeTable

ROW_BLOCK = 16  # rows of one product
KEY_BLOCK = 64  # keys of one partial attention sum
WHOLE_VECTORS = 64  # elements: a multiple of what torch computes at a time, on any processor
UNSHARED = 1 << 14  # elements: torch shares out element-wise work from 2^15 on


@dataclass(frozen=True, slots=True)
class TorchWeight:
    """Weights [N_i, K] and biases [N_i] (or none) as torch keeps them."""

    parts: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]

    @property
    def columns(self) -> int:
        """Width of the output."""
        return sum(len(weight) for weight, _ in self.parts)


class StandardOps:
    """`workers.models.ops.Ops` on torch."""

    def __init__(self, device: torch.device) -> None:
        self.invariant = device.type == "cpu"
        self.path = f"standard/{device.type}" + ("/rows16" if self.invariant else "")

    def linear_weight(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> LinearWeight:
        if weights[0].device.type != "cpu":  # one product; on the CPU a copy of the mapped weights is worth more
            return TorchWeight(((_one(weights), _one(biases) if biases else None),))
        absent: list[torch.Tensor | None] = [None] * len(weights)
        return TorchWeight(tuple(zip(weights, biases or absent, strict=True)))

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return table[tokens.long()]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return normal.to(x.dtype) * weight

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(x.add_(delta), weight, eps)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, TorchWeight)
        blocks = torch.split(_pad_rows(x, ROW_BLOCK), ROW_BLOCK) if self.invariant and len(x) else (x,)
        out = x.new_empty((sum(len(block) for block in blocks), weight.columns))
        for rows, block in zip(torch.split(out, len(blocks[0]) or 1), blocks, strict=True):
            parts = [functional.linear(block, part, bias) for part, bias in weight.parts]
            torch.cat(parts, dim=-1, out=rows)
        return out[: len(x)]

    def scores(self, hidden: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        return self.linear(hidden, head).float()

    def rope_and_cache(
        self, qkv: torch.Tensor, table: RopeTable, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
        positions = batch.positions.long()
        _rotate(heads[:, :-kv_heads], table.cos[positions], table.sin[positions])
        block, offset = batch.slots.long() // BLOCK_SIZE, batch.slots.long() % BLOCK_SIZE
        keys[block, :, offset] = heads[:, -2 * kv_heads : -kv_heads]
        values[block, :, offset] = heads[:, -kv_heads:]

    def attention(
        self, qkv: torch.Tensor, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        kv_heads, head_dim = keys.shape[1], keys.shape[3]
        queries = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)[:, : -2 * kv_heads]
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        starts, lengths = batch.query_starts.tolist(), batch.context_lens.tolist()
        for span, length in enumerate(lengths):
            pages = _pages(batch.block_tables[span], length)
            span_keys, span_values = _gather(keys, pages, length), _gather(values, pages, length)
            for first in range(starts[span], starts[span + 1], ROW_BLOCK):
                rows = slice(first, min(first + ROW_BLOCK, starts[span + 1]))
                out[rows] = _attend(queries[rows], batch.positions[rows], span_keys, span_values, scale)
        return out.flatten(1)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _elementwise(lambda piece: functional.silu(piece, inplace=True), gate) * up


def _one(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts [N_i, …] as one tensor; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _pad_rows(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """`x` with zero rows up to a multiple, in fresh memory, so that alignment never differs."""
    padded = x.new_zeros((-(-len(x) // multiple) * multiple, *x.shape[1:]))
    padded[: len(x)] = x
    return padded


def _elementwise(in_place: Callable[[torch.Tensor], object], x: torch.Tensor) -> torch.Tensor:
    """A function of each element, applied to a copy of `x`.

    torch's CPU code computes whole vectors in one way and what is left over, at the end of each thread's share, in
    another; pieces of whole vectors, too small to be shared out, always take the first.
    """
    flat = x.flatten()
    if x.device.type != "cpu":
        flat = flat.clone()
        in_place(flat)
        return flat.view_as(x)
    padded = _pad_rows(flat, WHOLE_VECTORS)
    for piece in torch.split(padded, UNSHARED):
        in_place(piece)
    return padded[: len(flat)].view_as(x)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `heads` [T, n, hd] in place by `cos` and `sin` [T, hd / 2]; pairs are (i, i + hd / 2)."""
    low, high = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
    rotated_low, rotated_high = low * cos - high * sin, high * cos + low * sin
    low.copy_(rotated_low)
    high.copy_(rotated_high)


def _pages(table: torch.Tensor, length: int) -> torch.Tensor:
    """Ids of the pages that hold `length` tokens, padded with page 0 to whole key blocks."""
    used = -(-length // BLOCK_SIZE)
    per_block = KEY_BLOCK // BLOCK_SIZE
    return functional.pad(table[:used].long(), (0, -used % per_block))


def _gather(pool: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """[KV, key blocks, KEY_BLOCK, hd]; rows past `length` are zero, whatever the pool holds there."""
    kv_heads, head_dim = pool.shape[1], pool.shape[3]
    rows = pool[pages].transpose(0, 1).reshape(kv_heads, -1, head_dim)
    rows[:, length:] = 0
    return rows.view(kv_heads, -1, KEY_BLOCK, head_dim)


def _attend(
    queries: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """At most ROW_BLOCK queries [n, H, hd] over gathered keys and values → [n, H, hd].

    Scores of each key block are one product of a fixed shape; partial sums are added block by block in order, and
    fully masked blocks add exact zeros, so a row's bits do not depend on the rows beside it.
    """
    count, heads, head_dim = queries.shape
    kv_heads, blocks = keys.shape[:2]
    tile = _pad_rows(queries, ROW_BLOCK).view(ROW_BLOCK, kv_heads, -1, head_dim)
    tile = tile.permute(1, 2, 0, 3).reshape(kv_heads, 1, -1, head_dim)  # [KV, 1, group · ROW_BLOCK, hd]
    scores = (tile @ keys.transpose(-1, -2)).float() * scale
    key_positions = torch.arange(blocks * KEY_BLOCK, device=keys.device).view(blocks, 1, KEY_BLOCK)
    limits = functional.pad(positions, (0, ROW_BLOCK - count)).repeat(heads // kv_heads)
    scores = scores.masked_fill(key_positions > limits[:, None], float("-inf"))
    weights = _elementwise(torch.exp_, scores - scores.amax((1, 3), keepdim=True))
    partial, totals = weights.to(values.dtype) @ values, weights.sum(-1)
    mixed, total = partial[:, 0].float(), totals[:, 0]
    for block in range(1, blocks):
        mixed, total = mixed + partial[:, block], total + totals[:, block]
    result = (mixed / total[..., None]).view(kv_heads, -1, ROW_BLOCK, head_dim)[:, :, :count]
    return result.permute(2, 0, 1, 3).reshape(count, heads, head_dim).to(queries.dtype)
