"""What a model is: sizes, rotary embedding, end tokens, read once from `config.json` and `generation_config.json`.

The one rule: a setting this code does not implement is refused by name; it is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROPE_KINDS = ("default", "linear", "llama3")


class ConfigError(ValueError):
    """The model's own description is missing something or asks for what is not implemented."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `factor` and the two frequency factors matter only for the kinds that use them."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one Llama-family decoder. `heads` is a multiple of `kv_heads`; query head h reads kv head h // group."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rms_eps: float
    rope: RopeConfig
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads


def read_config(directory: Path) -> ModelConfig:
    """The model described by `config.json` in `directory`; raises ConfigError, or OSError if it cannot be read."""
    generation = directory / "generation_config.json"
    extra = json.loads(generation.read_text()) if generation.exists() else {}
    return parse_config(json.loads((directory / "config.json").read_text()), extra)


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Both the older keys (`rope_theta`, `rope_scaling`) and `rope_parameters` are understood; raises ConfigError."""
    _refuse_unsupported(raw)
    heads = _count(raw, "num_attention_heads")
    hidden = _count(raw, "hidden_size")
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    context = _count(raw, "max_position_embeddings")
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim ({head_dim}) is odd; a rotary embedding needs pairs")
    return ModelConfig(
        architecture=_architecture(raw),
        layers=_count(raw, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_count(raw, "vocab_size"),
        max_context=context,
        rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(raw, context),
        tied=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=_eos_ids({**raw, **(generation or {})}.get("eos_token_id")),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if len(names) != 1:
        raise ConfigError(f"config.json names {len(names)} architectures; exactly one is needed")
    return str(names[0])


def _count(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive number, found {value!r}")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(f"the checkpoint is already quantised ({method}); convert from the original weights")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported (silu is)")
    if raw.get("sliding_window"):
        raise ConfigError("sliding_window attention is not supported for this family")


def _parse_rope(raw: Mapping[str, Any], context: int) -> RopeConfig:
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rotary embedding {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise ConfigError(f"partial_rotary_factor {partial} is not supported for this family")
    if kind != "default" and "factor" not in given:
        raise ConfigError(f"rotary embedding {kind!r} needs a factor")
    return RopeConfig(
        kind=kind,
        theta=float(given.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        factor=float(given.get("factor") or 1.0),
        low_freq_factor=float(given.get("low_freq_factor") or 1.0),
        high_freq_factor=float(given.get("high_freq_factor") or 4.0),
        original_context=int(given.get("original_max_position_embeddings") or context),
    )


def _eos_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(str(value)),)
