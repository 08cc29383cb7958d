"""One gateway process, put together: the only file that knows every part.

The one rule: what tells the time, draws at random or talks to the outside is made here and handed down.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from opentelemetry import trace

from gateway.admission import Admission
from gateway.auth import Authenticator
from gateway.catalog import Catalog
from gateway.config import GatewayConfig
from gateway.course import CourseLimits, MoveBudget
from gateway.custody import Custody
from gateway.delivery import Manners
from gateway.embedding import Embeddings
from gateway.generations import Generations
from gateway.http.app import Faces, build
from gateway.journal import Journals
from gateway.kit import Kits
from gateway.links import Links
from gateway.lookup import GatewayService, Lookup
from gateway.parts import Parts, RequestLimits
from gateway.routers import Routers
from gateway.service import InferenceService
from gateway.sweep import Sweeper
from gateway.table import Table
from gateway.telemetry import Telemetry
from gateway.transport import GrpcTransport, Transport
from gateway.upstream import Upstream
from shared import logging as logs
from shared import tracing
from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import Reason
from shared.ids import SYSTEM_RNG, Identity, Rng, new_incarnation
from shared.lifecycle import AdminServicer, Lifecycle, bind
from shared.ops_http import HttpServer, leaving, routes
from shared.peers import Peers, Registration
from shared.ports import reachable
from shared.records import Records
from shared.rpc import Channels, add_health, add_reflection, make_server
from shared.state import StateAway, Store
from shared.wire import PROTOCOL, LoopLag
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc
from trunkline.gateway.v1 import gateway_pb2, gateway_pb2_grpc
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc

_log = logging.getLogger(__name__)

INFERENCE_SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
GATEWAY_SERVICE: Final = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name
ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
STOP_S: Final = 1.0  # for calls that are left when every request is over
HEALTH_S: Final = 0.25
SWITCH_S: Final = 0.0005  # for which a thread that tokenises keeps the interpreter while the event loop wants it
MOVE_S: Final = 0.05  # between looks at what can go on elsewhere by now
LAST_WRITES_S: Final = 2.0  # for outputs that are still to be written


@dataclass(frozen=True)
class Core:
    """What decides, without servers: the simulation runs it as it is."""

    parts: Parts
    generations: Generations
    embeddings: Embeddings
    lookup: Lookup
    catalog: Catalog
    kits: Kits
    links: Links
    journals: Journals
    sweeper: Sweeper
    gateways: Peers

    @property
    def alone(self) -> bool:
        """No other gateway is known that stays."""
        me = self.parts.identity.id
        others = (info for info in self.gateways.snapshot().values() if info.id != me)
        return all(info.fields.get("draining") == "1" for info in others)

    @property
    def table(self) -> Table:
        """The requests owned here."""
        return self.parts.table

    async def close(self) -> None:
        """End streams and what is being made."""
        await self.generations.close()
        await self.links.close()
        await self.kits.close()


@dataclass(frozen=True)
class Gateway:
    """A gateway that serves."""

    core: Core
    lifecycle: Lifecycle
    grpc: str  # real addresses, host:port
    http: str
    internal: str


class _Drained(Exception):
    """Ends the task group of a gateway that has nothing left to do."""


def make_core(
    config: GatewayConfig,
    *,
    clock: Clock,
    rng: Rng,
    lag: LoopLag,
    store: Store,
    transport: Transport,
    routers: Peers,
    gateways: Peers,
    lifecycle: Lifecycle,
    tracer: trace.Tracer,
) -> Core:
    """Puts the deciding parts together. Starts nothing."""
    identity, limits = lifecycle.identity, config.limits
    known = Routers(routers, clock)
    kits, links = Kits(transport, known, clock), Links(transport, identity, lag, clock)
    catalog = Catalog(transport, known, kits, lifecycle, lag, clock, rng)
    upstream = Upstream(
        transport,
        known,
        links,
        tracer,
        clock,
        rng,
        budget=MoveBudget(clock, limits.moves_burst, limits.moves_per_s),
        limits=CourseLimits(limits.fruitless_attempts, limits.worker_losses),
    )
    parts = Parts(
        identity=identity,
        clock=clock,
        rng=rng,
        lifecycle=lifecycle,
        catalog=catalog,
        admission=Admission(
            store, clock, lambda: max(1, len(gateways.snapshot())), idem_ttl_s=limits.idempotency_ttl_s
        ),
        records=Records(store),
        upstream=upstream,
        table=Table(),
        tracer=tracer,
        telemetry=Telemetry(),
        limits=RequestLimits(
            config.default_deadline_ms,
            config.max_deadline_ms,
            limits.in_flight,
        ),
        manners=Manners(limits.heartbeat_ms / 1000, limits.slow_reader_ms / 1000),
        custody=Custody(store, identity, idem_ttl_s=limits.idempotency_ttl_s),
    )
    journals = Journals(parts.custody, clock)
    generations = Generations(parts, journals, limits.resume_window_ms / 1000)
    lookup = Lookup(parts.table, parts.records, gateways, transport, identity, generations.take_over)
    sweeper = Sweeper(parts.custody, parts.admission, limits.owner_gone_ms)
    _show(parts, links, generations, lag)
    parts.telemetry.gauge("journals", "Resumable requests that are owned here.", lambda: float(len(journals)))
    return Core(parts, generations, Embeddings(parts), lookup, catalog, kits, links, journals, sweeper, gateways)


def _show(parts: Parts, links: Links, generations: Generations, lag: LoopLag) -> None:
    gauge = parts.telemetry.gauge
    gauge("in_flight", "Requests that are not over.", lambda: float(len(parts.table)))
    gauge("accepted", "Requests admitted since the start.", lambda: float(parts.table.accepted))
    gauge("retries", "Attempts after the first, since the start.", lambda: float(parts.upstream.retries))
    gauge("outputs_streams", "Workers and lanes with a stream.", lambda: float(links.open_streams))
    gauge("stale_openings", "Openings answered with Cancel, since the start.", lambda: float(links.stale))
    gauge("lost_attempts", "Attempts whose worker was lost, since the start.", lambda: float(links.lost_attempts))
    gauge("hold_seconds", "For how long streams collect tokens now.", lambda: generations.pacer.hold_s)
    gauge("loop_lag_seconds", "How late this process's loop is.", lag.lag_s)


@asynccontextmanager
async def running(
    config: GatewayConfig, *, clock: Clock = SYSTEM_CLOCK, rng: Rng = SYSTEM_RNG
) -> AsyncIterator[Gateway]:
    """A gateway that serves inside the scope, and drains when it is left. Raises StartError."""
    identity = Identity("gateway", config.id, new_incarnation(rng), PROTOCOL._replace(minor=config.protocol_minor))
    authenticator = Authenticator(Path(config.keys_file), clock)
    traces = tracing.setup(config.tracing, identity, config.redis_url)
    services = (INFERENCE_SERVICE, GATEWAY_SERVICE)
    lifecycle = Lifecycle(identity, services=services, clock=clock, settle_s=config.drain_settle_ms / 1000)
    store = Store(config.redis_url, clock, name=config.id, rng=rng)
    channels = Channels(identity, traces.tracer)
    lag, routers, gateways = LoopLag(clock), Peers(store, "router", config.routers), Peers(store, "gateway")
    core = make_core(
        config,
        clock=clock,
        rng=rng,
        lag=lag,
        store=store,
        transport=GrpcTransport(channels),
        routers=routers,
        gateways=gateways,
        lifecycle=lifecycle,
        tracer=traces.tracer,
    )
    try:
        await store.start()
        async with asyncio.TaskGroup() as tasks:
            async with _serving(config, core, authenticator, store, traces.tracer) as gateway:
                await routers.look()
                for run in (lag.run, routers.run, gateways.run, core.catalog.run, core.generations.run,
                            core.journals.run, core.sweeper.run):  # fmt: skip
                    tasks.create_task(run())
                tasks.create_task(authenticator.run())
                tasks.create_task(_keep_ready(lifecycle, core.catalog, store))
                yield gateway
            raise _Drained
    except* _Drained:
        pass
    finally:
        await core.close()
        await channels.close()
        await store.close()
        await asyncio.to_thread(traces.shutdown)


@asynccontextmanager
async def _serving(
    config: GatewayConfig, core: Core, authenticator: Authenticator, store: Store, tracer: trace.Tracer
) -> AsyncIterator[Gateway]:
    """Servers and registration; on leaving, the order that loses nothing: tell, refuse, finish what is here, close."""
    lifecycle = core.parts.lifecycle
    public, internal = _public(core, authenticator, tracer), _internal(core, tracer)
    gateway = Gateway(
        core,
        lifecycle,
        grpc=await bind(public, config.grpc_listen),
        internal=await bind(internal, config.internal_listen),
        http=(web := _web(config, core, authenticator)).address,
    )
    registration = Registration(store, lifecycle.identity, {
        "address": reachable(gateway.internal, config.advertise),
        "grpc": reachable(gateway.grpc, config.advertise),
        "http": reachable(gateway.http, config.advertise),
    })  # fmt: skip
    await public.start()
    await internal.start()
    web.start()
    register = asyncio.create_task(registration.run())
    closing: asyncio.Task[None] | None = None
    try:
        yield gateway
        lifecycle.drain()
        await registration.update({"draining": "1"})
        await lifecycle.settled()
        grace_s = (lifecycle.grace_ms or config.drain_grace_ms) / 1000
        closing = asyncio.create_task(public.stop(grace_s + LAST_WRITES_S))  # clients connect elsewhere for what is new
        await _finish(core, grace_s)
    finally:
        register.cancel()
        await registration.close()
        await asyncio.gather(public.stop(STOP_S), internal.stop(STOP_S), web.close())
        if closing is not None:
            await closing


def _public(core: Core, authenticator: Authenticator, tracer: trace.Tracer) -> grpc.aio.Server:
    lifecycle = core.parts.lifecycle
    server = make_server(tracer=tracer, public=True, identity=lifecycle.identity, clock=core.parts.clock)
    service = InferenceService(authenticator, core.generations, core.embeddings, core.catalog, core.lookup, tracer)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    add_health(server, lifecycle)
    add_reflection(server, (INFERENCE_SERVICE,))
    return server


def _internal(core: Core, tracer: trace.Tracer) -> grpc.aio.Server:
    lifecycle = core.parts.lifecycle
    server = make_server(tracer=tracer, public=False, identity=lifecycle.identity, clock=core.parts.clock)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayService(core.lookup), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(lifecycle, lambda: _gauges(core)), server)
    add_health(server, lifecycle)
    add_reflection(server, (GATEWAY_SERVICE, ADMIN_SERVICE))
    return server


def _web(config: GatewayConfig, core: Core, authenticator: Authenticator) -> HttpServer:
    parts = core.parts
    faces = Faces(authenticator, core.generations, core.embeddings, core.catalog, parts.clock, parts.rng)
    app = leaving(build([*faces.routes(), *routes(parts.lifecycle)]), parts.lifecycle)
    return HttpServer(app, config.http_listen)


async def _finish(core: Core, grace_s: float) -> None:
    """Let requests come to their ends, and move to another gateway those that can; what is left after the grace is
    moved or cancelled."""
    try:
        async with asyncio.timeout(grace_s):
            while core.table.busy or core.generations.streams:
                core.generations.leave()
                if not core.alone:
                    with suppress(StateAway):
                        await core.journals.let_go(every=False)
                await asyncio.sleep(MOVE_S)
    except TimeoutError:
        _log.warning("%d requests are moved or cancelled: the grace is over", len(core.table))
        with suppress(StateAway):
            await core.journals.let_go()
        for request in core.table:
            request.cancel(Reason.DRAINING)
        await core.table.idle()
    with suppress(TimeoutError):  # whoever comes back finds what the store has
        async with asyncio.timeout(LAST_WRITES_S):
            await core.journals.idle()


async def _keep_ready(lifecycle: Lifecycle, catalog: Catalog, store: Store) -> None:
    """Ready once a router tells of a model; degraded, not down, without the state store."""
    while True:
        problem = catalog.problem
        lifecycle.set_ready(not problem, problem or ("" if store.available else "the state store is away"))
        try:
            async with asyncio.timeout(HEALTH_S):
                await lifecycle.changed()  # the catalog tells the health of models there
        except TimeoutError:
            continue


def _gauges(core: Core) -> Mapping[str, float]:
    return {
        "requests_in_flight": float(len(core.table)),
        "requests_accepted": float(core.table.accepted),
        "outputs_streams": float(core.links.open_streams),
    }


async def main(config: GatewayConfig) -> None:
    """Serve until drained. Raises StartError."""
    sys.setswitchinterval(SWITCH_S)
    logs.setup(config.log, Identity("gateway", config.id, 0))
    async with running(config) as gateway:
        gateway.lifecycle.install_signals(asyncio.get_running_loop())
        logs.canonical(
            _log, "ready", role="gateway", grpc=gateway.grpc, http=gateway.http, internal=gateway.internal
        )  # fmt: skip
        await gateway.lifecycle.wait_drain()
        logs.canonical(_log, "draining")
