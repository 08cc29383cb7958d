"""The operators a model is written in, whatever runs them.

The one rule: every result depends on its own row (and its own sequence's cache) only. An implementation whose bits
also depend on what shares the batch says so with `invariant = False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from workers.engine.batch import RaggedBatch
from workers.models.rope import RopeTable


class LinearWeight(Protocol):
    """A weight in the form its `Ops` wants; made by `Ops.linear_weight`, opaque to models."""

    @property
    def columns(self) -> int:
        """Width of the output."""
        ...


class Ops(Protocol):
    """T rows of activations in the model's dtype; shapes are [rows, width]. Inputs are contiguous."""

    path: str  # which numeric path this is, for people and for Describe
    invariant: bool  # results bitwise independent of batch composition and chunking

    def linear_weight(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> LinearWeight:
        """Prepare weights [N_i, K] that read one input as a single weight of width ΣN_i (`biases` [N_i], or none)."""
        ...

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of `table` [V, d] by int32 `tokens` [T] → [T, d]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) · weight → [T, d]."""
        ...

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x += delta in place, then `rms_norm(x)`."""
        ...

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """x · weightᵀ + bias → [T, N]."""
        ...

    def scores(self, hidden: torch.Tensor, head: LinearWeight) -> torch.Tensor:
        """hidden · headᵀ → fp32 [T, V]."""
        ...

    def rope_and_cache(
        self, qkv: torch.Tensor, table: RopeTable, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Rotate q and k inside `qkv` [T, (H + 2·KV)·hd] in place, and write k and v at `batch.slots`.

        `keys` and `values` are one layer's pools [blocks, KV, BLOCK_SIZE, hd].
        """
        ...

    def attention(
        self, qkv: torch.Tensor, batch: RaggedBatch, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention of every query over its sequence's pages → [T, H·hd]; q is the first part of `qkv`."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) · up of `gate_up` [T, 2·F] → [T, F]."""
        ...
