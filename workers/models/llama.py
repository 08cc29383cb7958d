"""The Llama family: pre-norm decoder layers with rotary grouped-query attention and SwiGLU.

The one rule: a layer names its weights and says how each is cut across tensor-parallel ranks; converter, planner and
loader only walk those names.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.engine.batch import KVCache, RaggedBatch
from workers.models.config import ModelConfig
from workers.models.ops import LinearWeight, Ops
from workers.models.rope import RopeTable, rope_table


class Split(enum.StrEnum):
    """How a tensor is cut across tensor-parallel ranks."""

    REPLICATED = "replicated"
    ROWS = "rows"  # output features: each rank computes a part of the columns of the result
    COLUMNS = "columns"  # input features: ranks' results are added


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One stored tensor: its public name, its shape, how it is cut, and what it counts as in a memory plan."""

    name: str
    shape: tuple[int, ...]
    split: Split
    category: str  # embedding, attention, mlp, norm, head
    layer: int = -1  # -1 = outside the layers


def weight_specs(config: ModelConfig) -> tuple[WeightSpec, ...]:
    """Every tensor a checkpoint of `config` must hold, in model order; no other is accepted."""
    vocab, hidden = config.vocab_size, config.hidden_size
    specs = [WeightSpec("model.embed_tokens.weight", (vocab, hidden), Split.ROWS, "embedding")]
    for layer in range(config.layers):
        specs.extend(_layer_specs(config, layer))
    specs.append(WeightSpec("model.norm.weight", (hidden,), Split.REPLICATED, "norm"))
    if not config.tied:
        specs.append(WeightSpec("lm_head.weight", (vocab, hidden), Split.ROWS, "head"))
    return tuple(specs)


def _layer_specs(config: ModelConfig, layer: int) -> Iterator[WeightSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = (
        ("self_attn.q_proj", queries, hidden, Split.ROWS, "attention"),
        ("self_attn.k_proj", keys, hidden, Split.ROWS, "attention"),
        ("self_attn.v_proj", keys, hidden, Split.ROWS, "attention"),
        ("self_attn.o_proj", hidden, queries, Split.COLUMNS, "attention"),
        ("mlp.gate_proj", inner, hidden, Split.ROWS, "mlp"),
        ("mlp.up_proj", inner, hidden, Split.ROWS, "mlp"),
        ("mlp.down_proj", hidden, inner, Split.COLUMNS, "mlp"),
    )
    for name, rows, columns, split, category in linears:
        yield WeightSpec(f"model.layers.{layer}.{name}.weight", (rows, columns), split, category, layer)
        biased = config.attention_bias if category == "attention" else config.mlp_bias
        if biased:
            # A bias of a COLUMNS product is added once, after the ranks' results, so every rank may hold all of it.
            bias_split = Split.ROWS if split is Split.ROWS else Split.REPLICATED
            yield WeightSpec(f"model.layers.{layer}.{name}.bias", (rows,), bias_split, category, layer)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield WeightSpec(f"model.layers.{layer}.{name}.weight", (hidden,), Split.REPLICATED, "norm", layer)


class LlamaLayer:
    """One decoder layer. A subclass may change the order of its parts: so the tests prove that the order matters."""

    def __init__(self, config: ModelConfig, ops: Ops, weights: Mapping[str, torch.Tensor], layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self.config, self.ops, self.index = config, ops, layer
        self.scale = config.head_dim**-0.5
        self.input_norm = weights[f"{prefix}.input_layernorm.weight"]
        self.post_norm = weights[f"{prefix}.post_attention_layernorm.weight"]
        self.qkv = _joined(ops, weights, prefix, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        self.o = _joined(ops, weights, prefix, ("self_attn.o_proj",))
        self.gate_up = _joined(ops, weights, prefix, ("mlp.gate_proj", "mlp.up_proj"))
        self.down = _joined(ops, weights, prefix, ("mlp.down_proj",))

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, batch: RaggedBatch, kv: KVCache, table: RopeTable
    ) -> torch.Tensor:
        """Add `delta`, the layer before's last result, to the residual `x` [T, d] in place; return this layer's own.

        Carrying the last addition over lets one operator add and normalise.
        """
        eps = self.config.rms_eps
        normed = self._normed(x, delta, self.input_norm)
        attended = self.attend(normed, batch, kv, table)
        return self.feed_forward(self.ops.add_rms_norm(x, attended, self.post_norm, eps))

    def under(self, ops: Ops) -> LlamaLayer:
        """The same weights under other operators, which read them in the form that they have."""
        other = copy.copy(self)
        other.ops = ops
        return other

    def attend(self, normed: torch.Tensor, batch: RaggedBatch, kv: KVCache, table: RopeTable) -> torch.Tensor:
        """Attention with its projections: [T, d] → [T, d]; writes this layer's keys and values."""
        keys, values = kv.keys[self.index], kv.values[self.index]
        qkv = self.ops.linear(normed, self.qkv)
        self.ops.rope_and_cache(qkv, table, batch, keys, values)
        return self.ops.linear(self.ops.attention(qkv, batch, keys, values, self.scale), self.o)

    def feed_forward(self, normed: torch.Tensor) -> torch.Tensor:
        """down(silu(gate) · up): [T, d] → [T, d]."""
        return self.ops.linear(self.ops.swiglu(self.ops.linear(normed, self.gate_up)), self.down)

    def _normed(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if delta is None:
            return self.ops.rms_norm(x, weight, self.config.rms_eps)
        return self.ops.add_rms_norm(x, delta, weight, self.config.rms_eps)


class Llama:
    """A decoder over a ragged batch and a paged cache. Not thread-safe: one step at a time."""

    layer_class: type[LlamaLayer] = LlamaLayer

    def __init__(self, config: ModelConfig, ops: Ops, weights: Mapping[str, torch.Tensor]) -> None:
        self.config, self.ops = config, ops
        self.embedding = weights["model.embed_tokens.weight"]
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.table = rope_table(config, self.device)
        self.layers: Sequence[LlamaLayer] = [
            self.layer_class(config, ops, weights, layer) for layer in range(config.layers)
        ]
        self.norm = weights["model.norm.weight"]
        self.head: LinearWeight = ops.linear_weight([self.embedding if config.tied else weights["lm_head.weight"]], [])

    def under(self, ops: Ops) -> Llama:
        """The same weights under other operators, which read them in the form that they have."""
        other = copy.copy(self)
        other.ops, other.layers = ops, [layer.under(ops) for layer in self.layers]
        return other

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """Run one step and write its keys and values: final-normed hidden states [T, d] in the model's dtype."""
        x = self.ops.embed(batch.tokens, self.embedding)
        delta: torch.Tensor | None = None
        for layer in self.layers:
            delta = layer(x, delta, batch, kv, self.table)
        assert delta is not None  # a model has at least one layer
        return self.ops.add_rms_norm(x, delta, self.norm, self.config.rms_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vocabulary scores of `hidden` [R, d] (rows of `forward`'s result): fp32 [R, V]."""
        return self.ops.scores(hidden.contiguous(), self.head)


def _joined(ops: Ops, weights: Mapping[str, torch.Tensor], prefix: str, names: Sequence[str]) -> LinearWeight:
    """Several projections of the same input as one weight; each output column is computed on its own anyway."""
    parts = [weights[f"{prefix}.{name}.weight"] for name in names]
    return ops.linear_weight(parts, [weights[key] for name in names if (key := f"{prefix}.{name}.bias") in weights])
