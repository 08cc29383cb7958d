"""Models of a named shape with random weights: what is measured where no checkpoint can be had.

The one rule: a shape, its number of layers and a seed make the same weights, however many threads made them.

Values are normal with variance 1 / inputs, so that every product of normalised values, the scores included, has a
variance near one. They are drawn one by one, neither constant nor a repeated block: what a GPU's multipliers draw, and
with it their clock, depends on the bits that change (a large product runs about 13 % faster on zeros).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.models.config import parse_config
from workers.models.registry import family
from workers.weights.convert import write_artefact
from workers.weights.load import Progress, no_progress
from workers.weights.manifest import Manifest
from workers.weights.source import SourceError, TextFiles

_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
_LLAMA3: Final[dict[str, Any]] = {
    **_LLAMA,
    "vocab_size": 128_256,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_LLAMA3_ROPE: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "8b": {  # Llama-3.1-8B
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "1b": {  # Llama-3.2-1B
        **_LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "135m": {  # SmolLM2-135M
        **_LLAMA,
        "vocab_size": 49_152,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
}
"""`config.json` of each shape, as published."""

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SPECIAL = {"bos_token_id": "<|begin|>", "eos_token_id": "<|end|>"}
_BLOCK = 1 << 20  # values that one generator draws


def shape_config(shape: str, layers: int = 0) -> dict[str, Any]:
    """`config.json` of a shape, with another number of layers if given; raises SourceError for an unknown shape."""
    if shape not in SHAPES:
        raise SourceError(f"there is no shape {shape!r} (there are: {', '.join(SHAPES)})")
    return {**SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}


def make_random(
    target: Path, shape: str, *, layers: int = 0, seed: int = 0, name: str = "", progress: Progress = no_progress
) -> Manifest:
    """Write a bf16 artefact of `shape` to the directory `target`, replacing one that is there.

    It has no golden vectors: the reference would need four bytes per weight and minutes, to prove what no one trained.
    Holds one tensor at a time, in fp32 and bf16. Raises SourceError or OSError; then `target` is as it was.
    """
    with RandomSource(shape_config(shape, layers), seed) as source:
        return write_artefact(
            source, f"{shape}, seed {seed}", target, precision="bf16", name=name, golden=False, progress=progress
        )


class RandomSource:
    """`workers.weights.source.Source` of drawn weights for a `config.json`."""

    kind = "random"

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        parsed = parse_config(config)
        self._config, self._seed = config, seed
        self._shapes = {spec.name: spec.shape for spec in family(parsed.architecture).weight_specs(parsed)}
        self._pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        ends = {key: config[key] for key in _SPECIAL}
        self.texts = TextFiles(
            config=config,
            generation=ends,
            tokenizer=_tokenizer(parsed.vocab_size, {ends[key]: token for key, token in _SPECIAL.items()}).to_str(),
            chat_template=TEMPLATE,
            special_tokens={
                "bos_token": _SPECIAL["bos_token_id"],
                "eos_token": _SPECIAL["eos_token_id"],
                "tokenizer_class": "PreTrainedTokenizerFast",  # for others who serve the directory
            },
        )

    def __enter__(self) -> RandomSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown()

    @property
    def names(self) -> Set[str]:
        return self._shapes.keys()

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)  # a norm's weight
        values = torch.empty(shape)
        blocks = torch.split(values.view(-1), _BLOCK)
        # Each draws its own, and outside the interpreter lock; a list, so that what goes wrong is raised here.
        list(self._pool.map(lambda index: self._draw(blocks[index], name, index, shape[-1]), range(len(blocks))))
        return values

    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self._config, self._seed], sort_keys=True).encode()).hexdigest()

    def _draw(self, block: torch.Tensor, name: str, index: int, inputs: int) -> None:
        seed = hashlib.sha256(f"{self._seed}/{name}/{index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:4], "little"))
        block.normal_(0.0, inputs**-0.5, generator=generator)


def _tokenizer(size: int, special: dict[int, str]) -> Tokenizer:
    """Byte-level, one token per byte; every further id is a word of its own, so that any output can be read."""
    alphabet = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokens = [special.get(index) or next(alphabet, f"Ġ{index}") for index in range(size)]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*special.values()])
    return made
