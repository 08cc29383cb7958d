"""What a model needs in memory, before anything is loaded: a pure function of its config and its degrees.

The one rule: numbers here are bytes per rank, counted from the same tensor list that the loader checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.models.config import ConfigError, ModelConfig
from workers.models.llama import Split, WeightSpec
from workers.models.registry import family

ITEM_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Rank:
    """One (pipeline, tensor) rank: bytes of weights by category, and bytes that one cached token takes."""

    pipeline: int
    tensor: int
    weights: Mapping[str, int]
    kv_bytes_per_token: int

    @property
    def weight_bytes(self) -> int:
        """All categories together."""
        return sum(self.weights.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All ranks, and what the tightest of them can cache."""

    ranks: tuple[Rank, ...]
    kv_tokens: int  # tokens that fit beside the weights on every rank
    concurrency: int  # sequences of full context that fit at once


def plan_memory(
    config: ModelConfig,
    *,
    precision: str,
    memory: int,
    context: int = 0,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    packed: bool = False,
) -> MemoryPlan:
    """Plan `memory` bytes per rank for sequences of `context` tokens (0 = the model's own limit).

    `packed` counts the second, packed copy of a tied embedding that CPU kernels read as the output matrix.
    Raises ConfigError when the degrees do not divide the model.
    """
    _check_degrees(config, tensor_parallel, pipeline_parallel)
    ranks = tuple(
        _rank(config, ITEM_BYTES[precision], stage, shard, tensor_parallel, pipeline_parallel, packed)
        for stage in range(pipeline_parallel)
        for shard in range(tensor_parallel)
    )
    tokens = min(max(0, memory - rank.weight_bytes) // rank.kv_bytes_per_token for rank in ranks)
    return MemoryPlan(ranks, tokens, tokens // (context or config.max_context))


def _check_degrees(config: ModelConfig, tensor: int, pipeline: int) -> None:
    for what, count in (
        ("query heads", config.heads),
        ("kv heads", config.kv_heads),
        ("feed-forward columns", config.intermediate_size),
        ("vocabulary entries", config.vocab_size),
    ):
        if count % tensor:
            raise ConfigError(f"{count} {what} cannot be cut into {tensor} equal tensor-parallel parts")
    if pipeline > config.layers:
        raise ConfigError(f"{config.layers} layers cannot fill {pipeline} pipeline stages")


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """The layers of one pipeline stage: consecutive, the first stages one longer where they do not divide."""
    base, extra = divmod(layers, stages)
    first = stage * base + min(stage, extra)
    return range(first, first + base + (stage < extra))


def _rank(config: ModelConfig, item: int, stage: int, shard: int, tensor: int, pipeline: int, packed: bool) -> Rank:
    held = stage_layers(config.layers, pipeline, stage)
    weights: dict[str, int] = {}
    for spec in family(config.architecture).weight_specs(config):
        if spec.layer in held or (spec.layer < 0 and _outside(spec, config, stage, pipeline)):
            weights[spec.category] = weights.get(spec.category, 0) + _spec_bytes(spec, item, tensor)
    if config.tied and (packed or pipeline > 1) and stage == pipeline - 1:
        weights["head"] = item * config.vocab_size * config.hidden_size // tensor
    kv = 2 * item * len(held) * (config.kv_heads // tensor) * config.head_dim
    return Rank(stage, shard, weights, kv)


def _outside(spec: WeightSpec, config: ModelConfig, stage: int, pipeline: int) -> bool:
    """The embedding is on the first stage, the final norm and the head on the last."""
    return stage == 0 if spec.category == "embedding" else stage == pipeline - 1


def _spec_bytes(spec: WeightSpec, item: int, tensor: int) -> int:
    count = item
    for size in spec.shape:
        count *= size
    return count if spec.split is Split.REPLICATED else count // tensor
