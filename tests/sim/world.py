"""A whole mesh in one loop: gateways, routers, workers and clients as the real code makes them, minus sockets.

Owns the processes and what befalls them. The one rule: all chance comes from one `random.Random(seed)` and all time
from the loop, so a seed is a history. Processes are named g1.., r1.., w1.. (a door; its engine is w1.e), c1..; an
address is `<name>:1`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry import trace
from prometheus_client import CollectorRegistry

from gateway import app as gateway_app
from gateway.auth import Limits, Principal
from gateway.config import GatewayConfig, LimitsConfig
from gateway.lookup import GatewayService
from gateway.service import InferenceService
from gateway.transport import GrpcTransport
from router import app as router_app
from router.config import RouterConfig
from router.service import RouterService
from shared.errors import Reason, TrunklineError
from shared.ids import BUILD, Identity, new_incarnation
from shared.lifecycle import Lifecycle
from shared.peers import Peers, Registration
from shared.wire import LoopLag
from tests.fakes import mesh as fake
from tests.sim.checks import Checks
from tests.sim.clients import Ask, Client
from tests.sim.clock import SimClock
from tests.sim.engine import Shape, SimSupervisor
from tests.sim.loop import Deadlock, Process, SimLoop
from tests.sim.net import Net, SimChannels, SimServer, kill
from tests.sim.store import Link, Saved, SimRedis, SimStore
from trunkline.gateway.v1 import gateway_pb2_grpc
from trunkline.inference.v1 import inference_pb2_grpc
from trunkline.router.v1 import router_pb2_grpc
from trunkline.worker.v1 import worker_pb2_grpc
from workers import app as worker_app
from workers.assets import Assets
from workers.config import DoorConfig, EngineConfig, ModelConfig, WorkerConfig
from workers.door.door import Door
from workers.door.execution import Execution
from workers.door.service import WorkerServicer
from workers.drain import Drain
from workers.weights.manifest import Manifest, Origin
from workers.worker import Worker

TRACER: Final = trace.NoOpTracer()
RESTART_S: Final = 0.5  # until a killed process is there again
TENANTS: Final = ("a", "b")


@dataclass(frozen=True)
class Plan:
    """What a world is made of."""

    gateways: int = 2
    routers: int = 2
    workers: int = 3
    shape: Shape = field(default_factory=Shape)
    max_requests: int = 16  # of one door
    other_tokens: bool = False  # every engine life draws other tokens
    limits: dict[str, Any] = field(default_factory=dict)  # of gateways
    features: dict[str, frozenset[str]] = field(default_factory=dict)  # of workers that are older
    concurrency: int = 1000  # requests of a tenant at once
    new_versions: bool = False  # every life of a worker serves a version of its own
    keep_log: bool = False


class SimAuthenticator:
    """The key is the tenant's name."""

    def __init__(self, concurrency: int) -> None:
        self._limits = Limits(rpm=1_000_000, tpm=1_000_000_000, concurrency=concurrency)

    def authenticate(self, authorization: str | None) -> Principal:
        tenant = (authorization or "").removeprefix("Bearer ")
        if tenant not in TENANTS:
            raise TrunklineError(Reason.KEY_UNKNOWN, "no such key")
        scopes = frozenset({"generate", "embed", "cancel"})
        return Principal(f"k_{tenant}", tenant, scopes, frozenset({"*"}), self._limits)

    def authorize(self, principal: Principal, scope: str, model: str | None) -> None:
        """Every key may do everything."""


class SimAssets(Assets):
    """An artefact that is nowhere on disk."""

    def __init__(self, number: str = "1") -> None:
        served = fake.version(number)
        self.manifest = Manifest(1, fake.MODEL, "hash", "fp32", 1, 1, 1, "sim", Origin("sim", "sim", ""),
                                 served.artefact_hash, served.tokenizer_hash, (), ())  # fmt: skip
        self.model, self.version = fake.MODEL, number
        self._hashes = dict(served.assets)
        self._files = {hashlib.sha256(data).hexdigest(): data for data in fake.FILES.values()}


