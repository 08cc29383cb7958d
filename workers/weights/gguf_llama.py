"""A Llama-family GGUF file as a conversion source.

The one rule: GGUF keeps the rows of Q and K in the order of interleaved rotary pairs, permuted per head; they are put
back into the public order here, K with the number of *its own* heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from workers.weights.gguf import Array, GGUFError, GGUFFile
from workers.weights.source import SourceError, TextFiles, file_sha256
from workers.weights.tokenizer import tokenizer_from_gguf

_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFSource:
    """`workers.weights.source.Source` over one GGUF file; raises SourceError or GGUFError when it cannot be used."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GGUFFile(path)
        facts = _Facts(self._file.metadata)
        if facts.architecture != "llama":
            raise SourceError(f"{path.name} holds architecture {facts.architecture!r}; only 'llama' is supported")
        self._heads, self._kv_heads = facts.number("attention.head_count"), facts.kv_heads
        self._names = _public_names(self._file.tensors.keys(), facts.number("block_count"))
        self.texts = TextFiles(
            config=_config(facts, tied="output.weight" not in self._file.tensors),
            generation=_generation(facts),
            tokenizer=tokenizer_from_gguf(self._file.metadata).to_str(),
            chat_template=str(self._file.metadata.get("tokenizer.chat_template", "")),
            special_tokens=_special_tokens(facts),
        )

    def __enter__(self) -> GGUFSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(None, None, None)

    @property
    def names(self) -> Set[str]:
        return self._names.keys()

    def tensor(self, name: str) -> torch.Tensor:
        data = self._file.tensor(self._names[name])
        if ".q_proj." in name:
            data = public_row_order(data, self._heads)
        elif ".k_proj." in name:
            data = public_row_order(data, self._kv_heads)
        return torch.from_numpy(np.ascontiguousarray(data))

    def digest(self) -> str:
        return file_sha256(self._path)


def public_row_order(rows: Array, heads: int) -> Array:
    """Undo GGUF's permutation: rows (2i, 2i + 1) of a head go to (i, i + head_dim / 2)."""
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1)
    return split.swapaxes(1, 2).reshape(rows.shape)


class _Facts:
    """Typed look-ups in the metadata; a missing one is named."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture"))

    def number(self, key: str) -> int:
        return int(self._get(f"{self.architecture}.{key}"))

    def real(self, key: str, default: float) -> float:
        # The shortest decimal that is the same fp32 number: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(self.metadata.get(f"{self.architecture}.{key}", default))))

    def text_of(self, key: str) -> tuple[int, str] | None:
        """The id and text of a special token such as `bos_token_id`."""
        index = self.metadata.get(f"tokenizer.ggml.{key}")
        return None if index is None else (int(index), str(self._get("tokenizer.ggml.tokens")[index]))

    @property
    def kv_heads(self) -> int:
        stored = self.metadata.get(f"{self.architecture}.attention.head_count_kv")
        return int(stored or self.number("attention.head_count"))

    def _get(self, key: str) -> Any:
        if key not in self.metadata:
            raise GGUFError(f"the file's metadata has no {key}")
        return self.metadata[key]


def _public_names(stored: Set[str], layers: int) -> dict[str, str]:
    """Hugging Face name → GGUF name of every stored tensor; raises SourceError for one that fits no place."""
    table = {public: name for public, name in _OUTSIDE.items() if name in stored}
    for layer in range(layers):
        for public, name in _INSIDE.items():
            for part in ("weight", "bias"):
                if (found := f"blk.{layer}.{name}.{part}") in stored:
                    table[f"model.layers.{layer}.{public}.{part}"] = found
    unknown = sorted(stored - set(table.values()))
    if unknown:
        raise SourceError(f"tensor {unknown[0]!r} has no place in a Llama model ({len(unknown)} such tensors)")
    return table


def _config(facts: _Facts, tied: bool) -> dict[str, Any]:
    if "llama.rope.scaling.type" in facts.metadata and facts.metadata["llama.rope.scaling.type"] != "none":
        raise SourceError("scaled rotary embeddings of GGUF files are not supported; convert the original directory")
    heads, hidden = facts.number("attention.head_count"), facts.number("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": facts.number("block_count"),
        "hidden_size": hidden,
        "intermediate_size": facts.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": int(facts.metadata.get("llama.rope.dimension_count") or hidden // heads),
        "vocab_size": len(facts.metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": facts.number("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": facts.real("rope.freq_base", 10_000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **{key: token[0] for key in ("bos_token_id", "eos_token_id") if (token := facts.text_of(key))},
    }


def _generation(facts: _Facts) -> dict[str, Any]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {key: token[0] for key, stored in names.items() if (token := facts.text_of(stored))}


def _special_tokens(facts: _Facts) -> dict[str, str]:
    names = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    return {key: token[1] for key, stored in names.items() if (token := facts.text_of(stored))}
