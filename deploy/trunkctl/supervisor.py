"""The process that keeps a mesh alive: starts what the plan names, starts again what ends, ends it all on SIGTERM.

It alone writes the process table while the mesh lives, and the plan where a process had to take other ports. A process
that ended because it was asked to (it drained) is started again at once and not counted; one that died after a growing
pause. Each child leads a process group of its own and gets SIGTERM from the kernel should the supervisor vanish, so
nothing is left running for ever.
"""

import asyncio
import ctypes
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shared.clock import Clock, SystemClock
from trunkctl.home import Home, find_home, write_private
from trunkctl.logs import keep_bounded, open_log
from trunkctl.plan import LOOPBACK, SHAPES, Plan, Spec, moved, taken_ports
from trunkctl.processes import SUPERVISOR, Process, kill_group, send, start_time, write_table

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 30.0  # who lived this long is started again as if for the first time
GRACE_S = 10.0  # from SIGTERM to SIGKILL
STORE_WAIT_S = 5.0
SOUND_LIFE_S = 1.0  # who ends in order sooner than that is no drained process, but one that cannot live
TRIES = 3  # early deaths in a row, after which its ports are looked at
STOP_ORDER = ("gateway", "router", "worker", "redis")

log = logging.getLogger("trunkctl.supervisor")
_prctl = ctypes.CDLL(None).prctl
_PR_SET_PDEATHSIG = 1


class Backoff:
    """How long to wait before the next start: doubles with each early death, begins anew after a stable life."""

    def __init__(self) -> None:
        self._next = FIRST_DELAY_S

    def after(self, lived_s: float) -> float:
        """Seconds to wait once a process that lived this long has died."""
        if lived_s >= STABLE_AFTER_S:
            self._next = FIRST_DELAY_S
        delay, self._next = self._next, min(2 * self._next, LONGEST_DELAY_S)
        return delay


class Supervisor:
    """Runs one plan until it is told to stop."""

    def __init__(self, home: Home, plan: Plan, clock: Clock, *, grace_s: float = GRACE_S) -> None:
        self._home = home
        self._plan = plan
        self._clock = clock
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._processes: dict[str, Process] = {}

    async def run(self) -> None:
        """Returns when, after `stop`, every process has ended."""
        self._record(SUPERVISOR, SUPERVISOR, os.getpid(), {}, 0)
        async with asyncio.TaskGroup() as group:
            for spec in self._plan.specs:
                self._keepers[spec.name] = group.create_task(self._keep(spec))
                if spec.role == "redis":
                    await _listening(spec.ports["redis"])  # saves the services a round of retries
            await self._stopping.wait()
            await self._end_all()
        self._home.processes.unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends the mesh. Idempotent."""
        self._stopping.set()

    async def _keep(self, spec: Spec) -> None:
        backoff, restarts, early = Backoff(), 0, 0
        while not self._stopping.is_set():
            born = self._clock.monotonic()
            code = await self._live(spec, restarts)
            lived_s = self._clock.monotonic() - born
            if _was_asked(code) and lived_s >= SOUND_LIFE_S:
                log.info("%s ended as it was asked to", spec.name)
                early = 0
                continue
            restarts += 1
            log.info("%s ended with %s", spec.name, _ending(code))
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.after(lived_s)):
                    await self._stopping.wait()
            early = early + 1 if lived_s < STABLE_AFTER_S else 0
            if early >= TRIES:
                spec = self._on_free_ports(spec)

    def _on_free_ports(self, spec: Spec) -> Spec:
        """What keeps dying early may have lost a port to somebody else: it gets another, unless clients know that."""
        movable = SHAPES[spec.role].movable if spec.role in SHAPES else frozenset[str]()
        taken = taken_ports(spec)
        for kind in taken.keys() - movable:
            log.warning("%s cannot start: %s; clients know this port, so it is tried again", spec.name, taken[kind])
        lost = sorted(taken.keys() & movable)
        if not lost:
            return spec
        new = moved(self._home, self._plan, spec, lost)
        for kind in lost:
            log.warning("%s: %s; its %s port is %d from now on", spec.name, taken[kind], kind, new.ports[kind])
        specs = [new if each.name == new.name else each for each in self._plan.specs]
        self._plan = msgspec.structs.replace(self._plan, specs=specs)
        write_private(self._home.plan, msgspec.json.encode(self._plan))
        return new

    async def _live(self, spec: Spec, restarts: int) -> int:
        """One life of a process, until nothing of it is left. Returns how it ended."""
        path = self._home.logs / f"{spec.name}.log"
        output = open_log(path)
        try:
            child = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"GRPC_VERBOSITY": "ERROR", **os.environ},  # keep the transport's chatter out of the logs
                start_new_session=True,
                preexec_fn=functools.partial(end_with_parent, os.getpid()),
            )
        finally:
            os.close(output)
        self._record(spec.name, spec.role, child.pid, spec.ports, restarts)
        if self._stopping.is_set():  # the stop came while this process was being born
            child.terminate()
        async with asyncio.TaskGroup() as group:
            trimming = group.create_task(keep_bounded(path))
            code = await child.wait()
            trimming.cancel()
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what it started and left behind
        return code

    def _record(self, name: str, role: str, pid: int, ports: dict[str, int], restarts: int) -> None:
        started = start_time(pid) or 0
        self._processes[name] = Process(name=name, role=role, pid=pid, ports=ports, started=started, restarts=restarts)
        write_table(self._home.processes, self._processes.values())

    async def _end_all(self) -> None:
        """Role by role against the flow of requests, so that each stage can still finish what it holds."""
        for role in STOP_ORDER:
            names = [spec.name for spec in self._plan.specs if spec.role == role]
            keepers = [self._keepers[name] for name in names]
            if not keepers:
                continue
            self._end(names, lambda process: send(process, signal.SIGTERM))
            await asyncio.wait(keepers, timeout=self._grace_s)
            self._end(names, kill_group)
            await asyncio.wait(keepers)

    def _end(self, names: list[str], how: Callable[[Process], None]) -> None:
        for name in names:
            if name in self._processes:
                how(self._processes[name])


def end_with_parent(parent: int) -> None:
    """Runs in a new child: asks the kernel for SIGTERM when the parent dies, and ends if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


async def _listening(port: int) -> None:
    """Returns when the port takes connections, or after STORE_WAIT_S: the mesh serves without its store, too."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STORE_WAIT_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(LOOPBACK, port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return


def _was_asked(code: int) -> bool:
    """It drained, or it was told a second time and stopped at once."""
    return code in (0, -signal.SIGTERM)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


async def supervise(home: Home) -> None:
    """Runs the plan that lies in the home directory; SIGTERM and SIGINT end it."""
    supervisor = Supervisor(home, msgspec.json.decode(home.plan.read_bytes(), type=Plan), SystemClock())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    async with asyncio.TaskGroup() as group:
        trimming = group.create_task(keep_bounded(home.logs / "supervisor.log"))
        await supervisor.run()
        trimming.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(supervise(find_home(sys.argv[1])))