@dataclass
class Node:
    """One process of the mesh, over all its lives."""

    role: str
    name: str
    process: Process
    lives: int = 1
    parts: Any = None  # of the present life, once it has started
    link: Link | None = None
    up: bool = False


class _Errors(logging.Handler):
    """What a service calls an error is a fault of the world, unless the test expects it."""

    def __init__(self, faults: list[BaseException | str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._faults.append(error or record.getMessage())


class World:
    """See the module. Make it with `world(...)`."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.seed = seed
        self.plan = plan
        self.loop = SimLoop()
        self.clock = SimClock(self.loop)
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self._digest = hashlib.sha256()
        self.logged = 0
        self.net = Net(self.loop, self._own_rng(), self.log)
        self.redis = SimRedis(self.loop)
        self.nodes: dict[str, Node] = {}
        self.salts: list[int] = []  # of all engine lives
        self.troubles = 0  # that are not over
        self.admissions = 0  # of all doors, adoptions apart
        self.events: list[str] = []  # what was done to it
        self.clients: list[Client] = []
        self.checks = Checks(self)
        self._assets = SimAssets()

    def log(self, line: str) -> None:
        """One line of the history."""
        text = f"{self.loop.now:.6f} {line}"
        self.logged += 1
        self._digest.update(text.encode())
        if self.plan.keep_log:
            self.lines.append(text)

    @property
    def digest(self) -> str:
        """Of the history so far (INV-6)."""
        return self._digest.hexdigest()

    def _own_rng(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def did(self, what: str) -> None:
        """Something befalls the world."""
        self.events.append(f"{self.loop.now:.3f} {what}")
        self.log(f"*** {what}")

    # Building it.

    def build(self) -> None:
        """Start every process."""
        for role, count in (("worker", self.plan.workers), ("router", self.plan.routers),
                            ("gateway", self.plan.gateways)):  # fmt: skip
            for number in range(1, count + 1):
                self._begin(Node(role, f"{role[0]}{number}", Process(self.loop, f"{role[0]}{number}")))

    def _begin(self, node: Node) -> None:
        self.nodes[node.name] = node
        node.up, node.parts = False, None
        node.link = Link(self.redis, self._own_rng())
        main = {"worker": self._worker, "router": self._router, "gateway": self._gateway}[node.role]
        node.process.spawn(self._guarded(node, main(node, node.process)))

    async def _guarded(self, node: Node, main: Coroutine[Any, Any, None]) -> None:
        try:
            await main
        except Exception as error:
            self.loop.faults.append(error)

    def _store(self, node: Node, rng: random.Random) -> SimStore:
        assert node.link is not None
        return SimStore(node.link, self.clock, name=node.name, rng=rng)

    async def _worker(self, node: Node, process: Process) -> None:
        rng, clock, plan = self._own_rng(), self.clock, self.plan
        assets = SimAssets(str(node.lives)) if plan.new_versions else self._assets
        config = WorkerConfig(
            id=node.name,
            model=ModelConfig("sim"),
            engine=EngineConfig(max_held=plan.shape.max_held, max_seqs=plan.shape.max_seqs),
            door=DoorConfig(max_requests=plan.max_requests),
            drain_grace_ms=20_000,
        )
        lifecycle = Lifecycle(Identity("worker", node.name, 0), services=(worker_app.WORKER_SERVICE,), clock=clock)
        door = Door(node.name, BUILD, clock, _Counting(self), worker_app._limits(config))
        lag, store = LoopLag(clock), self._store(node, rng)
        worker = SimWorker(config, assets, door, lifecycle, lag.lag_s, rng)
        worker.features = plan.features.get(node.name)
        peers = Peers(store, "worker")
        manifest = assets.manifest
        drain = Drain(door, lifecycle, peers, clock, artefact_hash=manifest.artefact_hash, grace_s=20.0)
        server = SimServer(self.net, process, f"{node.name}:1", clock, public=False)
        servicer = WorkerServicer(
            door, assets, clock, lag,
            worker_id=node.name, versions=worker.versions, describe=worker.description, drain=drain.ask,
        )  # fmt: skip
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        ready = plan.shape.ready(manifest.artefact_hash, manifest.tokenizer_hash)
        supervisor = SimSupervisor(process, self.loop, worker, plan.shape, rng, ready, self._salt)
        await store.start()
        async with asyncio.TaskGroup() as tasks:
            node.parts = WorkerParts(door, worker, supervisor, drain, lifecycle, server)
            background = [
                tasks.create_task(each)
                for each in (lag.run(), worker_app._tick(door), self._register_worker(store, lifecycle, worker, assets))
            ]
            keeping = tasks.create_task(supervisor.run())
            while not lifecycle.ready:
                await lifecycle.changed()
            node.up = True
            await lifecycle.wait_drain()
            await drain.run()
            supervisor.stop()
            server.close()
            await store.close()
            for task in (*background, keeping):
                task.cancel()
        self._leave(node, process)

    def _salt(self) -> int:
        salt = len(self.salts) + 1 if self.plan.other_tokens else 0
        self.salts.append(salt)
        return salt

    async def _register_worker(self, store: SimStore, lifecycle: Lifecycle, worker: Worker, assets: SimAssets) -> None:
        while not lifecycle.ready:
            await lifecycle.changed()
        fields = {
            "address": f"{lifecycle.identity.id}:1",
            "model": assets.model,
            "version": assets.version,
            "artefact": assets.manifest.artefact_hash,
        }
        registration = Registration(store, lifecycle.identity, fields)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(registration.run())
                while True:
                    version = lifecycle.version
                    await registration.update(worker.registration())
                    await lifecycle.changed(version)
        finally:
            await registration.close()

    async def _router(self, node: Node, process: Process) -> None:
        rng, clock = self._own_rng(), self.clock
        identity = Identity("router", node.name, new_incarnation(rng))
        lifecycle = Lifecycle(identity, services=(router_app.ROUTER_SERVICE,), clock=clock)
        store = self._store(node, rng)
        channels = SimChannels(self.net, process, identity)
        lag, peers = LoopLag(clock), Peers(store, "worker")
        await store.start()
        try:
            await self._routing(node, process, store, channels, lag, peers, lifecycle, rng)
        except* _Left:
            pass
        self._leave(node, process)

    async def _routing(self, node: Node, process: Process, store: SimStore, channels: SimChannels, lag: LoopLag,
                       peers: Peers, lifecycle: Lifecycle, rng: random.Random) -> None:  # fmt: skip
        clock, identity = self.clock, lifecycle.identity
        async with asyncio.TaskGroup() as tasks:
            core = router_app.make_core(
                RouterConfig(id=node.name), clock=clock, rng=rng, tasks=tasks, lag=lag, peers=peers, channels=channels,
                lifecycle=lifecycle, tracer=TRACER, registry=CollectorRegistry(auto_describe=False),
            )  # fmt: skip
            server = SimServer(self.net, process, f"{node.name}:1", clock, public=False)
            service = RouterService(core.dispatcher, core.catalog, core.assets, lifecycle)
            router_pb2_grpc.add_RouterServiceServicer_to_server(service, server)
            registration = Registration(store, identity, {"address": f"{node.name}:1"})
            node.parts = RouterParts(core, lifecycle, server)
            self.checks.watch_router(node.parts)
            await peers.look()
            background = [
                tasks.create_task(run()) for run in (lag.run, peers.run, core.dispatcher.run, core.discovery.run)
            ]
            registering = tasks.create_task(registration.run())
            await core.discovery.look()
            await core.discovery.settled()
            lifecycle.set_ready(True)
            node.up = True
            await lifecycle.wait_drain()
            registering.cancel()
            await registration.close()
            await router_app.leave(core, lifecycle, store, 20.0)
            await asyncio.sleep(0.1)
            server.close()
            await store.close()
            for task in background:
                task.cancel()
            raise _Left

    async def _gateway(self, node: Node, process: Process) -> None:
        rng, clock = self._own_rng(), self.clock
        identity = Identity("gateway", node.name, new_incarnation(rng))
        config = GatewayConfig(
            id=node.name, keys_file="", default_deadline_ms=60_000,
            limits=LimitsConfig(**self.plan.limits),
        )  # fmt: skip
        services = (gateway_app.INFERENCE_SERVICE, gateway_app.GATEWAY_SERVICE)
        lifecycle = Lifecycle(identity, services=services, clock=clock)
        store = self._store(node, rng)
        channels = SimChannels(self.net, process, identity)
        lag, routers, gateways = LoopLag(clock), Peers(store, "router"), Peers(store, "gateway")
        core = gateway_app.make_core(
            config, clock=clock, rng=rng, lag=lag, store=store, transport=GrpcTransport(channels), routers=routers,
            gateways=gateways, lifecycle=lifecycle, tracer=TRACER,
        )  # fmt: skip
        server = SimServer(self.net, process, f"{node.name}:1", clock, public=True)
        service = InferenceService(
            SimAuthenticator(self.plan.concurrency),  # type: ignore[arg-type]
            core.generations, core.embeddings, core.catalog, core.lookup, TRACER,
        )  # fmt: skip
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
        internal = SimServer(self.net, process, f"{node.name}:2", clock, public=False)
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(GatewayService(core.lookup), internal)
        registration = Registration(store, identity, {"address": f"{node.name}:2", "grpc": f"{node.name}:1"})
        node.parts = GatewayParts(core, lifecycle, server, internal, store)
        self.checks.watch_gateway(node.parts)
        try:
            await store.start()
            async with asyncio.TaskGroup() as tasks:
                register = tasks.create_task(registration.run())
                await routers.look()
                for run in gateway_tasks(core, lag, routers, gateways):
                    tasks.create_task(run())
                tasks.create_task(gateway_app._keep_ready(lifecycle, core.catalog, store))
                while not lifecycle.ready:
                    await lifecycle.changed()
                node.up = True
                await lifecycle.wait_drain()
                await gateway_app._finish(core, 20.0)
                register.cancel()
                await registration.close()
                raise _Left
        except* _Left:
            pass
        finally:
            server.close()
            internal.close()
            await core.close()
            await channels.close()
            await store.close()
        self._leave(node, process)

    def _leave(self, node: Node, process: Process) -> None:
        """It has drained and ends by itself; something starts it again."""
        self.did(f"{node.name} has drained")
        self.loop.later(0.0, self._gone, node, process)

    def _gone(self, node: Node, process: Process) -> None:
        kill(self.net, process)
        self._again(node, process, RESTART_S)

    # What befalls it.

    def kill(self, name: str, *, again_s: float | None = RESTART_S, silently: bool = False) -> None:
        """SIGKILL; it is started again after a while, if it is to be. An engine's door starts it again."""
        self.did(f"kill {name}{' silently' if silently else ''}")
        if name.endswith(".e"):
            parts = self.nodes[name[:-2]].parts
            if parts is not None:
                parts.supervisor.kill()
            return
        node = self.nodes[name]
        process = node.process
        node.up = False
        kill(self.net, process, silently=silently)
        if again_s is not None:
            self._again(node, process, again_s)

    def _again(self, node: Node, process: Process, after_s: float) -> None:
        def start() -> None:
            if node.process is process:
                node.process = Process(self.loop, node.name)
                node.lives += 1
                self.did(f"start {node.name}")
                self._begin(node)

        self._over_in(after_s, start)

    def _over_in(self, after_s: float, end: Callable[[], None]) -> None:
        """A trouble that ends by itself."""
        self.troubles += 1

        def over() -> None:
            self.troubles -= 1
            end()

        self.loop.later(after_s, over)

    def stop(self, name: str, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s`."""
        process = self._process(name)
        if process is None or process.stopped:
            return
        self.did(f"stop {name} for {for_s:.3f}")
        process.stop()

        def go_on() -> None:
            if process.alive:
                self.did(f"continue {name}")
                process.go_on()

        self._over_in(for_s, go_on)

    def cut(self, one: str, other: str, for_s: float) -> None:
        """A partition between two processes; `other` may be the store."""
        self.did(f"cut {one} {other} for {for_s:.3f}")
        link = self.nodes[one].link if other == "store" else None
        if link is not None:
            link.cut = True
        else:
            self.net.cut(one, other)

        def mend() -> None:
            self.did(f"mend {one} {other}")
            if link is not None:
                link.cut = False
            else:
                self.net.mend(one, other)

        self._over_in(for_s, mend)

    def reset(self, one: str, other: str) -> None:
        """Connections between the two break."""
        self.did(f"reset {one} {other}")
        self.net.reset(one, other)

    def store_away(self, for_s: float, *, empty: bool = False, saved: Saved | None = None) -> None:
        """The store is gone for a while, and may come back empty, or with what it had saved."""
        self.did(f"store away for {for_s:.3f}{', then empty' if empty else ', then as it was' if saved else ''}")
        self.redis.away = True

        def back() -> None:
            self.did("store back")
            self.redis.away = False
            if empty:
                self.redis.empty()
            if saved is not None:
                self.redis.come_back_with(saved)

        self._over_in(for_s, back)

    def drain(self, name: str, **options: Any) -> None:
        """As by SIGTERM."""
        node = self.nodes[name]
        if node.parts is not None and node.process.runs and node.up:
            self.did(f"drain {name}")
            node.up = False
            node.process.soon(node.parts.lifecycle.drain)

    def _process(self, name: str) -> Process | None:
        if not name.endswith(".e"):
            return self.nodes[name].process
        parts = self.nodes[name[:-2]].parts
        engine = parts.supervisor.engine if parts is not None else None
        return engine.process if engine is not None else None

    def quiescent(self) -> None:
        """Nothing is ready: what went wrong is raised, what must hold is checked."""
        for fault in self.loop.faults:
            raise Fault(f"a process says: {fault!r}") from (fault if isinstance(fault, BaseException) else None)
        self.checks.look()

    def too_long(self) -> None:
        """Nobody comes to an end."""
        self.loop.faults.append(f"it goes on and on\n{self.loop.tasks()}")

    # Using it.

    def ask(self, ask: Ask) -> Client:
        """A client begins now."""
        client = Client(self, ask, len(self.clients) + 1)
        self.clients.append(client)
        client.start()
        return client

    async def answered(self) -> None:
        """Every client has come to its end, and what it heard is right."""
        while not all(client.ended for client in self.clients):
            await asyncio.sleep(0.05)
        for client in self.clients:
            client.check()

    async def settled(self, within_s: float = 40.0) -> None:
        """Nothing is left of anything. Raises Fault."""
        while self.troubles or not all(node.up or not node.process.alive for node in self.nodes.values()):
            await asyncio.sleep(0.25)
        until = self.loop.now + within_s
        while leaks := self.checks.leaks():
            if self.loop.now > until:
                raise Fault(f"left behind: {'; '.join(leaks)}")
            await asyncio.sleep(0.5)

    # Looking at it.

    @property
    def artefact(self) -> str:
        """The one that is served."""
        return self._assets.manifest.artefact_hash

    def of(self, role: str) -> list[Node]:
        """Processes of a role, by name."""
        return [node for node in self.nodes.values() if node.role == role]

    def living(self, role: str) -> list[Any]:
        """Parts of those that run."""
        return [node.parts for node in self.of(role) if node.process.alive and node.parts is not None]

    async def ready(self) -> None:
        """Return once every process that is alive takes work."""
        while not all(node.up or not node.process.alive for node in self.nodes.values()):
            await asyncio.sleep(0.05)
        while not all(self._sees_workers(gateway) for gateway in self.living("gateway")):
            await asyncio.sleep(0.05)

    def _sees_workers(self, gateway: GatewayParts) -> bool:
        living = len([node for node in self.of("worker") if node.process.alive])
        return any(version.ready_replicas >= living for version in gateway.core.catalog.versions())


class Fault(AssertionError):
    """Something in the world is not as it must be."""


class _Left(Exception):
    """Ends the task group of a process that has drained."""


class _Counting:
    """Observer of a door: counts admissions and looks away otherwise."""

    def __init__(self, world: World) -> None:
        self._world = world

    def admitted(self, execution: Execution, *, adopted: bool) -> None:
        self._world.admissions += not adopted

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class SimWorker(Worker):
    """May be of an older version that has fewer features."""

    features: frozenset[str] | None = None

    def _describe(self, ready: Any) -> Any:
        served = super()._describe(ready)
        if self.features is None:
            return served
        return type(served)(**{name: getattr(served, name) for name in served.__slots__} | {"features": self.features})


@dataclass(frozen=True)
class WorkerParts:
    """Of one worker's life."""

    door: Door
    worker: Worker
    supervisor: SimSupervisor
    drain: Drain
    lifecycle: Lifecycle
    server: SimServer


@dataclass(frozen=True)
class RouterParts:
    """Of one router's life."""

    core: router_app.Core
    lifecycle: Lifecycle
    server: SimServer


@dataclass(frozen=True)
class GatewayParts:
    """Of one gateway's life."""

    core: gateway_app.Core
    lifecycle: Lifecycle
    server: SimServer
    internal: SimServer
    store: SimStore


def gateway_tasks(core: Any, lag: LoopLag, routers: Peers, gateways: Peers) -> list[Callable[[], Any]]:
    """What a gateway keeps running."""
    return [lag.run, routers.run, gateways.run, core.catalog.run, core.generations.run, core.journals.run,
            core.sweeper.run]  # fmt: skip


def run(seed: int, plan: Plan, story: Callable[[World], Coroutine[Any, Any, None]], most_s: float = 300.0) -> World:
    """Make a world, let `story` happen to it, and leave it. Raises what went wrong."""
    world = World(seed, plan)
    loop = world.loop
    errors = _Errors(loop.faults)
    logger = logging.getLogger()
    logger.addHandler(errors)
    logging.disable(logging.WARNING)
    collecting = gc.isenabled()
    gc.disable()
    try:
        world.build()
        loop.quiescent = world.quiescent
        loop.later(most_s, world.too_long)
        loop.run_until_complete(story(world))
        world.quiescent()
        return world
    finally:
        logger.removeHandler(errors)
        _leave(world)
        logging.disable(logging.NOTSET)
        if collecting:
            gc.enable()


def _leave(world: World) -> None:
    """Every task, those of killed processes too, comes to its end by cancellation; what they then do counts no more."""
    loop = world.loop
    loop.quiescent = _nothing
    world.log = _nothing  # type: ignore[method-assign]
    world.net._log = _nothing
    logging.disable(logging.CRITICAL)
    loop.revive()
    for _ in range(5):
        tasks = asyncio.all_tasks(loop)
        if not tasks:
            break
        for task in tasks:
            task.cancel()
        try:
            loop.run_until_complete(asyncio.wait(tasks, timeout=30.0))
        except Deadlock:
            break
    loop.ready.clear()
    loop.close()
