"""Rotary embedding tables.

Frequencies, angles, cosines and sines are computed in fp32, as the public reference implementation does; a table
holds each pair's value once (half of head_dim), because both halves of a head share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from workers.models.config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin by position: fp32 [max_context, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


def rope_table(config: ModelConfig, device: torch.device) -> RopeTable:
    """The table of `config` for every position of its context."""
    inverse = inverse_frequencies(config.rope, config.head_dim)
    angles = torch.arange(config.max_context, dtype=torch.float32)[:, None] * inverse[None, :]
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2]: 1 / theta^(2i / head_dim), then the scaling of the rope kind."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    return inverse


def _llama3(inverse: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1's recipe)."""
    wavelength = 2 * math.pi / inverse
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    long = wavelength > rope.original_context / rope.low_freq_factor
    short = wavelength < rope.original_context / rope.high_freq_factor
    return torch.where(long, inverse / rope.factor, torch.where(short, inverse, blended))
