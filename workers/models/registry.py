"""Which class runs which architecture name of `config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.models.config import ConfigError, ModelConfig
from workers.models.llama import Llama, WeightSpec, weight_specs


@dataclass(frozen=True, slots=True)
class Family:
    """A model class and the tensors its checkpoints hold."""

    model: type[Llama]
    weight_specs: Callable[[ModelConfig], tuple[WeightSpec, ...]]


FAMILIES = {"LlamaForCausalLM": Family(Llama, weight_specs)}


def family(architecture: str) -> Family:
    """The family of `architecture`; raises ConfigError naming what is supported."""
    found = FAMILIES.get(architecture)
    if found is None:
        raise ConfigError(f"architecture {architecture!r} is not supported (supported: {', '.join(FAMILIES)})")
    return found
