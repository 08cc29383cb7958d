"""What a gateway needs of a model version to speak for it: tokenizer, chat template, generation defaults.

Owns fetching, checking and building them. The one rule: a file is used only if its sha256 is the one the version names;
building runs on a thread, once per set of files, and only the last few sets are kept.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from gateway.chat import ChatTemplate
from gateway.routers import Routers
from gateway.tokens import Tokenizer
from gateway.transport import PeerLost, Transport
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from trunkline.common.v1 import common_pb2

_log = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
TEMPLATE: Final = "chat_template.jinja"
SPECIAL_TOKENS: Final = "tokenizer_config.json"
GENERATION: Final = "generation_config.json"

MAX_ASSET_BYTES: Final = 128 << 20
MAX_KITS: Final = 8
FETCH_S: Final = 30.0
FETCH_PAUSES_S: Final = (0.0, 0.2, 1.0)  # before each round: a connection that broke is no missing file


@dataclass(frozen=True)
class Kit:
    """A version's files, ready to use. `template` is None where the model has none."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    generation_config: Mapping[str, Any]


class Kits:
    """Kits by the hashes of their files."""

    def __init__(self, transport: Transport, routers: Routers, clock: Clock) -> None:
        self._transport = transport
        self._routers = routers
        self._clock = clock
        self._kits: OrderedDict[tuple[tuple[str, str], ...], asyncio.Task[Kit]] = OrderedDict()

    async def get(self, version: common_pb2.ModelVersion) -> Kit:
        """The kit of a version. Raises NO_REPLICA while its files cannot be had, INTERNAL if they are no good."""
        key = tuple(sorted(version.assets.items()))
        task = self._kits.get(key)
        if task is None:
            # In a context of its own: it is made for all, not for the call that came first.
            make = self._make(dict(key), log_level(version))
            task = asyncio.get_running_loop().create_task(make, context=contextvars.Context())
            self._kits[key] = task
            task.add_done_callback(lambda done: self._made(key, done))
        self._kits.move_to_end(key)
        while len(self._kits) > MAX_KITS:
            self._kits.popitem(last=False)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End what is being made."""
        tasks = list(self._kits.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _made(self, key: tuple[tuple[str, str], ...], task: asyncio.Task[Kit]) -> None:
        """A failure is told to those who wait and tried again by the next."""
        if (task.cancelled() or task.exception() is not None) and self._kits.get(key) is task:
            del self._kits[key]

    async def _make(self, assets: Mapping[str, str], level: int) -> Kit:
        files = {name: await self._fetch(sha256, level) for name, sha256 in assets.items()}
        try:
            return await asyncio.to_thread(_build, files, self._clock)
        except (ValueError, KeyError) as exc:
            _log.error("the files of a version cannot be used: %s", exc)
            raise TrunklineError(Reason.INTERNAL, "the model's tokenizer or template cannot be used") from exc

    async def _fetch(self, sha256: str, level: int) -> bytes:
        for pause_s in FETCH_PAUSES_S:
            await asyncio.sleep(pause_s)
            for address in self._routers.usable():
                data = await self._fetch_from(address, sha256, level)
                if data is not None:
                    return data
        raise TrunklineError(Reason.NO_REPLICA, "the model's files cannot be had now", retry_after_s=1.0)

    async def _fetch_from(self, address: str, sha256: str, level: int) -> bytes | None:
        """The file; None if this router does not give it."""
        try:
            async with asyncio.timeout(FETCH_S):
                return await self._read(address, sha256)
        except (PeerLost, TrunklineError, TimeoutError) as exc:
            _log.log(level, "a router does not give a model's file: %s", exc)
            return None

    async def _read(self, address: str, sha256: str) -> bytes | None:
        """The file from one router; None if it is not what its name says."""
        data = bytearray()
        async with aclosing(self._transport.asset(address, sha256)) as pieces:
            async for piece in pieces:
                data += piece.data
                if max(len(data), piece.total) > MAX_ASSET_BYTES:
                    _log.error("the file %s is larger than %d bytes", sha256, MAX_ASSET_BYTES)
                    return None
        if hashlib.sha256(data).hexdigest() != sha256:
            _log.error("a router gave other bytes than those of %s", sha256)
            return None
        return bytes(data)


def log_level(version: common_pb2.ModelVersion) -> int:
    """Of the news that a version's files cannot be had: nothing is wrong while every replica is still loading."""
    return logging.WARNING if version.ready_replicas else logging.INFO


def _build(files: Mapping[str, bytes], clock: Clock) -> Kit:
    special = _object(files.get(SPECIAL_TOKENS))
    template = files.get(TEMPLATE, b"").decode()
    return Kit(
        tokenizer=Tokenizer(files[TOKENIZER]),
        template=ChatTemplate(template, special, clock) if template else None,
        generation_config=_object(files.get(GENERATION)),
    )


def _object(data: bytes | None) -> dict[str, Any]:
    """A JSON object; an empty one where there is no file."""
    value = json.loads(data) if data else {}
    if not isinstance(value, dict):
        raise ValueError("a configuration file is not a JSON object")
    return value
