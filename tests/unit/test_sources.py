"""Checkpoints as conversion sources: the same weights whatever they are stored in, and clear refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.fakes.checkpoints import (
    CONFIG,
    STRING,
    TEMPLATE,
    U32,
    gguf_metadata,
    gguf_tensors,
    tensors,
    write_directory,
    write_gguf,
)  # fmt: skip
from workers.models.config import parse_config
from workers.weights.gguf import GGUFError
from workers.weights.gguf_llama import GGUFSource, public_row_order
from workers.weights.huggingface import DirectorySource
from workers.weights.source import SourceError

WEIGHTS = tensors()


def gguf(path: Path, metadata: Mapping[str, Any] | None = None) -> Path:
    return write_gguf(path, {**gguf_metadata(), **(metadata or {})}, gguf_tensors(WEIGHTS))


def test_a_gguf_file_gives_back_every_tensor_in_the_public_row_order(tmp_path: Path) -> None:
    with GGUFSource(gguf(tmp_path / "m.gguf")) as source:
        assert source.names == WEIGHTS.keys()
        for name, tensor in WEIGHTS.items():
            assert torch.equal(source.tensor(name), tensor), name


def test_keys_are_reordered_by_their_own_number_of_heads() -> None:
    rows = np.arange(12, dtype=np.float32)[:, None]
    assert public_row_order(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert public_row_order(rows, 3)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


def test_a_gguf_file_describes_the_same_model_as_the_directory_it_came_from(tmp_path: Path) -> None:
    with GGUFSource(gguf(tmp_path / "m.gguf")) as source:
        assert parse_config(source.texts.config) == parse_config(CONFIG)
        assert source.texts.chat_template == TEMPLATE
        assert source.texts.special_tokens == {
            "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        }  # fmt: skip
        assert source.texts.generation["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"general.architecture": (STRING, "qwen2")}, "'qwen2'"),
        ({"tokenizer.ggml.pre": (STRING, "llama-bpe")}, "'llama-bpe'.*Hugging Face directory"),
        ({"tokenizer.ggml.model": (STRING, "llama")}, "'llama'"),
        ({"llama.rope.scaling.type": (STRING, "yarn")}, "scaled rotary"),
        ({"tokenizer.ggml.merges": (U32, 1)}, "merges"),
        ({"llama.block_count": (U32, 2)}, r"'blk\.2\..*no place"),
    ],
)
def test_a_gguf_file_that_is_something_else_is_refused(tmp_path: Path, change: Mapping[str, Any], problem: str) -> None:
    with pytest.raises((SourceError, GGUFError), match=problem):
        GGUFSource(gguf(tmp_path / "m.gguf", change))


def test_a_gguf_file_without_a_needed_entry_names_it(tmp_path: Path) -> None:
    metadata = {key: value for key, value in gguf_metadata().items() if key != "llama.block_count"}
    with pytest.raises(GGUFError, match=r"llama\.block_count"):
        GGUFSource(write_gguf(tmp_path / "m.gguf", metadata, gguf_tensors(WEIGHTS)))


def test_a_directory_and_a_sharded_directory_give_the_same_tensors(tmp_path: Path) -> None:
    write_directory(tmp_path / "one")
    sharded = write_directory(tmp_path / "many")
    (sharded / "model.safetensors").unlink()
    names = sorted(WEIGHTS)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: WEIGHTS[name] for name in held}, sharded / shard)
    index = {name: shard for shard, held in shards.items() for name in held}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with DirectorySource(tmp_path / "one") as one, DirectorySource(sharded) as many:
        assert one.names == many.names == WEIGHTS.keys()
        assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in names)
        assert one.texts == many.texts
        assert one.texts.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

    (sharded / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**index, names[0]: "b.safetensors"}})
    )
    with pytest.raises(SourceError, match="disagree about tensor"):
        DirectorySource(sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {names[0]: "../a.safetensors"}}))
    with pytest.raises(SourceError, match="outside the directory"):
        DirectorySource(sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {names[0]: "c.safetensors"}}))
    with pytest.raises(SourceError, match=r"c\.safetensors cannot be read"):
        DirectorySource(sharded)


def test_pickle_weights_are_refused_unopened(tmp_path: Path) -> None:
    directory = write_directory(tmp_path)
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"would run code if it were opened")
    with pytest.raises(SourceError, match="pickle"):
        DirectorySource(directory)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", None, r"no tokenizer\.json"),
        ("config.json", None, r"no config\.json"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("model.safetensors", None, r"no model\.safetensors"),
        ("model.safetensors", "short", "cannot be read"),
    ],
)
def test_a_directory_that_lacks_something_says_what(
    tmp_path: Path, name: str, content: str | None, problem: str
) -> None:
    directory = write_directory(tmp_path)
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_text(content)
    with pytest.raises(SourceError, match=problem):
        DirectorySource(directory)


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    name = "model.norm.weight"
    directory = write_directory(tmp_path, weights={**WEIGHTS, name: WEIGHTS[name].to(torch.int8)})
    with DirectorySource(directory) as source, pytest.raises(SourceError, match="already quantised"):
        source.tensor(name)


def test_the_template_of_its_own_file_wins_and_the_default_of_several_is_taken(tmp_path: Path) -> None:
    directory = write_directory(tmp_path)
    several = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with DirectorySource(directory) as source:
        assert source.texts.chat_template == "D"
    (directory / "chat_template.jinja").write_text("J")
    with DirectorySource(directory) as source:
        assert source.texts.chat_template == "J"


def test_a_digest_changes_with_the_weights(tmp_path: Path) -> None:
    with DirectorySource(write_directory(tmp_path / "a")) as a, DirectorySource(write_directory(tmp_path / "b")) as b:
        same = a.digest()
        assert same == b.digest()
    with DirectorySource(write_directory(tmp_path / "b", weights=tensors(seed=1))) as changed:
        assert changed.digest() != same
