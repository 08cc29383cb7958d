"""API keys: who a caller is and what the key allows.

Owns the keys file (hashes only) and its hot reload. The one rule: `authenticate` first, then `authorize` with the
scope and model, before anything else is done for a caller.

A secret is `tl_<key id>_<random>`. Its id picks the record, so that the comparison of the hashes, in constant time, is
all that depends on the secret; records become principals once, when the file is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from prometheus_client import Counter, Gauge

from shared.clock import Clock
from shared.errors import Reason, StartError, TrunklineError

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
MAX_FILE_BYTES: Final = 16 * 1024 * 1024
MAX_SECRET_CHARS: Final = 256

_reloads = Counter("trunkline_keys_reloads_total", "Reads of a changed keys file, by outcome.", ["outcome"])
_broken = Gauge("trunkline_keys_file_broken", "1 while the keys file cannot be used and the last good one serves.")

Scope = Literal["generate", "embed", "cancel", "admin"]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class Limits:
    """Requests and tokens per minute, requests at once, highest priority. Rates are also the size of a burst."""

    rpm: int
    tpm: int
    concurrency: int
    max_priority: int = 10


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. `limits` holds for all models of the tenant together, `model_limits` for one model of it."""

    key_id: str
    tenant: str
    scopes: frozenset[str]
    models: frozenset[str]  # "*" is every model
    limits: Limits
    model_limits: Mapping[str, Limits] = field(default_factory=dict)

    def may_use(self, model: str) -> bool:
        """Whether the key allows this model."""
        return "*" in self.models or model in self.models


class ModelLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As in the file: requests and tokens per minute, requests at once."""

    rpm: _Count = 6_000
    tpm: _Count = 10_000_000
    concurrency: _Count = 512


class KeyLimits(ModelLimits, frozen=True, forbid_unknown_fields=True):
    """As in the file: these, and the highest priority a request may ask for."""

    max_priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 10


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One record of the file; `sha256` is of the whole secret."""

    id: _Name
    sha256: _Sha256
    tenant: _Name
    scopes: tuple[Scope, ...] = ("generate", "embed", "cancel")
    models: tuple[str, ...] = ("*",)
    limits: KeyLimits = KeyLimits()
    model_limits: dict[str, ModelLimits] = {}
    expires_at: datetime | None = None


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file, as `trunkctl keys` writes it."""

    keys: list[Key]


@dataclass(frozen=True, slots=True)
class _Record:
    digest: bytes
    expires_ms: int | None
    principal: Principal


def _record(key: Key) -> _Record:
    limits = Limits(key.limits.rpm, key.limits.tpm, key.limits.concurrency, key.limits.max_priority)
    per_model = {
        model: Limits(own.rpm, own.tpm, own.concurrency, limits.max_priority) for model, own in key.model_limits.items()
    }
    principal = Principal(key.id, key.tenant, frozenset(key.scopes), frozenset(key.models), limits, per_model)
    expires_ms = None
    if key.expires_at is not None:
        expires = key.expires_at if key.expires_at.tzinfo else key.expires_at.replace(tzinfo=UTC)
        expires_ms = round(expires.timestamp() * 1000)
    return _Record(bytes.fromhex(key.sha256), expires_ms, principal)


def _parse(data: bytes) -> dict[str, _Record]:
    """The records by key id; ValueError where the file is not right as a whole."""
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    keys = msgspec.json.decode(data, type=KeysFile).keys  # its errors are ValueErrors
    records = {key.id: _record(key) for key in keys}
    if len(records) < len(keys):
        raise ValueError("two keys have the same id")
    return records


_BEARER: Final = re.compile(r"[Bb]earer +(tl_([A-Za-z0-9._-]{1,64})_[0-9A-Za-z]+)")
_NO_DIGEST: Final = bytes(32)
_Signature = tuple[int, int, int]  # time of change, size, inode


class Authenticator:
    """The keys of one file. Raises StartError if the file cannot be used at the start."""

    def __init__(self, keys_file: Path, clock: Clock) -> None:
        self._file = keys_file
        self._clock = clock
        self.broken = ""  # why the present file cannot be used; the last good one serves
        self._seen: _Signature | None = None
        try:
            self._seen = self._signature()
            self._records = _parse(keys_file.read_bytes())
        except OSError as exc:
            raise StartError(f"The keys file {keys_file} cannot be read: {exc.strerror}.") from exc
        except ValueError as exc:
            raise StartError(f"The keys file {keys_file} cannot be used: {exc}.") from exc

    def authenticate(self, authorization: str | None) -> Principal:
        """The principal behind `Bearer <secret>`. Raises KEY_UNKNOWN, KEY_EXPIRED."""
        if not authorization:
            raise TrunklineError(Reason.KEY_UNKNOWN, "An API key is needed: authorization: Bearer <key>.")
        found = _BEARER.fullmatch(authorization) if len(authorization) <= MAX_SECRET_CHARS else None
        secret, key_id = (found[1], found[2]) if found else ("", "")
        record = self._records.get(key_id)
        digest = hashlib.sha256(secret.encode()).digest()
        same = hmac.compare_digest(digest, record.digest if record else _NO_DIGEST)
        if record is None or not same:
            raise TrunklineError(Reason.KEY_UNKNOWN, "The API key is not known.")
        if record.expires_ms is not None and record.expires_ms <= self._clock.wall_ms():
            raise TrunklineError(Reason.KEY_EXPIRED, "The API key has expired.")
        return record.principal

    def authorize(self, principal: Principal, scope: Scope, model: str | None = None) -> None:
        """Check that the key allows this. Raises SCOPE_FORBIDDEN, MODEL_FORBIDDEN."""
        if scope not in principal.scopes:
            raise TrunklineError(
                Reason.SCOPE_FORBIDDEN, f"The API key does not have the scope {scope}.", metadata={"scope": scope}
            )
        if model is not None and not principal.may_use(model):
            raise TrunklineError(Reason.MODEL_FORBIDDEN, "The API key does not allow this model.")

    async def run(self) -> None:
        """Reload the file whenever it changes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.reload()

    async def reload(self) -> None:
        """Take the file if it has changed and is good; else say why not, once, and keep what there is."""
        try:
            # On a thread: the file may lie on a file system that hangs.
            read = await asyncio.to_thread(self._read_if_changed)
            if read is None:
                return
            self._seen, data = read
            self._records = _parse(data)
        except OSError as exc:
            self._seen = None  # when it is back it is read, though it may look as before
            self._keep(f"it cannot be read: {exc.strerror}")
        except ValueError as exc:
            self._keep(str(exc))
        else:
            self.broken = ""
            _broken.set(0)
            _reloads.labels("ok").inc()
            _log.info("keys file read: %d keys", len(self._records))

    def _keep(self, why: str) -> None:
        if why != self.broken:
            _log.error("keys file %s cannot be used, the last good one serves: %s", self._file, why)
            _reloads.labels("broken").inc()
        self.broken = why
        _broken.set(1)

    def _read_if_changed(self) -> tuple[_Signature, bytes] | None:
        signature = self._signature()
        return None if signature == self._seen else (signature, self._file.read_bytes())

    def _signature(self) -> _Signature:
        found = self._file.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
