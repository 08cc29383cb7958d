"""One worker process, put together: the only file that knows every part.

Owns the order of start and end. The one rule: ports are taken and the artefact is read before the engine starts, so
that what is wrong with them is said at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry

from shared import logging as logs
from shared import tracing
from shared.clock import SYSTEM_CLOCK, Clock
from shared.ids import SYSTEM_RNG, Identity, Rng
from shared.lifecycle import BUILD, AdminServicer, Lifecycle, bind
from shared.ops_http import serve_ops
from shared.peers import Peers, Registration
from shared.ports import reachable
from shared.rpc import add_health, add_reflection, make_server
from shared.state import Store
from shared.tracing import Tracing
from shared.wire import PROTOCOL, LoopLag
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc
from workers.assets import Assets
from workers.config import WorkerConfig
from workers.door.door import Door, Limits
from workers.door.service import WorkerServicer
from workers.door.stream import Window
from workers.drain import Drain
from workers.engine.options import to_arguments
from workers.metrics import Gauges, Metrics
from workers.observers import Observers
from workers.spans import Spans
from workers.supervisor import Program, Supervisor
from workers.worker import Worker

_log = logging.getLogger(__name__)

WORKER_SERVICE: Final = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
TICK_S: Final = 0.1
STOP_S: Final = 1.0  # for calls that are left when everything is settled
SPINS: Final = "10000"  # of an idle OpenMP thread before it sleeps: it may not keep a core from others for long


@dataclass(frozen=True)
class Running:
    """A worker that serves; `lifecycle.ready` once its engine is."""

    door: Door
    worker: Worker
    supervisor: Supervisor
    drain: Drain
    lifecycle: Lifecycle
    grpc: str  # real addresses, host:port
    admin: str
    ops: str


@dataclass(frozen=True)
class _Parts:
    """What is made once for a worker."""

    config: WorkerConfig
    clock: Clock
    assets: Assets
    door: Door
    lifecycle: Lifecycle
    lag: LoopLag
    worker: Worker
    drain: Drain
    store: Store | None


@asynccontextmanager
async def running(
    config: WorkerConfig,
    *,
    clock: Clock = SYSTEM_CLOCK,
    rng: Rng = SYSTEM_RNG,
    registry: CollectorRegistry = REGISTRY,
) -> AsyncIterator[Running]:
    """A worker inside the scope, which drains when it is left. Raises StartError, also in a group."""
    identity = Identity("worker", config.id, 0)
    traces = tracing.setup(config.tracing, identity, config.redis_url or None)
    store = Store(config.redis_url, clock, name=config.id, rng=rng) if config.redis_url else None
    parts = _parts(config, clock, rng, traces, store)
    gauges = Gauges(parts.door, parts.assets.model)
    registry.register(gauges)
    supervisor = Supervisor(_program(config), parts.worker, clock)
    try:
        if store is not None:
            await store.start()
        async with asyncio.TaskGroup() as tasks:
            async with _serving(parts, traces, supervisor) as run:
                background = [tasks.create_task(each) for each in (parts.lag.run(), _tick(parts.door))]
                tasks.create_task(supervisor.run())
                yield run
                await run.drain.run()
            await supervisor.stop()
            for task in background:
                task.cancel()
    finally:
        registry.unregister(gauges)
        if store is not None:
            await store.close()
        await asyncio.to_thread(traces.shutdown)


def _parts(config: WorkerConfig, clock: Clock, rng: Rng, traces: Tracing, store: Store | None) -> _Parts:
    assets = Assets(Path(config.model.path), config.model.name, config.model.version)
    protocol = PROTOCOL._replace(minor=config.protocol_minor)
    lifecycle = Lifecycle(
        Identity("worker", config.id, 0, protocol),
        services=(WORKER_SERVICE,),
        clock=clock,
        settle_s=config.drain_settle_ms / 1e3,
    )
    observers = Observers(Metrics(assets.model, clock), Spans(traces.tracer, clock))
    door = Door(config.id, BUILD, clock, observers, _limits(config), protocol)
    lag = LoopLag(clock)
    worker = Worker(config, assets, door, lifecycle, lag.lag_s, rng)
    drain = Drain(
        door,
        lifecycle,
        Peers(store, "worker"),
        clock,
        artefact_hash=assets.manifest.artefact_hash,
        grace_s=config.drain_grace_ms / 1e3,
        release=config.drain_release,
    )
    return _Parts(config, clock, assets, door, lifecycle, lag, worker, drain, store)


@asynccontextmanager
async def _serving(parts: _Parts, traces: Tracing, supervisor: Supervisor) -> AsyncIterator[Running]:
    """Servers and registration."""
    config, lifecycle, worker = parts.config, parts.lifecycle, parts.worker
    servicer = WorkerServicer(
        parts.door,
        parts.assets,
        parts.clock,
        parts.lag,
        worker_id=config.id,
        versions=worker.versions,
        describe=worker.description,
        drain=parts.drain.ask,
    )
    server = make_server(tracer=traces.tracer, public=False, identity=lifecycle.identity)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    admin = make_server(tracer=traces.tracer, public=False, identity=lifecycle.identity)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(lifecycle, worker.gauges), admin)
    for each, name in ((server, WORKER_SERVICE), (admin, ADMIN_SERVICE)):
        add_health(each, lifecycle)
        add_reflection(each, (name,))
    run = Running(
        door=parts.door,
        worker=worker,
        supervisor=supervisor,
        drain=parts.drain,
        lifecycle=lifecycle,
        grpc=await bind(server, config.grpc_listen),
        admin=await bind(admin, config.admin_listen),
        ops=(ops := serve_ops(config.ops_listen, lifecycle)).address,
    )
    await server.start()
    await admin.start()
    registered = asyncio.create_task(_register(parts, run))
    try:
        yield run
    finally:
        registered.cancel()
        await asyncio.gather(registered, server.stop(STOP_S), admin.stop(STOP_S), ops.close(), return_exceptions=True)


async def _register(parts: _Parts, run: Running) -> None:
    """Keeps the registration true: there from the first ready engine on, with the incarnation of the present one."""
    if parts.store is None:
        return
    while not run.lifecycle.ready:
        await run.lifecycle.changed()
    fields = {
        "address": reachable(run.grpc, parts.config.advertise),
        "admin": reachable(run.admin, parts.config.advertise),
        "ops": reachable(run.ops, parts.config.advertise),
        "model": parts.assets.model,
        "version": parts.assets.version,
        "artefact": parts.assets.manifest.artefact_hash,
    }
    registration = Registration(parts.store, run.lifecycle.identity, fields)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(registration.run())
            while True:
                version = run.lifecycle.version
                await registration.update(run.worker.registration())
                await run.lifecycle.changed(version)
    finally:
        await registration.close()


async def _tick(door: Door) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        door.tick()


def _limits(config: WorkerConfig) -> Limits:
    door = config.door
    return Limits(
        orphan_grace_s=door.orphan_grace_ms / 1e3,
        tombstone_s=door.tombstone_ms / 1e3,
        slow_reader_s=door.slow_reader_ms / 1e3,
        retained_bytes=door.retained_mb * 1024 * 1024,
        window=Window(door.window_messages, door.window_kb * 1024),
    )


def _program(config: WorkerConfig) -> Program:
    options = config.engine.options(config.model.path)
    further = [f"--{name}={value}" for name, value in config.engine.flags.items()]
    environment = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", SPINS)}
    if options.threads:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    return Program(config.engine.module, lambda fd: [*to_arguments(fd, options), *further], environment)


async def main(config: WorkerConfig) -> None:
    """Serve until drained. Raises StartError."""
    logs.setup(config.log, Identity("worker", config.id, 0))
    async with running(config) as run:
        run.lifecycle.install_signals(asyncio.get_running_loop())
        while not (run.lifecycle.ready or run.lifecycle.draining):
            await run.lifecycle.changed()
        if run.lifecycle.ready:
            logs.canonical(_log, "ready", role="worker", grpc=run.grpc, admin=run.admin, http=run.ops)
        await run.lifecycle.wait_drain()
        logs.canonical(_log, "draining")
