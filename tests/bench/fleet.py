"""A mesh of real processes around the latency-model engine, to be measured: its processes' CPU time, memory and start.

The one rule: it signals only processes that it started itself.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.auth import KeyLimits
from shared.ids import SYSTEM_RNG
from shared.ports import PortTaken, listen
from tests.bench import language
from tests.fakes.artefact import write_artefact
from trunkctl.home import Home, write_private
from trunkctl.keys import SCOPES, add_key, make_key
from trunkctl.plan import LOOPBACK, Plan, Spec, Wish, make_plan
from trunkctl.processes import start_time
from trunkctl.start import is_ready

MODEL = "latency-model"
CONTEXT = 131_072
START_S = 30.0
END_S = 15.0
TRIES = 3
MOST = 1_000_000_000
FREE = KeyLimits(rpm=MOST, tpm=MOST, concurrency=1_000_000)
_TICKS = os.sysconf("SC_CLK_TCK")
_FIRST_PUBLIC_PORT = 20_000  # below those that plans give out

Settings = Mapping[str, Mapping[str, Any]]
"""Per role: what differs from the defaults."""

WIDE: Settings = {
    "gateway": {"limits": {"in_flight": 20_000}, "tracing": {"redis_spans": False}},
    "router": {"queue": {"capacity": 4096, "per_tenant_share": 1.0}, "tracing": {"redis_spans": False}},
    "worker": {"door": {"max_requests": 4096}, "tracing": {"redis_spans": False}},
}


@dataclass(frozen=True)
class Counts:
    """Processes of each role; workers and gateways may be none."""

    workers: int = 1
    routers: int = 1
    gateways: int = 1


class Fleet:
    """A running mesh; see `running`. `started_s` are seconds from a process's start until it took work."""

    def __init__(self, home: Home, plan: Plan, key: str, start_s: float = START_S) -> None:
        self.home = home
        self.plan = plan
        self.key = key
        self._start_s = start_s
        self.started_s: dict[str, float] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts every process, each once those before it take work."""
        self.home.logs.mkdir(parents=True, exist_ok=True)
        for spec in self.plan.specs:
            self.start_one(spec)

    def start_one(self, spec: Spec) -> None:
        """Starts one process and waits until it takes work."""
        began = time.monotonic()
        log = self.home.logs / f"{spec.name}.log"
        environment = {"GRPC_VERBOSITY": "ERROR", **os.environ}
        with log.open("ab") as output:
            child = subprocess.Popen(spec.argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        self._children[spec.name] = child
        while not is_ready(spec):
            assert child.poll() is None, f"{spec.name} ended:\n{log.read_text()[-2000:]}"
            assert time.monotonic() - began < self._start_s, f"{spec.name} is not ready:\n{log.read_text()[-2000:]}"
            time.sleep(0.01)
        self.started_s[spec.name] = time.monotonic() - began

    def stop(self) -> None:
        """Ends every process, those that take requests first."""
        for spec in reversed(self.plan.specs):
            self._end(spec.name)

    def restarted_s(self, name: str) -> float:
        """Ends a process and starts it again: seconds from its start until it took work."""
        self._end(name)
        self.start_one(next(spec for spec in self.plan.specs if spec.name == name))
        return self.started_s[name]

    def _end(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is None:
            return
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def specs(self, role: str) -> list[Spec]:
        """The processes of a role."""
        return [spec for spec in self.plan.specs if spec.role == role]

    @property
    def grpc(self) -> list[str]:
        """Where the gateways speak gRPC."""
        return [f"{LOOPBACK}:{spec.ports['grpc']}" for spec in self.specs("gateway")]

    @property
    def http(self) -> list[str]:
        """Where the gateways speak HTTP."""
        return [f"http://{LOOPBACK}:{spec.ports['http']}" for spec in self.specs("gateway")]

    def pid(self, name: str) -> int:
        """Of a process; `NAME/engine` is the engine behind a door."""
        name, _, part = name.partition("/")
        pid = self._children[name].pid
        return _children(pid)[0] if part else pid

    def cpu_s(self, name: str) -> float:
        """Seconds of CPU time that a process has used, all its threads together (in ticks of 10 ms)."""
        _, _, rest = Path(f"/proc/{self.pid(name)}/stat").read_text().rpartition(")")
        fields = rest.split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def rss_mib(self, name: str) -> float:
        """Resident memory of a process."""
        return resident_mib(self.pid(name))


@contextmanager
def running(
    root: Path,
    counts: Counts = Counts(),
    *,
    engine: Mapping[str, Any],
    flags: Mapping[str, float],
    settings: Settings = WIDE,
    limits: KeyLimits = FREE,
) -> Iterator[Fleet]:
    """A mesh in `root` whose engines take `engine` settings and the latency model's `flags`; ended at the end."""
    write_artefact(
        Home(root).models / MODEL,
        vocab_size=language.VOCAB,
        max_context=CONTEXT,
        eos=language.VOCAB - 1,
        tokenizer=language.tokenizer_json(),
    )
    latency_model = {"module": "tests.fakes.engine", "flags": dict(flags), "kv_memory_fraction": 0.1, **engine}
    with serving(root, MODEL, counts, engine=latency_model, settings=settings, limits=limits) as fleet:
        yield fleet


