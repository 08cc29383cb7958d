"""The artefact's table of contents: every file and tensor, with place, shape and sha256.

The one rule: `manifest.json` is written last and read first; what it does not list does not exist, and what it lists
must be there byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

FORMAT = 1
MANIFEST, CONFIG, GENERATION = "manifest.json", "config.json", "generation_config.json"
TOKENIZER, TEMPLATE, SPECIAL_TOKENS = "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER, TEMPLATE, SPECIAL_TOKENS)
GOLDEN = "golden.safetensors"
_HINT = "make the artefact with `trunkctl model convert`"


class ArtefactError(ValueError):
    """The artefact is not whole. `subject` is the tensor or file that is wrong."""

    def __init__(self, subject: str, problem: str) -> None:
        super().__init__(f"{subject}: {problem}")
        self.subject = subject


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the directory."""

    name: str
    size: int
    sha256: str
    header_sha256: str = ""  # of a weights file: of what lies before its first tensor


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor: `offset` and `size` in bytes within `file`; `split` is how ranks cut it."""

    name: str
    file: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str  # F32 or BF16
    split: str
    category: str
    sha256: str


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the artefact was made from."""

    kind: str
    name: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the module. `artefact_hash` names the model (weights, config, tokenizer, degrees), not the golden vectors."""

    format: int
    name: str
    architecture: str
    precision: str  # fp32 or bf16: how weights are stored
    tensor_parallel: int
    pipeline_parallel: int
    parameters: int
    tool: str  # version that converted
    origin: Origin
    artefact_hash: str
    tokenizer_hash: str
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    digest: str = ""  # sha256 of this manifest without this field


def tokenizer_hash(contents: Iterable[tuple[str, bytes]]) -> str:
    """sha256 over what changes tokens: names and bytes of the tokenizer's files, each length-prefixed, by name."""
    digest = hashlib.sha256()
    for name, content in sorted(contents):
        for field in (name.encode(), content):
            digest.update(len(field).to_bytes(8, "little") + field)
    return digest.hexdigest()


def artefact_hash(manifest: Manifest) -> str:
    """sha256 over everything that changes tokens."""
    shaping = {CONFIG, GENERATION}
    facts = {
        "format": manifest.format,
        "architecture": manifest.architecture,
        "precision": manifest.precision,
        "degrees": [manifest.tensor_parallel, manifest.pipeline_parallel],
        "tokenizer": manifest.tokenizer_hash,
        "files": [[each.name, each.sha256] for each in manifest.files if each.name in shaping],
        "tensors": [[each.name, each.shape, each.dtype, each.split, each.sha256] for each in manifest.tensors],
    }
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()


def sealed(manifest: Manifest) -> Manifest:
    """The manifest with its hashes filled in."""
    named = msgspec.structs.replace(manifest, artefact_hash=artefact_hash(manifest), digest="")
    return msgspec.structs.replace(named, digest=_digest(named))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, readable by people."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (directory / MANIFEST).write_bytes(encoded + b"\n")


def read_manifest(directory: Path) -> Manifest:
    """Read and check `manifest.json` itself (not the files it lists); raises ArtefactError."""
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise ArtefactError(MANIFEST, f"missing in {directory}; {_HINT}") from error
    except msgspec.MsgspecError as error:
        raise ArtefactError(MANIFEST, f"damaged: {error}") from error
    if manifest.format != FORMAT:
        raise ArtefactError(MANIFEST, f"format {manifest.format} is not supported (supported: {FORMAT})")
    if _digest(msgspec.structs.replace(manifest, digest="")) != manifest.digest:
        raise ArtefactError(MANIFEST, "altered: its own hash does not match")
    for file in (*(each.name for each in manifest.files), *(each.file for each in manifest.tensors)):
        if Path(file).name != file:
            raise ArtefactError(MANIFEST, f"names a file outside the artefact: {file!r}")
    return manifest


def check_sizes(directory: Path) -> Manifest:
    """Read the manifest and look that every file is there in its size: quick, and enough to skip converting again.

    Raises ArtefactError. Loading checks every byte.
    """
    manifest = read_manifest(directory)
    for entry in manifest.files:
        path = directory / entry.name
        if not path.is_file() or path.stat().st_size != entry.size:
            raise ArtefactError(entry.name, f"missing or cut short in {directory}")
    return manifest


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
