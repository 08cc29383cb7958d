"""A Hugging Face model directory (safetensors, one file or sharded) as a conversion source.

The one rule: weights are read from safetensors only. Pickle files can run code when opened and are never touched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from workers.weights.source import SourceError, TextFiles, file_sha256

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
_REBUILT = "rotary_emb.inv_freq"  # a buffer old checkpoints carry; it follows from the config


class DirectorySource:
    """`workers.weights.source.Source` over a directory; raises SourceError when it cannot be used."""

    kind = "huggingface"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        config = _json(directory / "config.json")
        tokenizer_config = _json(directory / "tokenizer_config.json", optional=True)
        self._stack = ExitStack()
        self._shards = _shard_names(directory)
        self._files = self._open(_unique(self._shards.values()))
        self._shards = {name: shard for name, shard in self._shards.items() if not name.endswith(_REBUILT)}
        self.texts = TextFiles(
            config=config,
            generation=_json(directory / "generation_config.json", optional=True),
            tokenizer=_tokenizer(directory),
            chat_template=_chat_template(directory, tokenizer_config),
            special_tokens={key: _content(tokenizer_config[key]) for key in _SPECIAL if tokenizer_config.get(key)},
        )

    def __enter__(self) -> DirectorySource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def names(self) -> Set[str]:
        return self._shards.keys()

    def tensor(self, name: str) -> torch.Tensor:
        data: torch.Tensor = self._files[self._shards[name]].get_tensor(name)
        if data.dtype not in _DTYPES:
            raise SourceError(f"tensor {name!r} is {data.dtype}: already quantised weights cannot be converted")
        return data

    def digest(self) -> str:
        files = ["config.json", "tokenizer.json", *_unique(self._shards.values())]
        lines = [f"{name} {file_sha256(self._directory / name)}\n" for name in files]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _open(self, names: list[str]) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for name in names:
            try:
                files[name] = self._stack.enter_context(safe_open(self._directory / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise SourceError(f"{name} cannot be read: {error}") from error
            stored, claimed = set(files[name].keys()), {key for key, shard in self._shards.items() if shard == name}
            if stored != claimed:
                odd = sorted(stored ^ claimed)[0]
                raise SourceError(f"the index and {name} disagree about tensor {odd!r}")
        return files


def _shard_names(directory: Path) -> dict[str, str]:
    """Tensor name → file name."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        shards = {str(name): str(file) for name, file in _json(index).get("weight_map", {}).items()}
        for file in shards.values():
            if Path(file).name != file:
                raise SourceError(f"the index names a file outside the directory: {file!r}")
        return shards
    if single.exists():
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single.name)
        except SafetensorError as error:
            raise SourceError(f"{single.name} cannot be read: {error}") from error
    if any(next(directory.glob(pattern), None) for pattern in _PICKLES):
        raise SourceError(
            "only pickle weights were found; opening them could run code. Save the model as safetensors first "
            "(save_pretrained does)"
        )
    raise SourceError("no model.safetensors or model.safetensors.index.json in the directory")


def _unique(names: Any) -> list[str]:
    return sorted(set(names))


def _tokenizer(directory: Path) -> str:
    path = directory / "tokenizer.json"
    if not path.exists():
        raise SourceError("there is no tokenizer.json; save the fast tokenizer into the directory first")
    return path.read_text(encoding="utf-8")


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    stored = tokenizer_config.get("chat_template") or ""
    if isinstance(stored, list):  # several named templates
        return next((str(each["template"]) for each in stored if each.get("name") == "default"), "")
    return str(stored)


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"there is no {path.name} in {path.parent}") from error
    except ValueError as error:
        raise SourceError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise SourceError(f"{path.name} is not a JSON object")
    return loaded
