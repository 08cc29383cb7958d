"""Our own kernels on an NVIDIA GPU: bf16 activations, weights and cache, fp32 sums and logits.

The one rule: every kernel may start before the one before it has ended (programmatic dependent launch), so whatever is
launched here is launched on torch's current stream, in the order of the calls. Weights are those of `StandardOps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trunkline_kernels.cuda import rows
from trunkline_kernels.cuda.attention import (
    AttentionDecodeArgs,
    AttentionPrefillArgs,
    attention_decode,
    attention_prefill,
)
from trunkline_kernels.cuda.door import PDL, arguments, prepare
from trunkline_kernels.cuda.linear import BIAS, FP32_OUT, WORKSPACE_BYTES, Plan
from trunkline_kernels.cuda.linear import linear as product
from workers.engine.batch import RaggedBatch
from workers.models.ops import LinearWeight
from workers.models.rope import RopeTable
from workers.models.standard import StandardOps, TorchWeight

SKINNY_ROWS = 8  # up to here our own product is faster than cuBLASLt's
MOST_SPLITS = 8  # of a sequence's keys in decode


class CudaOps:
    """`workers.models.ops.Ops` on `trunkline_kernels.cuda`; raises KernelsMissing or KernelError if it cannot be."""

    invariant = False  # cuBLASLt's bits depend on the number of rows

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # torch's context is the one the kernels share
            prepare()
        major, minor = torch.cuda.get_device_capability(device)
        self.path = f"fused/cuda/sm{major}{minor}"
        self._units = torch.cuda.get_device_properties(device).multi_processor_count
        self._standard = StandardOps(device)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._plans: dict[tuple[int, int, int, int], Plan] = {}

    def linear_weight(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> LinearWeight:
        return self._standard.linear_weight(weights, biases)

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        out = table.new_empty((len(tokens), table.shape[1]))
        rows.embed(
            tokens.data_ptr(), table.data_ptr(), out.data_ptr(),
            rows=len(tokens), width=table.shape[1], vocabulary=len(table), stream=_stream(), flags=PDL,
        )  # fmt: skip
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        count, width = x.shape
        out = torch.empty_like(x)
        rows.rms_norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(),
            rows=count, width=width, eps=eps, stream=_stream(), flags=PDL,
        )  # fmt: skip
        return out

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        count, width = x.shape
        out = torch.empty_like(x)
        rows.add_rms_norm(
            x.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(),
            rows=count, width=width, eps=eps, stream=_stream(), flags=PDL,
        )  # fmt: skip
        return out

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        return self._product(x, weight, x.dtype)

    def scores(self, hidden: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        return self._product(hidden, head, torch.float32)

    def rope_and_cache(
        self, qkv: torch.Tensor, table: RopeTable, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        pages, kv_heads, _, head_dim = keys.shape
        rows.rope_cache(
            batch.positions.data_ptr(), batch.slots.data_ptr(), table.cos.data_ptr(), table.sin.data_ptr(),
            qkv.data_ptr(), keys.data_ptr(), values.data_ptr(),
            rows=len(qkv), heads=_heads(qkv, keys), kv_heads=kv_heads, head_dim=head_dim, pages=pages,
            table_positions=len(table.cos), stream=_stream(), flags=PDL,
        )  # fmt: skip

    def attention(
        self, qkv: torch.Tensor, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One query per span is a decode: which of the two it is depends on shapes alone, as graphs need it."""
        heads, spans = _heads(qkv, keys), len(batch.context_lens)
        pages, kv_heads, _, head_dim = keys.shape
        out = qkv.new_empty((len(qkv), heads * head_dim))
        fields = {
            "q": qkv.data_ptr(), "keys": keys.data_ptr(), "values": values.data_ptr(), "out": out.data_ptr(),
            "context_lens": batch.context_lens.data_ptr(), "block_tables": batch.block_tables.data_ptr(),
            "table_width": batch.block_tables.shape[1], "q_stride": qkv.shape[1], "pages": pages, "spans": spans,
            "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": scale,
        }  # fmt: skip
        if len(qkv) == spans:
            ways = {"splits": self._splits(spans * kv_heads), "stages": 2 if spans <= 8 else 3}
            attention_decode(arguments(AttentionDecodeArgs, PDL, **fields, **ways), _stream())
        else:
            starts = batch.query_starts.data_ptr()
            args = arguments(AttentionPrefillArgs, PDL, **fields, query_starts=starts, rows=len(qkv))
            attention_prefill(args, _stream())
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        count, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty((count, width))
        rows.swiglu(gate_up.data_ptr(), out.data_ptr(), rows=count, width=width, stream=_stream(), flags=PDL)
        return out

    def _product(self, x: torch.Tensor, weight: LinearWeight, dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(weight, TorchWeight)
        ((matrix, bias),) = weight.parts
        (columns, inner), count = matrix.shape, len(x)
        out = torch.empty((count, columns), dtype=dtype, device=x.device)
        kind = FP32_OUT if dtype is torch.float32 else 0
        skinny = count <= SKINNY_ROWS and columns % 16 == 0 and inner % 64 == 0
        plan = None if skinny else self._plan(count, columns, inner, kind | (BIAS if bias is not None else 0))
        product(
            x.data_ptr(), matrix.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            rows=count, columns=columns, inner=inner, stream=_stream(), flags=kind | PDL,
            plan=plan, workspace=None if plan is None else self._workspace.data_ptr(),
        )  # fmt: skip
        return out

    def _plan(self, count: int, columns: int, inner: int, flags: int) -> Plan:
        """The plan for this many rows: powers of two and the steps between them share one algorithm."""
        most = _bucket(count)
        key = (most, columns, inner, flags)
        if key not in self._plans:
            self._plans[key] = Plan(most, columns, inner, flags=flags)
        return self._plans[key]

    def _splits(self, blocks: int) -> int:
        """Parts of a sequence's keys: as many as give every multiprocessor a thread block."""
        splits = 1
        while splits < MOST_SPLITS and blocks * splits < self._units:
            splits *= 2
        return splits


def _bucket(count: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96, … that is not below `count`."""
    size = 16
    while size < count:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def _heads(qkv: torch.Tensor, keys: torch.Tensor) -> int:
    _, kv_heads, _, head_dim = keys.shape
    return qkv.shape[1] // head_dim - 2 * kv_heads


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
