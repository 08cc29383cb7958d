"""What a worker shows of its artefact: the version it serves, and the files gateways need.

Owns those files' bytes, checked at the start against the manifest. The one rule: gateways name files by hash, so a file
that changes on disk later changes nothing here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from shared.errors import Reason, StartError, TrunklineError
from trunkline.common.v1 import common_pb2
from workers.door.intake import Served
from workers.engine import messages as m
from workers.weights.manifest import GENERATION, SPECIAL_TOKENS, TEMPLATE, TOKENIZER, ArtefactError, read_manifest

NAMES = (TOKENIZER, TEMPLATE, SPECIAL_TOKENS, GENERATION)
PIECE_BYTES = 2 * 1024 * 1024


class Assets:
    """The artefact in `directory`, served as `model` `version` (empty: as the manifest says). Raises StartError."""

    def __init__(self, directory: Path, model: str = "", version: str = "") -> None:
        try:
            self.manifest = read_manifest(directory)
        except ArtefactError as error:
            raise StartError(f"the artefact in {directory} cannot be served: {error}") from error
        self.model = model or self.manifest.name
        self.version = version or self.manifest.artefact_hash[:12]
        self._hashes: dict[str, str] = {}
        self._files: dict[str, bytes] = {}
        for entry in self.manifest.files:
            if entry.name in NAMES:
                self._hashes[entry.name] = entry.sha256
                self._files[entry.sha256] = _checked(directory / entry.name, entry.sha256)

    def piece(self, sha256: str, offset: int, most: int) -> tuple[bytes, int]:
        """Up to `most` bytes (0: as many as one answer takes) of a file from `offset`, and its size."""
        data = self._files.get(sha256)
        if data is None:
            raise TrunklineError(Reason.MODEL_UNKNOWN, "no file of this hash is served here")
        return data[offset : offset + min(most or PIECE_BYTES, PIECE_BYTES)], len(data)

    def described(self, served: Served, ready: m.Ready, *, taking: bool) -> common_pb2.ModelVersion:
        """The version as an engine serves it; `taking`: it takes new work."""
        return common_pb2.ModelVersion(
            model=self.model,
            version=self.version,
            artefact_hash=served.artefact_hash,
            tokenizer_hash=served.tokenizer_hash,
            assets=self._hashes,
            max_context=served.max_context,
            vocab_size=served.vocab_size,
            eos_token_ids=ready.eos_token_ids,
            embedding_size=ready.hidden_size,
            features=sorted(served.features),
            weight=1.0,
            ready_replicas=int(taking),
            architecture=self.manifest.architecture,
            numeric_path=ready.path,
        )


def _checked(path: Path, sha256: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StartError(f"{path}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise StartError(f"{path}: altered: its sha256 is not the manifest's")
    return data
