"""One router process, put together: the only file that knows every part.

The one rule: what tells the time, draws at random or talks to the outside is made here and handed down.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from opentelemetry import trace
from prometheus_client import REGISTRY, CollectorRegistry

from router.assets import Assets
from router.batcher import Batcher
from router.catalog import Catalog
from router.config import RouterConfig
from router.discovery import Discovery
from router.dispatcher import Dispatcher
from router.fleet import Fleet
from router.metrics import Metrics
from router.outbox import Outbox
from router.policy import Policy, Weights
from router.scorers import Limits
from router.service import RouterService
from shared import logging as logs
from shared import tracing
from shared.clock import SYSTEM_CLOCK, Clock
from shared.ids import SYSTEM_RNG, Identity, Rng, new_incarnation
from shared.lifecycle import AdminServicer, Lifecycle, bind, listen
from shared.ops_http import serve_ops
from shared.peers import Peers, Registration
from shared.ports import reachable
from shared.rpc import Channels, add_health, add_reflection, make_server
from shared.state import Store
from shared.wire import PROTOCOL, LoopLag
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc
from trunkline.router.v1 import router_pb2, router_pb2_grpc

_log = logging.getLogger(__name__)

ROUTER_SERVICE: Final = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name
ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
STOP_S: Final = 1.0  # for calls that are left when everything has been answered
HEALTH_S: Final = 0.5


@dataclass(frozen=True)
class Core:
    """What decides, without servers: the simulation runs it as it is."""

    fleet: Fleet
    dispatcher: Dispatcher
    discovery: Discovery
    catalog: Catalog
    assets: Assets
    metrics: Metrics


@dataclass(frozen=True)
class Router:
    """A router that serves."""

    core: Core
    lifecycle: Lifecycle
    grpc: str  # real addresses, host:port
    admin: str
    ops: str


class _Drained(Exception):
    """Ends the task group of a router that has nothing left to do."""


def make_core(
    config: RouterConfig,
    *,
    clock: Clock,
    rng: Rng,
    tasks: asyncio.TaskGroup,
    lag: LoopLag,
    peers: Peers,
    channels: Channels,
    lifecycle: Lifecycle,
    tracer: trace.Tracer,
    registry: CollectorRegistry,
) -> Core:
    """Puts the deciding parts together. Starts nothing."""
    identity, batch, weights = lifecycle.identity, config.batch, config.weights
    metrics = Metrics(registry)
    policy = Policy(
        Weights(load=weights.load, prefill=weights.prefill, kv=weights.kv, preferred=weights.preferred),
        Limits(prefill_tokens=batch.prefill_tokens),
        rng,
    )
    fleet = Fleet(clock, policy, lag.lag_s, max_report_age_s=config.fleet.max_report_age_ms / 1000)
    dispatcher = Dispatcher(
        clock=clock,
        rng=rng,
        tasks=tasks,
        fleet=fleet,
        policy=policy,
        batcher=Batcher(channels, identity, connect_s=batch.connect_ms / 1000, timeout_s=batch.timeout_ms / 1000),
        outbox=Outbox(batch.max_items),
        metrics=metrics,
        tracer=tracer,
        config=config.queue,
    )
    discovery = Discovery(
        clock=clock,
        tasks=tasks,
        peers=peers,
        fleet=fleet,
        channels=channels,
        identity=identity,
        metrics=metrics,
        config=config.fleet,
    )
    metrics.gauge(queue_length=dispatcher.__len__, in_flight=lambda: dispatcher.in_flight, states=fleet.states)
    catalog = Catalog(fleet, identity, lifecycle)
    return Core(fleet, dispatcher, discovery, catalog, Assets(fleet, channels, config.assets), metrics)


@asynccontextmanager
async def running(
    config: RouterConfig,
    *,
    clock: Clock = SYSTEM_CLOCK,
    rng: Rng = SYSTEM_RNG,
    registry: CollectorRegistry = REGISTRY,
) -> AsyncIterator[Router]:
    """A router that serves inside the scope, and drains when it is left. Raises StartError."""
    identity = Identity("router", config.id, new_incarnation(rng), PROTOCOL._replace(minor=config.protocol_minor))
    traces = tracing.setup(config.tracing, identity, config.redis_url or None)
    lifecycle = Lifecycle(identity, services=(ROUTER_SERVICE,), clock=clock, settle_s=config.drain_settle_ms / 1000)
    store = Store(config.redis_url, clock, name=config.id, rng=rng) if config.redis_url else None
    channels = Channels(identity, traces.tracer)
    try:
        if store is not None:
            await store.start()
        async with asyncio.TaskGroup() as tasks:
            lag, peers = LoopLag(clock), Peers(store, "worker", config.workers)
            core = make_core(
                config,
                clock=clock,
                rng=rng,
                tasks=tasks,
                lag=lag,
                peers=peers,
                channels=channels,
                lifecycle=lifecycle,
                tracer=traces.tracer,
                registry=registry,
            )
            async with _serving(config, core, lifecycle, store, traces.tracer) as router:
                await peers.look()
                for run in (lag.run, peers.run, core.dispatcher.run, core.discovery.run):
                    tasks.create_task(run())
                await core.discovery.look()
                await core.discovery.settled()
                tasks.create_task(_keep_ready(lifecycle, core.fleet, store))
                yield router
            raise _Drained
    except* _Drained:
        pass
    finally:
        await channels.close()
        if store is not None:
            await store.close()
        traces.shutdown()


@asynccontextmanager
async def _serving(
    config: RouterConfig, core: Core, lifecycle: Lifecycle, store: Store | None, tracer: trace.Tracer
) -> AsyncIterator[Router]:
    """Servers and registration; on leaving, the order that loses nothing: tell, refuse, answer what is here, close."""
    for address in (config.grpc_listen, config.admin_listen, config.ops_listen):
        listen(address).close()  # a port that is taken is told before there are servers, which grpc hates to end unused
    server = make_server(tracer=tracer, public=False, identity=lifecycle.identity)
    service = RouterService(core.dispatcher, core.catalog, core.assets, lifecycle)
    router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
    admin = make_server(tracer=tracer, public=False, identity=lifecycle.identity)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(lifecycle, lambda: _gauges(core)), admin)
    for each, name in ((server, ROUTER_SERVICE), (admin, ADMIN_SERVICE)):
        add_health(each, lifecycle)
        add_reflection(each, (name,))
    async with AsyncExitStack() as stack:
        for each in (server, admin):
            stack.push_async_callback(each.stop, STOP_S)
        addresses = [await bind(server, config.grpc_listen), await bind(admin, config.admin_listen)]
        ops = serve_ops(config.ops_listen, lifecycle)
        stack.push_async_callback(ops.close)
        await server.start()
        await admin.start()
        async with _registered(config, lifecycle, store, *addresses):
            yield Router(core, lifecycle, grpc=addresses[0], admin=addresses[1], ops=ops.address)
            lifecycle.drain()
        await leave(core, lifecycle, store, config.drain_grace_ms / 1000)


async def leave(core: Core, lifecycle: Lifecycle, store: Store | None, grace_s: float) -> None:
    """What follows a drain once the router has left the list: gateways hear of it, what is new is taken for a moment
    longer, what waits is handed back if another router serves, and placed if not."""
    core.catalog.wake()
    await lifecycle.settled()
    others = Peers(store, "router")
    await others.look()
    core.dispatcher.drain(hand_back=bool(others.snapshot()))
    await core.dispatcher.drained(lifecycle.grace_ms / 1000 or grace_s)
    core.catalog.close()


@asynccontextmanager
async def _registered(
    config: RouterConfig, lifecycle: Lifecycle, store: Store | None, grpc: str, admin: str
) -> AsyncIterator[None]:
    """In the list of routers inside the scope."""
    if store is None:
        yield
        return
    fields = {"address": reachable(grpc, config.advertise), "admin": reachable(admin, config.advertise)}
    registration = Registration(store, lifecycle.identity, fields)
    refreshing = asyncio.create_task(registration.run())
    try:
        yield
    finally:
        refreshing.cancel()
        await registration.close()


async def _keep_ready(lifecycle: Lifecycle, fleet: Fleet, store: Store | None) -> None:
    """A router is ready even without workers or store: what it cannot do it refuses with the reason."""
    while True:
        away = store is not None and not store.available
        detail = "the state store is away" if away else "" if fleet.states().get("ready") else "no worker is ready"
        lifecycle.set_ready(True, detail)
        await asyncio.sleep(HEALTH_S)


def _gauges(core: Core) -> Mapping[str, float]:
    states = {f"workers_{state}": float(count) for state, count in core.fleet.states().items()}
    return {
        "queue_length": float(len(core.dispatcher)),
        "requests_in_flight": float(core.dispatcher.in_flight),
        **states,
    }


async def main(config: RouterConfig) -> None:
    """Serve until drained. Raises StartError."""
    logs.setup(config.log, Identity("router", config.id, 0))
    async with running(config) as router:
        router.lifecycle.install_signals(asyncio.get_running_loop())
        logs.canonical(_log, "ready", role="router", grpc=router.grpc, admin=router.admin, http=router.ops)
        await router.lifecycle.wait_drain()
        logs.canonical(_log, "draining")
