"""Cursors: the place in a stream up to which a client has seen it, as a string that only gateways read.

Pure. The one rule: a cursor is a claim, not a truth: whoever resumes from one makes the same text again and compares
places before a single character is sent.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from shared.errors import Reason, TrunklineError, Violation

MAX_CHARS: Final = 512  # of the string: sixteen choices need 391
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<B16s")
_PLACE: Final = struct.Struct("<II?8s")


class Place(NamedTuple):
    """How far one choice was told: tokens, characters, whether its end was told, sha256 of the ids (8 bytes)."""

    tokens: int
    chars: int
    ended: bool
    digest: bytes

    @property
    def at_start(self) -> bool:
        """Nothing of the choice was told."""
        return not (self.tokens or self.chars or self.ended)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A request (16 bytes) and a place in each of its choices."""

    request_id: bytes
    places: tuple[Place, ...]


def encode(request_id: bytes, places: Sequence[Place]) -> str:
    """Version, request id, then per choice tokens and characters (u32), end told, digest; base64 for URLs."""
    parts = [_PLACE.pack(*place) for place in places]
    data = _HEAD.pack(_VERSION, request_id) + b"".join(parts)
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode(text: str) -> Cursor:
    """The cursor behind a string. Raises BAD_FIELD for what `encode` did not make."""
    try:
        if len(text) > MAX_CHARS:
            raise ValueError("too long")
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        version, request_id = _HEAD.unpack_from(data)
        if version != _VERSION or len(data) == _HEAD.size:
            raise ValueError("another version, or no choices")
        places = tuple(Place(*fields) for fields in _PLACE.iter_unpack(data[_HEAD.size :]))
    except (binascii.Error, struct.error, ValueError):
        violation = Violation("cursor", "is not one that a delta carried")
        raise TrunklineError(
            Reason.BAD_FIELD, "cursor: is not one that a delta carried", violations=[violation]
        ) from None
    return Cursor(request_id, places)
