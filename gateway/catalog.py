"""The models served now, as all routers tell it, and which version a request gets.

Owns one WatchModels stream per router and the merged list. The one rule: what a lost router told last stays until the
others are heard, with no ready replica: a model is refused as unavailable before it is refused as unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from gateway.kit import MAX_KITS, Kit, Kits, log_level
from gateway.routers import Routers
from gateway.transport import PeerLost, Transport
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.ids import Rng
from shared.lifecycle import Lifecycle
from shared.wire import HEARTBEAT_S, Liveness, LoopLag, PeerState
from trunkline.common.v1 import common_pb2
from trunkline.router.v1 import router_pb2

_log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
PAUSE_S: Final = 0.2
PREPARE_AGAIN_S: Final = 5.0
MAX_VERSIONS: Final = 10_000


@dataclass
class _View:
    """What one router tells. `versions` is what it told last."""

    live: bool = False
    versions: Sequence[common_pb2.ModelVersion] = field(default_factory=list)


_Key = tuple[str, str, str, str]


class Catalog:
    """See the module. Run `run` as a task. Also keeps the health of "model/<name>"."""

    def __init__(
        self,
        transport: Transport,
        routers: Routers,
        kits: Kits,
        lifecycle: Lifecycle,
        lag: LoopLag,
        clock: Clock,
        rng: Rng,
    ) -> None:
        self._transport = transport
        self._routers = routers
        self._kits = kits
        self._lifecycle = lifecycle
        self._lag = lag
        self._clock = clock
        self._rng = rng
        self._views: dict[str, _View] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._models: dict[str, list[common_pb2.ModelVersion]] = {}
        self._preparing: set[_Key] = set()  # or prepared
        self._prepared = False  # the first kit is there
        self._change = asyncio.Event()

    # What others ask.

    def versions(self, model: str | None = None) -> list[common_pb2.ModelVersion]:
        """All versions by name, or those of one model; of a model the newest (the last by name) first."""
        if model is not None:
            return list(self._models.get(model, ()))
        return [version for name in sorted(self._models) for version in self._models[name]]

    def choose(self, model: str, session: bytes = b"") -> common_pb2.ModelVersion:
        """The version that takes this request: by weight among those with a ready replica, if there is one. The same
        for all requests of a `session`. Raises MODEL_UNKNOWN; NO_REPLICA while nobody tells of any model."""
        versions = self._models.get(model)
        if not self._models:
            raise TrunklineError(Reason.NO_REPLICA, self.problem, retry_after_s=1.0)
        if not versions:
            raise unknown_model(model)
        eligible = [version for version in versions if version.ready_replicas] or versions
        eligible = [version for version in eligible if version.weight > 0] or eligible
        place = int.from_bytes(session[:8], "big") / 2**64 if session else self._rng.random()
        place *= sum(version.weight for version in eligible)
        for version in eligible:
            place -= version.weight
            if place < 0:
                return version
        return eligible[-1]

    async def kit(self, version: common_pb2.ModelVersion) -> Kit:
        """Tokenizer, template and defaults of a version; see `Kits.get`."""
        return await self._kits.get(version)

    @property
    def problem(self) -> str:
        """Why no request can be served now; empty if it can."""
        if not any(view.live for view in self._views.values()):
            return "no router can be reached"
        if not self._models:
            return "no model is served"
        return "" if self._prepared else "the models' tokenizers are being prepared"

    # What routers tell.

    async def run(self) -> None:
        """Watch every router there is, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                known = self._routers.addresses()
                for address in known:
                    if address not in self._watching:
                        view = self._views[address] = _View()
                        self._watching[address] = tasks.create_task(self._watch(address, view))
                for address in sorted(self._watching.keys() - known):
                    if not self._views[address].live:
                        self._watching.pop(address).cancel()
                        del self._views[address]
                for version in self.versions()[:MAX_KITS]:
                    if _key(version) not in self._preparing:
                        self._preparing.add(_key(version))
                        tasks.create_task(self._prepare(version))
                await self._changed()

    async def _prepare(self, version: common_pb2.ModelVersion) -> None:
        """Have a version's kit ready before its first request."""
        try:
            await self._kits.get(version)
            self._prepared = True
        except TrunklineError as exc:
            _log.log(log_level(version), "%s %s cannot be prepared: %s", version.model, version.version, exc)
            await asyncio.sleep(PREPARE_AGAIN_S)
            self._preparing.discard(_key(version))

    async def _changed(self) -> None:
        """Return when the models have changed, or the routers may have."""
        try:
            async with asyncio.timeout(LOOK_S):
                await self._change.wait()
        except TimeoutError:
            return
        self._change.clear()

    async def _watch(self, address: str, view: _View) -> None:
        while True:
            try:
                async with aclosing(self._messages(address)) as messages:
                    async for message in messages:
                        self._heard(address, view, message)
            except (PeerLost, TrunklineError) as exc:
                if view.live:
                    _log.warning("router %s is lost: %s", address, exc)
            finally:
                view.live = False
                self._merge()
            self._routers.failed(address)
            await asyncio.sleep(PAUSE_S)

    async def _messages(self, address: str) -> AsyncGenerator[router_pb2.WatchModelsResponse]:
        """What a router says, while it lives."""
        identity = self._lifecycle.identity
        request = router_pb2.WatchModelsRequest(
            gateway_id=identity.id,
            gateway_incarnation=identity.incarnation,
            protocol_major=identity.protocol.major,
            protocol_minor=identity.protocol.minor,
        )
        liveness = Liveness(self._clock)
        async with aclosing(self._transport.watch_models(address, request)) as stream:
            reading: asyncio.Task[router_pb2.WatchModelsResponse] | None = None
            try:
                while True:
                    reading = reading or asyncio.create_task(_next(stream))
                    await asyncio.wait((reading,), timeout=HEARTBEAT_S)
                    if reading.done():
                        message, reading = reading.result(), None
                        liveness.heard(message.heartbeat_ms / 1000)
                        yield message
                    elif liveness.judge(self._lag.lag_s()) is PeerState.LOST:
                        self._routers.lost(address)
                        await self._transport.forget(address)
                        raise PeerLost("the router is silent")
            finally:
                if reading is not None:
                    reading.cancel()
                    await asyncio.wait((reading,))

    def _heard(self, address: str, view: _View, message: router_pb2.WatchModelsResponse) -> None:
        self._routers.heard(address, message.draining)
        changed = not view.live
        view.live = True
        if not message.heartbeat:
            view.versions = list(message.versions)[:MAX_VERSIONS]
            changed = True
        if changed:
            self._merge()

    def _merge(self) -> None:
        """One entry per version: its replicas as the router that sees most of them says, its features as far as this
        gateway speaks them."""
        speaks = self._lifecycle.identity.protocol.features
        merged: dict[_Key, common_pb2.ModelVersion] = {}
        live = [view for view in self._views.values() if view.live and view.versions]  # who knows of none knows nothing
        for view in live or self._views.values():
            for version in view.versions:
                own = merged.setdefault(_key(version), common_pb2.ModelVersion())
                replicas = max(own.ready_replicas, version.ready_replicas if view.live else 0)
                features = sorted({*own.features, *version.features} & speaks)
                own.CopyFrom(version)
                own.ready_replicas = replicas
                own.features[:] = features
        models: dict[str, list[common_pb2.ModelVersion]] = {}
        for key in sorted(merged, reverse=True):
            models.setdefault(key[0], []).append(merged[key])
        self._preparing &= merged.keys()
        self._change.set()
        self._tell_health(models)
        self._models = models

    def _tell_health(self, models: dict[str, list[common_pb2.ModelVersion]]) -> None:
        for name in self._models.keys() - models.keys():
            self._lifecycle.set_model(name, None)
        for name, versions in models.items():
            self._lifecycle.set_model(name, any(version.ready_replicas for version in versions))


def unknown_model(name: str) -> TrunklineError:
    """What to say of a model that is not served, or not to this caller."""
    where = "GET /v1/models (in gRPC, ListModels) lists those that this key may use"
    return TrunklineError(Reason.MODEL_UNKNOWN, f"the model {name[:128]!r} is not known; {where}")


async def _next(stream: AsyncIterator[router_pb2.WatchModelsResponse]) -> router_pb2.WatchModelsResponse:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise PeerLost("the router ended its stream") from None


def _key(version: common_pb2.ModelVersion) -> _Key:
    return version.model, version.version, version.artefact_hash, version.tokenizer_hash