@contextmanager
def serving(
    root: Path,
    model: str,
    counts: Counts = Counts(),
    *,
    engine: Mapping[str, Any],
    settings: Settings = WIDE,
    limits: KeyLimits = FREE,
    start_s: float = START_S,
) -> Iterator[Fleet]:
    """A mesh in `root` that serves `model`, a name under its models or a path; ended at the end.

    `engine` is what differs from the settings that a mesh on this machine has; `start_s` is what one process may take.
    """
    home = Home(root)
    key, secret = make_key(SYSTEM_RNG, tenant="bench", scopes=SCOPES, models=["*"], limits=limits, expires_at=None)
    add_key(home, key)
    write_private(home.dev_key, secret.encode())
    worker = {**settings.get("worker", {}), "engine": engine}
    fleet = _started(home, model, counts, {**settings, "worker": worker}, secret, start_s)
    try:
        yield fleet
    finally:
        fleet.stop()


def _started(home: Home, model: str, counts: Counts, settings: Settings, secret: str, start_s: float) -> Fleet:
    """Plans and starts; again where somebody else has taken a port between the two."""
    for tries_left in reversed(range(TRIES)):
        http, grpc = free_ports(2)
        wish = Wish(model, max(1, counts.workers), counts.routers, counts.gateways, http, grpc, None)
        plan = _plan(home, counts, wish)
        _rewrite(home, plan, settings)
        write_private(home.plan, msgspec.json.encode(plan))
        fleet = Fleet(home, plan, secret, start_s)
        try:
            fleet.start()
        except BaseException as exc:
            fleet.stop()
            if not tries_left or "is taken by" not in str(exc):
                raise
        else:
            return fleet
    raise AssertionError("a last try ends one way or the other")


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, and that no plan gives out."""
    found: list[int] = []
    with ExitStack() as held:
        for port in range(_FIRST_PUBLIC_PORT + os.getpid() % 400, _FIRST_PUBLIC_PORT + 1000):
            with suppress(PortTaken):
                held.enter_context(closing(listen(f"{LOOPBACK}:{port}")))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free port")


def _plan(home: Home, counts: Counts, wish: Wish) -> Plan:
    """A plan for `wish`, without the roles that count none."""
    plan = make_plan(home, wish)
    absent = {role for role, count in {"worker": counts.workers, "gateway": counts.gateways}.items() if not count}
    return msgspec.structs.replace(plan, specs=[spec for spec in plan.specs if spec.role not in absent])


def _rewrite(home: Home, plan: Plan, settings: Settings) -> None:
    for spec in plan.specs:
        if spec.role not in settings:
            continue
        path = home.run / f"{spec.name}.yaml"
        config = yaml.safe_load(path.read_text())
        for name, value in settings[spec.role].items():
            merged = {**config[name], **value} if isinstance(value, Mapping) and name in config else value
            config[name] = dict(merged) if isinstance(merged, Mapping) else merged
        path.write_text(yaml.safe_dump(config, sort_keys=False))


def _children(pid: int) -> list[int]:
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir())
    found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [child for child in found if start_time(child) is not None]
