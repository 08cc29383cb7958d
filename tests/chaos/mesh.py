"""A mesh whose processes reach one another through links that can fail, and whose every process can be struck.

Processes listen at 127.0.0.1 and advertise 127.0.0.2, where our links listen at the same ports; each process has a link
of its own to the store. The one rule: signal only what the mesh's process table names, or children of that.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console

from shared.clock import SYSTEM_CLOCK
from tests.chaos.proxy import Link
from tests.e2e.harness import Mesh
from trunkctl import processes
from trunkctl.home import Home, write_private
from trunkctl.keys import ensure_dev_key
from trunkctl.plan import LOOPBACK, Plan, Spec, Wish, make_plan
from trunkctl.start import is_ready, start_supervisor, wait_ready
from trunkctl.stop import end_mesh

SEEN_HOST = "127.0.0.2"
COUNTS = {"worker": 3, "router": 2, "gateway": 2}
REACHED = {"worker": ("grpc",), "router": ("grpc",), "gateway": ("grpc", "internal")}  # ports that others connect to
HEARTBEAT_S = 2.0  # to clients
KEY_TTL_S = 30  # of idempotency keys: who has seen the store come back empty refuses keys for so long
GATEWAY = {
    "limits": {"worker_losses": 5, "heartbeat_ms": round(HEARTBEAT_S * 1e3), "idempotency_ttl_s": KEY_TTL_S}
}  # fmt: skip
START_S = 180.0
FIRST_PORT = 24_000  # on: a port must be free while its process is dead, so other meshes here should not pick it


class ChaosMesh(Mesh):
    """Use as `async with`."""

    def __init__(self, home: Path, plan: Plan, supervisor: subprocess.Popen[bytes]) -> None:
        super().__init__(home)
        self.plan = plan
        self.links = {link.name: link for link in _links(plan)}
        self._home = Home(home)
        self._supervisor = supervisor
        self._stopped: list[processes.Process] = []

    @classmethod
    def lay_out(cls, home: Path, model: str, worker: dict[str, Any]) -> ChaosMesh:
        """Plans a mesh and starts its supervisor; `worker` are further settings of the workers."""
        own = Home(home)
        first = FIRST_PORT + 50 * (os.getpid() % 100)
        wish = Wish(
            model=model, workers=COUNTS["worker"], routers=COUNTS["router"], gateways=COUNTS["gateway"],
            http_port=first, grpc_port=first + 1, redis_url=None,
        )  # fmt: skip
        plan = make_plan(own, wish, first + 2)
        _rewrite(own, plan, {"worker": worker, "gateway": GATEWAY})
        ensure_dev_key(own)
        write_private(own.plan, msgspec.json.encode(plan))
        return cls(home, plan, start_supervisor(own, attached=True))

    async def __aenter__(self) -> ChaosMesh:
        try:
            for link in self.links.values():
                await link.start()
            console = Console(quiet=True)
            await asyncio.to_thread(wait_ready, self._home, self.plan, self._supervisor, SYSTEM_CLOCK, START_S, console)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def _end(self) -> None:
        for process in self._stopped:
            processes.send(process, signal.SIGCONT)
        for link in self.links.values():
            await link.turn("whole")
        await asyncio.to_thread(end_mesh, self._home, SYSTEM_CLOCK)
        await asyncio.to_thread(self._supervisor.wait, 30)
        for link in self.links.values():
            await link.close()

    def public_addresses(self) -> dict[str, str]:
        """Where clients find each gateway: behind its link."""
        return {g.name: f"{SEEN_HOST}:{g.ports['grpc']}" for g in self.plan.specs if g.role == "gateway"}

    def strike(self, name: str, number: signal.Signals) -> processes.Process | None:
        """Signal one process, `worker-1/engine` being a child of worker-1; who was struck, if it lives."""
        found = self._identity(name)
        if found is not None:
            if number is signal.SIGSTOP:
                self._stopped.append(found)
            processes.send(found, number)
        return found

    def go_on(self, process: processes.Process) -> None:
        """End its stop."""
        processes.send(process, signal.SIGCONT)
        self._stopped.remove(process)

    async def empty_store(self) -> None:
        """Kill the store and lose its data before it is started again."""
        found = self.strike("redis", signal.SIGKILL)
        while found is not None and processes.alive(found):  # noqa: ASYNC110 - the kernel's
            await asyncio.sleep(0.005)
        shutil.rmtree(self._home.run / "redis" / "appendonlydir")

    async def recovered(self, timeout_s: float) -> bool:
        """Whether every process takes work within this time."""
        try:
            async with asyncio.timeout(timeout_s):
                waiting = list(self.plan.specs)
                while waiting:
                    waiting = [spec for spec in waiting if not await asyncio.to_thread(self._is_up, spec)]
                    await asyncio.sleep(0.2)
        except TimeoutError:
            return False
        return True

    def _is_up(self, spec: Spec) -> bool:
        found = self._identity(spec.name)
        return found is not None and processes.alive(found) and is_ready(spec)

    def _identity(self, name: str) -> processes.Process | None:
        name, _, part = name.partition("/")
        (row,) = [row for row in processes.read_table(self._home.processes) if row.name == name]
        if not part:
            return row
        child = next(iter(_children(row.pid)), None)
        started = processes.start_time(child) if child is not None else None
        if child is None or started is None:
            return None
        return processes.Process(name=f"{name}/{part}", role=part, pid=child, started=started)


def _links(plan: Plan) -> list[Link]:
    (store,) = [spec.ports["redis"] for spec in plan.specs if spec.role == "redis"]
    made = []
    for number, spec in enumerate(spec for spec in plan.specs if spec.role != "redis"):
        for port in REACHED[spec.role]:
            at = spec.ports[port]
            name = spec.name if port == "grpc" else f"{spec.name}.{port}"
            made.append(Link(name, (SEEN_HOST, at), (LOOPBACK, at)))
        made.append(Link(f"{spec.name}>store", (_store_host(number), store), (LOOPBACK, store)))
    return made


def _store_host(number: int) -> str:
    return f"127.0.1.{number + 1}"


def _rewrite(home: Home, plan: Plan, more: dict[str, dict[str, Any]]) -> None:
    """Puts the links between the processes, and the settings of this run into their files."""
    (store,) = [spec.ports["redis"] for spec in plan.specs if spec.role == "redis"]
    for number, spec in enumerate(spec for spec in plan.specs if spec.role != "redis"):
        path = home.run / f"{spec.name}.yaml"
        config = yaml.safe_load(path.read_text())
        config |= {"advertise": SEEN_HOST, "redis_url": f"redis://{_store_host(number)}:{store}/0"}
        for key, value in more.get(spec.role, {}).items():
            config[key] = {**config.get(key, {}), **value}
        path.write_text(yaml.safe_dump(config, sort_keys=False))


def _children(pid: int) -> list[int]:
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir())
        return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        return []
