"""The requests this gateway owns: those in flight, and for a while the records of those that ended.

The one rule: in memory and bounded; the state store's records are for other gateways and for later.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from trunkline.common.v1 import common_pb2

if TYPE_CHECKING:
    from gateway.request import Request

MAX_ENDED: Final = 4096


class Table:
    """Requests by id (32 hexadecimal digits) and by (tenant, client's own id)."""

    def __init__(self) -> None:
        self.accepted = 0
        self._entering = 0
        self._live: dict[str, Request] = {}
        self._aliases: dict[tuple[str, str], str] = {}
        self._ended: OrderedDict[str, common_pb2.RequestRecord] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._live.values()))

    @contextmanager
    def entering(self) -> Iterator[None]:
        """A request is being admitted inside the scope."""
        self._entering += 1
        try:
            yield
        finally:
            self._entering -= 1

    @property
    def busy(self) -> bool:
        """Something is in flight, or may soon be."""
        return bool(self._live or self._entering)

    def add(self, request: Request) -> None:
        """A request is admitted."""
        self.accepted += 1
        self._live[request.id] = request
        if request.client_id:
            self._aliases[request.principal.tenant, request.client_id] = request.id
        self._idle.clear()

    def end(self, request: Request, known: bool = True) -> None:
        """A request is over here. `known`: so is the request; else another gateway has its record."""
        del self._live[request.id]
        alias = (request.principal.tenant, request.client_id)
        if self._aliases.get(alias) == request.id:
            del self._aliases[alias]
        if known:
            self._ended[request.id] = request.record()
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if not self._live:
            self._idle.set()

    def live(self, request_id: str) -> Request | None:
        """The request, while it is in flight."""
        return self._live.get(request_id)

    def ended(self, request_id: str) -> common_pb2.RequestRecord | None:
        """The record of a request that ended here a while ago."""
        return self._ended.get(request_id)

    def alias(self, tenant: str, client_id: str) -> str | None:
        """The id of a request in flight behind a client's own id."""
        return self._aliases.get((tenant, client_id))

    async def idle(self) -> None:
        """Return when nothing is in flight."""
        await self._idle.wait()
