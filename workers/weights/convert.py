"""Making an artefact from a public checkpoint.

The one rule: an artefact appears whole or not at all. Everything is written beside the target, the manifest last, and
then renamed into place.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from workers.models.config import ModelConfig, parse_config
from workers.models.llama import WeightSpec
from workers.models.registry import family
from workers.weights import golden as golden_vectors
from workers.weights.gguf_llama import GGUFSource
from workers.weights.huggingface import DirectorySource
from workers.weights.load import Progress, no_progress
from workers.weights.manifest import (
    CONFIG,
    FORMAT,
    GENERATION,
    GOLDEN,
    MANIFEST,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_FILES,
    FileEntry,
    Manifest,
    Origin,
    TensorEntry,
    sealed,
    tokenizer_hash,
    write_manifest,
)
from workers.weights.source import Source, SourceError, TextFiles, file_sha256
from workers.weights.tensorfile import TensorFile, Written, write_tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS = "model-pp0-tp0.safetensors"
TOOL_VERSION = "0.1.0"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a checkpoint will become."""

    config: ModelConfig
    raw: dict[str, Any]
    specs: tuple[WeightSpec, ...]


def open_source(path: Path) -> Source:
    """A GGUF file or a Hugging Face directory; raises SourceError or GGUFError."""
    if path.is_dir():
        return DirectorySource(path)
    if path.is_file():
        return GGUFSource(path)
    raise SourceError(f"there is no file or directory {path}")


def convert(
    source: Path, target: Path, *, precision: str = "fp32", name: str = "", progress: Progress = no_progress
) -> Manifest:
    """Convert `source` into the artefact directory `target`, replacing one that is there.

    Raises SourceError, GGUFError, ConfigError, ArtefactError or OSError; then `target` is as it was.
    """
    with open_source(source) as opened:
        return write_artefact(opened, source.name, target, precision=precision, name=name, progress=progress)


