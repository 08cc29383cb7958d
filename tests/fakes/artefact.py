"""An artefact without weights: enough for a door, and for an engine that has no model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from workers.weights.manifest import (
    CONFIG,
    FORMAT,
    GENERATION,
    TEMPLATE,
    TOKENIZER,
    FileEntry,
    Manifest,
    Origin,
    sealed,
    tokenizer_hash,
    write_manifest,
)


def write_artefact(
    directory: Path,
    *,
    vocab_size: int = 1000,
    max_context: int = 4096,
    hidden_size: int = 64,
    eos: int = 0,
    tokenizer: bytes = b'{"of": "no words"}' * 1000,
) -> Manifest:
    """Writes one to `directory` and answers its manifest."""
    config = {
        "vocab_size": vocab_size,
        "max_position_embeddings": max_context,
        "hidden_size": hidden_size,
        "eos_token_id": eos,
    }
    files = {
        CONFIG: json.dumps(config).encode(),
        GENERATION: b"{}",
        TOKENIZER: tokenizer,
        TEMPLATE: b"{{ messages }}",
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    manifest = sealed(
        Manifest(
            format=FORMAT,
            name="nothing",
            architecture="NothingForCausalLM",
            precision="fp32",
            tensor_parallel=1,
            pipeline_parallel=1,
            parameters=0,
            tool="test",
            origin=Origin("test", "nothing", "0" * 64),
            artefact_hash="",
            tokenizer_hash=tokenizer_hash((name, files[name]) for name in (TOKENIZER, TEMPLATE)),
            files=tuple(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()),
            tensors=(),
        )
    )
    write_manifest(directory, manifest)
    return manifest
