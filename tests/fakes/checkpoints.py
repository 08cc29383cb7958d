"""Small public checkpoints, made on the spot: a Hugging Face directory, a GGUF file, and an artefact of either.

All have random weights and a byte-level vocabulary. Nothing here shares code with the readers that it feeds.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.weights.convert import convert
from workers.weights.load import check_texts, load_weights
from workers.weights.manifest import Manifest, read_manifest

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t"), ("Ġt", "he"), ("1", "2"), ("a", "1")]
VOCABULARY = [*SPECIALS, *ALPHABET, *("".join(pair) for pair in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 272,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def tensors(config: Mapping[str, Any] = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under their public names; the head too when it is not tied."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.1)

    made = {"model.embed_tokens.weight": 0.2 * hidden**0.5 * random(config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            made[f"model.layers.{layer}.{name}.weight"] = random(*shape)
            if config.get("attention_bias" if "attn" in name else "mlp_bias"):
                made[f"model.layers.{layer}.{name}.bias"] = random(shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{name}.weight"] = 1 + random(hidden)
    made["model.norm.weight"] = 1 + random(hidden)
    if not config["tie_word_embeddings"]:
        made["lm_head.weight"] = random(config["vocab_size"], hidden)
    return made


def tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges."""
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(VOCABULARY)}, list(MERGES)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIALS)
    return made


def write_directory(
    directory: Path, config: Mapping[str, Any] = CONFIG, weights: Mapping[str, torch.Tensor] | None = None
) -> Path:
    """A Hugging Face model directory with one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = tensors(config) if weights is None else weights
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(config)))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE})
    )
    (directory / "tokenizer.json").write_text(tokenizer().to_str())
    return directory


def write_gguf(
    path: Path, metadata: Mapping[str, tuple[int, Any]], stored: Sequence[tuple[str, Sequence[int], int, bytes]]
) -> Path:
    """A GGUF v3 file: `metadata` is key → (type, value), `stored` is (name, row-major shape, type, bytes)."""
    body = struct.pack("<4sIQQ", b"GGUF", 3, len(stored), len(metadata))
    body += b"".join(
        _text(key) + struct.pack("<I", kind) + _value(kind, value) for key, (kind, value) in metadata.items()
    )
    offset, data = 0, b""
    for name, shape, kind, content in stored:
        body += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        padded = content + b"\0" * (-len(content) % 32)
        data, offset = data + padded, offset + len(padded)
    path.write_bytes(body + b"\0" * (-len(body) % 32) + data)
    return path


STRING, ARRAY, U32, F32, BOOL = 8, 9, 4, 6, 7


def gguf_metadata(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, Any]]:
    """What a converter writes for `config`."""
    unused = [f"<unused{index}>" for index in range(272 - len(VOCABULARY))]
    return {
        "general.architecture": (STRING, "llama"),
        "llama.block_count": (U32, config["num_hidden_layers"]),
        "llama.context_length": (U32, config["max_position_embeddings"]),
        "llama.embedding_length": (U32, config["hidden_size"]),
        "llama.feed_forward_length": (U32, config["intermediate_size"]),
        "llama.attention.head_count": (U32, config["num_attention_heads"]),
        "llama.attention.head_count_kv": (U32, config["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": (F32, config["rms_norm_eps"]),
        "llama.rope.freq_base": (F32, config["rope_theta"]),
        "llama.rope.dimension_count": (U32, config["head_dim"]),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "smollm"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, [*VOCABULARY, *unused])),
        "tokenizer.ggml.token_type": (ARRAY, (U32, [3] * len(SPECIALS) + [1] * (272 - len(SPECIALS)))),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [" ".join(pair) for pair in MERGES])),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
        "tokenizer.ggml.padding_token_id": (U32, 0),
        "tokenizer.chat_template": (STRING, TEMPLATE),
    }


def gguf_tensors(
    weights: Mapping[str, torch.Tensor], config: Mapping[str, Any] = CONFIG
) -> list[tuple[str, Any, int, bytes]]:
    """The tensors as F32 under GGUF names, rows of Q and K interleaved the way converters do it."""
    renamed = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    stored = []
    for name, tensor in weights.items():
        data = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        public, part = name.rsplit(".", 1)
        if public.startswith("model.layers."):
            _, _, layer, inside = public.split(".", 3)
            public = f"blk.{layer}.{renamed[inside]}"
        else:
            public = renamed[public]
        stored.append((f"{public}.{part}", data.shape, 0, np.ascontiguousarray(data).tobytes()))
    return stored


@functools.cache
def small_artefact() -> Path:
    """A converted small model, shared by a test session: copy it before damaging it."""
    root = Path(tempfile.mkdtemp(prefix="trunkline-tests-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    convert(write_directory(root / "source"), root / "small")
    return root / "small"


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, item) for item in items)
    return struct.pack({U32: "<I", F32: "<f", BOOL: "<?"}[kind], value)


def verified(directory: Path) -> Manifest:
    """The manifest of an artefact that loads as a whole; raises ArtefactError."""
    manifest = read_manifest(directory)
    load_weights(directory, manifest, check_texts(directory, manifest), 2)
    return manifest