def write_artefact(
    source: Source,
    source_name: str,
    target: Path,
    *,
    precision: str,
    name: str = "",
    golden: bool = True,
    progress: Progress = no_progress,
) -> Manifest:
    """`convert` from an open source; without `golden` vectors where the reference cannot run, or has nothing to say."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        manifest = _write(source, source_name, partial, precision, name or target.name, golden, progress)
        _move_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _write(
    source: Source, source_name: str, directory: Path, precision: str, name: str, golden: bool, progress: Progress
) -> Manifest:
    plan = _plan(source)
    progress("hash source", 0.0)
    origin = Origin(source.kind, source_name, source.digest())
    progress("hash source", 1.0)
    written = write_tensors(
        directory / WEIGHTS,
        [(spec.name, spec.shape) for spec in plan.specs],
        DTYPES[precision],
        lambda tensor: _checked(source, plan, tensor),
        lambda fraction: progress("write weights", fraction),
    )
    _write_texts(directory, plan.raw, source.texts)
    if golden:
        _write_golden(directory, plan.raw, progress)
    manifest = sealed(
        Manifest(
            format=FORMAT,
            name=name,
            architecture=plan.config.architecture,
            precision=precision,
            tensor_parallel=1,
            pipeline_parallel=1,
            parameters=sum(torch.Size(spec.shape).numel() for spec in plan.specs),
            tool=TOOL_VERSION,
            origin=origin,
            artefact_hash="",
            tokenizer_hash=tokenizer_hash((each, (directory / each).read_bytes()) for each in TOKENIZER_FILES),
            files=_file_entries(directory, written),
            tensors=_tensor_entries(plan, written),
        )
    )
    write_manifest(directory, manifest)
    return manifest


def _plan(source: Source) -> _Plan:
    """Decide what will be written, and refuse before writing if a tensor is missing or has no place."""
    raw = dict(source.texts.config)
    config = parse_config(raw, source.texts.generation)
    kind = family(config.architecture)
    if config.tied and _HEAD in source.names and not _equal(source, _EMBEDDING, _HEAD):
        # Tied by its config, yet a different output matrix is stored: the stored weights are what was trained.
        config, raw["tie_word_embeddings"] = replace(config, tied=False), False
    specs = kind.weight_specs(config)
    _account_names(source, config, {spec.name for spec in specs})
    if config.vocab_size < Tokenizer.from_str(source.texts.tokenizer).get_vocab_size():
        raise SourceError(f"the tokenizer has more tokens than the model's vocabulary of {config.vocab_size}")
    return _Plan(config, raw, specs)


def _equal(source: Source, first: str, second: str) -> bool:
    return torch.equal(source.tensor(first), source.tensor(second))


def _account_names(source: Source, config: ModelConfig, wanted: set[str]) -> None:
    missing = sorted(wanted - source.names)
    if missing == [_HEAD]:
        raise SourceError(f"{_HEAD} is missing although the config says the head is not tied; set tie_word_embeddings")
    if missing:
        raise SourceError(f"tensor {missing[0]!r} is missing ({len(missing)} missing in all)")
    allowed = wanted | ({_HEAD} if config.tied else set())
    extra = sorted(source.names - allowed)
    if extra:
        raise SourceError(f"tensor {extra[0]!r} has no place in this model ({len(extra)} such tensors)")


def _checked(source: Source, plan: _Plan, name: str) -> torch.Tensor:
    tensor = source.tensor(name)
    wanted = next(spec.shape for spec in plan.specs if spec.name == name)
    if tuple(tensor.shape) != wanted:
        raise SourceError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the config says {wanted}")
    if not torch.stack(torch.aminmax(tensor)).isfinite().all():  # both pass NaN on; one reading, no copy
        raise SourceError(f"tensor {name!r} holds values that are not finite")
    return tensor


def _write_texts(directory: Path, raw: dict[str, Any], texts: TextFiles) -> None:
    contents = {
        CONFIG: _json(raw),
        GENERATION: _json(dict(texts.generation)),
        SPECIAL_TOKENS: _json(dict(texts.special_tokens)),
        TOKENIZER: texts.tokenizer,
        TEMPLATE: texts.chat_template,
    }
    for name, content in contents.items():
        (directory / name).write_text(content, encoding="utf-8")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _write_golden(directory: Path, raw: dict[str, Any], progress: Progress) -> None:
    """Run the reference on the weights as written, so that rounding to bf16 is part of what is proved."""
    progress("golden vectors", 0.0)
    file = TensorFile(directory / WEIGHTS)
    model = golden_vectors.reference_model(raw, {name: file.tensor(name) for name in file.placed})
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    golden_vectors.save_golden(directory / GOLDEN, golden_vectors.make_golden(model, tokenizer))
    progress("golden vectors", 1.0)


def _file_entries(directory: Path, weights: Written) -> tuple[FileEntry, ...]:
    others = sorted(path for path in directory.iterdir() if path.name != WEIGHTS)
    entries = [FileEntry(path.name, path.stat().st_size, file_sha256(path)) for path in others]
    return (*entries, FileEntry(WEIGHTS, weights.size, weights.sha256, weights.header_sha256))


def _tensor_entries(plan: _Plan, written: Written) -> tuple[TensorEntry, ...]:
    specs = {spec.name: spec for spec in plan.specs}
    return tuple(
        TensorEntry(
            name=each.name,
            file=WEIGHTS,
            offset=each.offset,
            size=each.size,
            shape=each.shape,
            dtype=each.dtype,
            split=specs[each.name].split,
            category=specs[each.name].category,
            sha256=sha256,
        )
        for each, sha256 in written.tensors
    )


def _move_into_place(partial: Path, target: Path) -> None:
    """Rename, with an older artefact stepping aside; `MANIFEST` was written last, so a crash leaves no half target."""
    assert (partial / MANIFEST).exists()
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    aside = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(aside)
    partial.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
