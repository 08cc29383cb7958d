"""Loading an artefact so that nothing but exactly what was converted is ever served.

The one rule: it fails closed. A missing, extra, short, altered or misplaced tensor, or a changed file, raises
ArtefactError naming it; nothing is returned in part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.models.config import ConfigError, ModelConfig, read_config
from workers.models.registry import family
from workers.weights.manifest import ArtefactError, Manifest, TensorEntry
from workers.weights.tensorfile import TensorFile

Progress = Callable[[str, float], None]  # stage, fraction done


def no_progress(stage: str, fraction: float) -> None:
    """Nobody is watching."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Verified tensors by public name, in their stored dtype: views of mapped files, not to be written to."""

    tensors: Mapping[str, torch.Tensor]
    files: tuple[TensorFile, ...]

    def drop_pages(self) -> None:
        """Hand the mapped pages back; a tensor that is still used reads its own again from the page cache."""
        for file in self.files:
            file.drop_pages()


def check_texts(directory: Path, manifest: Manifest) -> ModelConfig:
    """Check every file beside the weights and read the model's config; raises ArtefactError."""
    weights = {entry.file for entry in manifest.tensors}
    for entry in manifest.files:
        if entry.name in weights:
            continue
        try:
            content = (directory / entry.name).read_bytes()
        except FileNotFoundError as error:
            raise ArtefactError(entry.name, "missing") from error
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise ArtefactError(entry.name, "altered: its hash does not match the manifest")
    try:
        return read_config(directory)
    except (ConfigError, OSError) as error:
        raise ArtefactError("config.json", str(error)) from error


def load_weights(
    directory: Path, manifest: Manifest, config: ModelConfig, threads: int, progress: Progress = no_progress
) -> Weights:
    """Map and verify all tensors, hashing on `threads` threads; raises ArtefactError."""
    _check_table(manifest, config)
    files = {name: TensorFile(directory / name) for name in sorted({entry.file for entry in manifest.tensors})}
    _check_places(manifest, files)
    _check_hashes(manifest.tensors, files, threads, progress)
    tensors = {entry.name: files[entry.file].tensor(entry.name) for entry in manifest.tensors}
    return Weights(tensors, tuple(files.values()))


def _check_table(manifest: Manifest, config: ModelConfig) -> None:
    """The manifest lists exactly the tensors this model has, in their shapes."""
    listed = {entry.name: entry for entry in manifest.tensors}
    wanted = {spec.name: spec for spec in family(config.architecture).weight_specs(config)}
    for name, spec in wanted.items():
        if name not in listed:
            raise ArtefactError(name, "missing")
        if listed[name].shape != spec.shape:
            raise ArtefactError(name, f"has shape {listed[name].shape}, the model needs {spec.shape}")
    extra = sorted(listed.keys() - wanted.keys())
    if extra:
        raise ArtefactError(extra[0], "extra: the model has no such tensor")


def _check_places(manifest: Manifest, files: Mapping[str, TensorFile]) -> None:
    """Every file holds exactly the tensors the manifest places in it."""
    for entry in manifest.tensors:
        placed = files[entry.file].placed.get(entry.name)
        if placed is None:
            raise ArtefactError(entry.name, f"missing in {entry.file}")
        if (placed.shape, placed.dtype) != (entry.shape, entry.dtype):
            raise ArtefactError(entry.name, f"is {placed.dtype} {placed.shape}, not {entry.dtype} {entry.shape}")
        if (placed.offset, placed.size) != (entry.offset, entry.size):
            raise ArtefactError(entry.name, f"misplaced in {entry.file}")
    headers = {entry.name: entry.header_sha256 for entry in manifest.files}
    for name, file in files.items():
        if file.header_sha256 != headers.get(name):
            raise ArtefactError(name, "altered: the hash of its header does not match the manifest")
        extra = sorted(file.placed.keys() - {entry.name for entry in manifest.tensors if entry.file == name})
        if extra:
            raise ArtefactError(extra[0], f"extra in {name}")


def _check_hashes(
    entries: Sequence[TensorEntry], files: Mapping[str, TensorFile], threads: int, progress: Progress
) -> None:
    total, done = sum(entry.size for entry in entries) or 1, 0

    def digest(entry: TensorEntry) -> str:
        return files[entry.file].sha256(entry.name)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        for entry, found in zip(entries, pool.map(digest, entries), strict=True):
            if found != entry.sha256:
                raise ArtefactError(entry.name, f"altered in {entry.file}: its hash does not match the manifest")
            done += entry.size
            progress("verify weights", done / total)
