"""Model configs in every form that is met, and a named refusal of what is not implemented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import CONFIG
from workers.models.config import ConfigError, ModelConfig, RopeConfig, parse_config, read_config
from workers.models.registry import family
from workers.models.rope import inverse_frequencies, rope_table

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def parsed(**changes: Any) -> ModelConfig:
    return parse_config({**CONFIG, **changes})


def test_the_older_and_the_newer_form_of_rotary_settings_mean_the_same() -> None:
    older = parsed(rope_theta=5e5, rope_scaling=LLAMA3)
    newer = parsed(rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    aliased = parsed(rope_theta=5e5, rope_scaling={**LLAMA3, "type": LLAMA3["rope_type"], "rope_type": None})
    assert older == newer == aliased
    assert older.rope == RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64)


def test_absent_sizes_follow_from_the_others() -> None:
    config = parsed(head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.kv_heads, config.group) == (8, 6, 1)
    explicit = parsed()
    assert (explicit.head_dim, explicit.kv_heads, explicit.group) == (8, 2, 3)
    assert parsed(rope_scaling={"rope_type": "llama3", "factor": 8}).rope.original_context == 256


def test_end_tokens_of_the_generation_config_win_and_may_be_several() -> None:
    assert parse_config(CONFIG).eos_token_ids == (2,)
    assert parse_config(CONFIG, {"eos_token_id": [7, 9]}).eos_token_ids == (7, 9)
    assert parse_config(CONFIG, {"eos_token_id": 5}).eos_token_ids == (5,)
    assert parse_config({key: value for key, value in CONFIG.items() if key != "eos_token_id"}).eos_token_ids == ()


def test_both_files_of_a_directory_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))
    assert read_config(tmp_path).eos_token_ids == (4,)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"num_key_value_heads": 4}, "not a multiple"),
        ({"head_dim": 7}, "odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"architectures": []}, "names 0 architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parsed(**changes)


def test_an_unknown_architecture_is_refused_with_what_is_supported() -> None:
    with pytest.raises(ConfigError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM"):
        family("GPT2LMHeadModel")


@pytest.mark.parametrize(
    "rope", [None, {"rope_type": "linear", "factor": 3.0}, LLAMA3], ids=["default", "linear", "llama3"]
)
def test_rotary_frequencies_and_angles_are_those_of_transformers(rope: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {**CONFIG, "rope_theta": 5e4, "rope_scaling": rope}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{key: value for key, value in raw.items() if value is not None}))
    config = parse_config(raw)
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), theirs.inv_freq)
    positions = torch.arange(config.max_context)[None]
    cos, sin = theirs(torch.zeros(1), positions)
    table = rope_table(config, torch.device("cpu"))
    half = config.head_dim // 2
    assert torch.equal(table.cos, cos[0, :, :half])
    assert torch.equal(table.sin, sin[0, :, half:])
