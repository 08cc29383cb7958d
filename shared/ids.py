"""Identities of requests and of process lives. The one rule: the random source is an argument."""

from __future__ import annotations

import random
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from shared.wire import PROTOCOL, Version

Rng = random.Random

# The operating system's source: identities must not repeat across processes that start together.
SYSTEM_RNG: Final = random.SystemRandom()


def _build() -> str:
    try:
        return metadata.version("trunkline")
    except metadata.PackageNotFoundError:
        return "unpackaged"


BUILD: Final = _build()
"""The release this process runs, as peers and operators see it."""


@dataclass(frozen=True)
class Identity:
    """Who a process is: its role (gateway, router, worker), its id, the life of its state, and what it speaks."""

    role: str
    id: str
    incarnation: int
    protocol: Version = PROTOCOL


def new_request_id(rng: Rng) -> bytes:
    """16 random bytes; `.hex()` of them on the public API."""
    return rng.getrandbits(128).to_bytes(16, "big")


def new_incarnation(rng: Rng) -> int:
    """A random u64 that is not 0 (0 means: none)."""
    return rng.getrandbits(64) or 1


def incarnation_text(incarnation: int) -> str:
    """16 hexadecimal digits."""
    return f"{incarnation:016x}"
