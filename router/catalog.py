"""The models served now, merged over all workers, for gateways.

Owns the merged list. The one rule: a version whose workers are all away for the moment stays in the list with no ready
replica (so that it is refused as unavailable, not as unknown) until they are forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from router.fleet import READY, Fleet
from shared.ids import Identity
from shared.lifecycle import Lifecycle
from shared.wire import HEARTBEAT_S
from trunkline.common.v1 import common_pb2
from trunkline.router.v1 import router_pb2

_HEARTBEAT_MS: Final = round(HEARTBEAT_S * 1000)


class Catalog:
    """See the module. Also keeps the health of "model/<name>"."""

    def __init__(self, fleet: Fleet, identity: Identity, lifecycle: Lifecycle) -> None:
        self._fleet = fleet
        self._identity = identity
        self._lifecycle = lifecycle
        self._versions: list[common_pb2.ModelVersion] = []
        self._change = asyncio.Event()
        self._closed = False
        fleet.observe(self._fleet_changed)

    async def watch(self) -> AsyncGenerator[router_pb2.WatchModelsResponse]:
        """The list now, then again at every change, with heartbeats in between, until `close`."""
        while not self._closed:
            change = self._change
            draining = self._lifecycle.draining
            yield self._message(heartbeat=False)
            while self._change is change and self._lifecycle.draining == draining:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await change.wait()
                except TimeoutError:
                    yield self._message(heartbeat=True)

    def _message(self, *, heartbeat: bool) -> router_pb2.WatchModelsResponse:
        return router_pb2.WatchModelsResponse(
            router_id=self._identity.id,
            router_incarnation=self._identity.incarnation,
            versions=() if heartbeat else self._versions,
            heartbeat=heartbeat,
            heartbeat_ms=_HEARTBEAT_MS,
            draining=self._lifecycle.draining,
        )

    def wake(self) -> None:
        """Send the list again: something in the message has changed."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    def close(self) -> None:
        """End every stream: the router has answered all it had."""
        self._closed = True
        self.wake()

    def _fleet_changed(self, topology: bool) -> None:
        if not topology:
            return
        versions = merge(self._fleet)
        if versions != self._versions:
            self._set_health(versions)
            self._versions = versions
            self.wake()

    def _set_health(self, versions: list[common_pb2.ModelVersion]) -> None:
        ready = {v.model for v in versions if v.ready_replicas}
        for model in {v.model for v in self._versions} - {v.model for v in versions}:
            self._lifecycle.set_model(model, None)
        for model in {v.model for v in versions}:
            self._lifecycle.set_model(model, model in ready)


def merge(fleet: Fleet) -> list[common_pb2.ModelVersion]:
    """One entry per (model, version, artefact, tokenizer), ordered by name: `ready_replicas` counted, `features` those
    of any worker (an older one that lacks some answers Mismatch, and another is asked)."""
    merged: dict[tuple[str, str, str, str], common_pb2.ModelVersion] = {}
    for worker in fleet.distinct():
        for version in worker.versions.values():
            key = (version.model, version.version, version.artefact_hash, version.tokenizer_hash)
            if key not in merged:
                merged[key] = common_pb2.ModelVersion()
                merged[key].CopyFrom(version)
                merged[key].ready_replicas = 0
            merged[key].ready_replicas += worker.state in READY
            merged[key].features[:] = sorted({*merged[key].features, *version.features})
    return [merged[key] for key in sorted(merged)]
