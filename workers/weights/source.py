"""What a conversion reads: any public checkpoint, seen as Hugging Face tensor names and files.

The one rule: a source gives tensors exactly as stored (dequantised if it was a GGUF), in the public row order; what it
cannot give it refuses when it is opened, before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch


class SourceError(ValueError):
    """The checkpoint cannot be converted; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Everything beside the weights, as contents of files in the artefact."""

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    tokenizer: str  # tokenizer.json
    chat_template: str  # empty = the model has none
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # what templates call bos_token, eos_token, …


class Source(Protocol):
    """An open checkpoint; a context manager."""

    kind: str  # "gguf" or "huggingface"
    texts: TextFiles

    @property
    def names(self) -> Set[str]:
        """Hugging Face names of all stored tensors."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, fp32, fp16 or bf16."""
        ...

    def digest(self) -> str:
        """sha256 of what was read, in hex."""
        ...

    def __enter__(self) -> Source: ...

    def __exit__(self, *exc: object) -> None: ...


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
