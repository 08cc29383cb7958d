"""Our own kernels on the CPU, fp32.

The one rule: bits do not depend on the batch, the chunking or the number of threads. Every output element is one chain
of fused multiply-adds in one order (see `kernels/src/cpu/tile.h`).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trunkline_kernels.door import (
    Batch,
    Context,
    Heads,
    batch_struct,
    heads_struct,
)
from workers.engine.batch import RaggedBatch
from workers.models.ops import LinearWeight
from workers.models.rope import RopeTable


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in panels of 16 columns, [panels, inner, 16]; `bias` [columns] or None."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    inner: int
    columns: int


class FusedOps:
    """`workers.models.ops.Ops` on `trunkline_kernels`; raises KernelsMissing if they cannot be used here."""

    invariant = True

    def __init__(self, threads: int) -> None:
        self._context = Context(threads)
        self.path = f"fused/cpu/{self._context.isa}"
        self._step: tuple[RaggedBatch, Batch] | None = None

    def linear_weight(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> LinearWeight:
        columns, inner = sum(len(weight) for weight in weights), weights[0].shape[1]
        packed = _huge(self._context.packed_size(columns, inner))
        first = 0
        for weight in weights:
            source = _fp32(weight)
            self._context.linear_pack(source.data_ptr(), packed.data_ptr(), len(source), inner, first, columns)
            first += len(source)
        return PackedWeight(packed, torch.cat([_fp32(bias) for bias in biases]) if biases else None, inner, columns)

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(tokens), table.shape[1]))
        self._context.embed(
            tokens.data_ptr(), table.data_ptr(), out.data_ptr(), len(tokens), table.shape[1], len(table)
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        out = torch.empty_like(x)
        self._context.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, width = x.shape
        out = torch.empty_like(x)
        self._context.add_rms_norm(x.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, PackedWeight)
        rows, bias = len(x), weight.bias
        out = torch.empty((rows, weight.columns))
        self._context.linear(
            x.data_ptr(),
            weight.packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            weight.inner,
            weight.columns,
        )
        return out

    def scores(self, hidden: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        return self.linear(hidden, head)

    def rope_and_cache(
        self, qkv: torch.Tensor, table: RopeTable, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self._context.rope_cache(
            self._batch(batch),
            _heads(qkv, keys, len(table.cos), 1.0),
            table.cos.data_ptr(),
            table.sin.data_ptr(),
            qkv.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
        )

    def attention(
        self, qkv: torch.Tensor, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        out = torch.empty((len(qkv), qkv.shape[1] - 2 * keys.shape[1] * keys.shape[3]))
        heads = _heads(qkv, keys, 1, scale)
        pointers = (qkv.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr())
        self._context.attention(self._batch(batch), heads, *pointers)
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty((rows, width))
        self._context.swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width)
        return out

    def _batch(self, batch: RaggedBatch) -> Batch:
        """The batch as the library reads it; all layers of a step share one."""
        if self._step is None or self._step[0] is not batch:
            self._step = (batch, _batch(batch))
        return self._step[1]


def _batch(batch: RaggedBatch) -> Batch:
    arrays = {
        name: getattr(batch, name) for name in ("positions", "slots", "query_starts", "context_lens", "block_tables")
    }
    for name, array in (*arrays.items(), ("tokens", batch.tokens)):
        if array.dtype is not torch.int32 or not array.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32")
    spans, width = batch.block_tables.shape
    addresses = {name: array.data_ptr() for name, array in arrays.items()}
    return batch_struct(spans=spans, rows=len(batch.tokens), table_width=width, **addresses)


def _heads(qkv: torch.Tensor, keys: torch.Tensor, positions: int, scale: float) -> Heads:
    pages, kv_heads, _, head_dim = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    return heads_struct(
        scale=scale, heads=heads, kv_heads=kv_heads, head_dim=head_dim, pages=pages, positions=positions
    )


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().contiguous()


def _huge(floats: int) -> torch.Tensor:
    """Zeroed fp32 memory of its own mapping, in huge pages where the system has them: fewer misses while streaming."""
    memory = mmap.mmap(-1, 4 * floats, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=floats)
