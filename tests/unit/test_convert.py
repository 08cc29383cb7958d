"""Conversion: what it writes, and that it writes all of it or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import (
    CONFIG,
    gguf_metadata,
    gguf_tensors,
    small_artefact,
    tensors,
    tokenizer,
    verified,
    write_directory,
    write_gguf,
)
from workers.models.config import ConfigError
from workers.weights.convert import convert
from workers.weights.golden import load_golden
from workers.weights.load import check_texts, load_weights
from workers.weights.manifest import GOLDEN, Manifest, read_manifest
from workers.weights.source import SourceError

UNTIED = {**CONFIG, "tie_word_embeddings": False}


def loaded(directory: Path) -> Mapping[str, torch.Tensor]:
    manifest = read_manifest(directory)
    return load_weights(directory, manifest, check_texts(directory, manifest), 1).tensors


def converted(tmp_path: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
    convert(write_directory(tmp_path / "source", config, weights), tmp_path / "model")
    return tmp_path / "model"


def test_a_gguf_file_and_its_original_become_the_same_weights(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "m.gguf", gguf_metadata(), gguf_tensors(tensors())), tmp_path / "model")
    original = loaded(small_artefact())
    assert all(torch.equal(tensor, original[name]) for name, tensor in loaded(tmp_path / "model").items())


def test_converting_twice_gives_the_same_hashes_and_replaces_what_was_there(tmp_path: Path) -> None:
    first = convert(write_directory(tmp_path / "source"), tmp_path / "model")
    (tmp_path / "model" / "stray").write_text("left by somebody")
    second = convert(tmp_path / "source", tmp_path / "model")
    assert first == second == verified(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "source"]
    assert not (tmp_path / "model" / "stray").exists()


def test_the_manifest_tells_how_each_tensor_is_cut_and_where_it_came_from() -> None:
    manifest: Manifest = read_manifest(small_artefact())
    splits = {entry.name: entry.split for entry in manifest.tensors}
    assert splits["model.layers.0.self_attn.q_proj.weight"] == "rows"
    assert splits["model.layers.0.self_attn.o_proj.weight"] == "columns"
    assert splits["model.norm.weight"] == "replicated"
    assert manifest.parameters == sum(tensor.numel() for tensor in tensors().values())
    assert (manifest.origin.kind, manifest.origin.name, len(manifest.origin.sha256)) == ("huggingface", "source", 64)
    assert (manifest.tensor_parallel, manifest.pipeline_parallel, manifest.precision) == (1, 1, "fp32")


def test_bf16_is_rounded_once_and_takes_half_the_room(tmp_path: Path) -> None:
    manifest = convert(write_directory(tmp_path / "source"), tmp_path / "model", precision="bf16")
    assert {entry.dtype for entry in manifest.tensors} == {"BF16"}
    for name, tensor in loaded(tmp_path / "model").items():
        assert torch.equal(tensor, tensors()[name].to(torch.bfloat16))


def test_a_stored_head_equal_to_a_tied_embedding_is_dropped_and_another_one_is_kept(tmp_path: Path) -> None:
    equal = {**tensors(), "lm_head.weight": tensors()["model.embed_tokens.weight"].clone()}
    assert "lm_head.weight" not in loaded(converted(tmp_path / "equal", CONFIG, equal))
    other = converted(tmp_path / "other", CONFIG, {**tensors(), "lm_head.weight": tensors(UNTIED)["lm_head.weight"]})
    assert torch.equal(loaded(other)["lm_head.weight"], tensors(UNTIED)["lm_head.weight"])
    assert json.loads((other / "config.json").read_text())["tie_word_embeddings"] is False


def test_rebuilt_rotary_buffers_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert loaded(converted(tmp_path, CONFIG, {**tensors(), **buffers})).keys() == tensors().keys()


def _without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors(UNTIED).items() if key != name}


@pytest.mark.parametrize(
    ("config", "weights", "problem"),
    [
        (UNTIED, _without("lm_head.weight"), "lm_head.weight is missing although"),
        (UNTIED, _without("model.norm.weight"), "'model.norm.weight' is missing"),
        (CONFIG, {**tensors(), "model.extra": torch.ones(1)}, "'model.extra' has no place"),
        (CONFIG, {**tensors(), "model.norm.weight": torch.ones(47)}, r"shape \(47,\)"),
        (CONFIG, {**tensors(), "model.norm.weight": torch.full((48,), torch.nan)}, "not finite"),
        ({**CONFIG, "architectures": ["GPT2LMHeadModel"]}, tensors(), "'GPT2LMHeadModel' is not supported"),
        ({**CONFIG, "quantization_config": {"quant_method": "gptq"}}, tensors(), "already quantised .gptq."),
        ({**CONFIG, "vocab_size": 100}, tensors({**CONFIG, "vocab_size": 100}), "more tokens than the model"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_what_was_there_stays(
    tmp_path: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], problem: str
) -> None:
    target = tmp_path / "models" / "model"
    target.mkdir(parents=True)
    (target / "manifest.json").write_text("the one before")
    with pytest.raises((SourceError, ConfigError), match=problem):
        convert(write_directory(tmp_path / "source", config, weights), target)
    assert (target / "manifest.json").read_text() == "the one before"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="absent"):
        convert(tmp_path / "absent", tmp_path / "model")


def test_progress_of_each_stage_only_grows_and_ends(tmp_path: Path) -> None:
    seen: dict[str, list[float]] = {}
    convert(
        write_directory(tmp_path / "source"),
        tmp_path / "model",
        progress=lambda stage, fraction: seen.setdefault(stage, []).append(fraction),
    )
    assert seen.keys() == {"hash source", "write weights", "golden vectors"}
    assert all(fractions == sorted(fractions) and fractions[-1] == 1.0 for fractions in seen.values())


def test_golden_vectors_hold_what_transformers_says_of_the_prompts() -> None:
    golden = load_golden(small_artefact() / GOLDEN)
    assert golden.prompts[0].tolist() == tokenizer().encode("The capital of France is").ids
    assert golden.tokens.shape == golden.margins.shape == (len(golden.prompts), 32)
    for place, logits in zip(golden.places.tolist(), golden.logits, strict=True):
        assert int(logits.argmax()) == int(golden.tokens[place[0], place[1]])
