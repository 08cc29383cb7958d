"""The arrays of one ragged step and the KV pool they point into.

Owns shapes and dtypes only. The one rule: a decode step is a ragged step whose spans have one token each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """One forward step: S spans (sequences) with T tokens in all, R rows whose logits are wanted."""

    tokens: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    slots: torch.Tensor  # int32 [T]; block * BLOCK_SIZE + offset, where this token's K and V are written
    query_starts: torch.Tensor  # int32 [S + 1]; span s is rows query_starts[s]:query_starts[s + 1]
    context_lens: torch.Tensor  # int32 [S]; tokens in the cache after this step (its last query's position + 1)
    block_tables: torch.Tensor  # int32 [S, B]; block ids, padded with 0
    logit_rows: torch.Tensor  # int32 [R]; rows of [T] whose logits are wanted


@dataclass(frozen=True, slots=True)
class KVCache:
    """Paged keys and values: [layers, blocks, kv_heads, BLOCK_SIZE, head_dim], model dtype."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def blocks(self) -> int:
        """Number of blocks in the pool."""
        return int(self.keys.shape[1])

    @classmethod
    def zeros(
        cls, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """A pool of `blocks` blocks."""
        shape = (layers, blocks, kv_heads, BLOCK_SIZE, head_dim)
        return cls(_zeros(shape, dtype, device), _zeros(shape, dtype, device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU their pages come from the kernel at first use: filling gigabytes would only delay the start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
