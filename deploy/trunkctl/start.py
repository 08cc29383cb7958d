"""Starting a mesh: the supervisor as a process of its own, and the wait until everything in its plan takes work."""

import functools
import http.client
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from urllib.parse import urlsplit

from rich.console import Console

from shared.clock import Clock
from trunkctl.failure import CommandError
from trunkctl.home import Home
from trunkctl.logs import last_lines, open_log
from trunkctl.plan import LOOPBACK, Plan, Spec
from trunkctl.processes import Process, alive, read_table
from trunkctl.supervisor import end_with_parent

POLL_S = 0.1
PROBE_TIMEOUT_S = 1.0
SUPERVISOR_LOG = "supervisor.log"


def start_supervisor(home: Home, *, attached: bool) -> "subprocess.Popen[bytes]":
    """Starts the supervisor on the plan in the home directory; an attached one ends with this process."""
    home.processes.unlink(missing_ok=True)
    output = open_log(home.logs / SUPERVISOR_LOG)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "trunkctl.supervisor", str(home.root)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for the command in the terminal, which then ends the mesh in order
            preexec_fn=functools.partial(end_with_parent, os.getpid()) if attached else None,
        )
    finally:
        os.close(output)


def wait_ready(
    home: Home, plan: Plan, supervisor: "subprocess.Popen[bytes]", clock: Clock, timeout_s: float, console: Console
) -> None:
    """Returns when every process takes work. Raises CommandError with a process's last words if one dies first."""
    born = clock.monotonic()
    waiting = list(plan.specs)
    with console.status("starting") as status:
        while waiting:
            status.update(f"waiting for {', '.join(spec.name for spec in waiting)}")
            if supervisor.poll() is not None:
                raise CommandError(_last_words(home, "supervisor"))
            ready = _newly_ready(home, waiting)
            for spec in ready:
                took = f"{clock.monotonic() - born:.1f} s"
                console.print(f"[green]✓[/] {spec.name:<10} {took:>7}  [dim]{_ports(spec)}[/]", soft_wrap=True)
            waiting = [spec for spec in waiting if spec not in ready]
            if waiting and clock.monotonic() - born > timeout_s:
                names = ", ".join(spec.name for spec in waiting)
                raise CommandError(f"not ready after {timeout_s:g} s: {names}; the logs are in {home.logs}")
            time.sleep(POLL_S if waiting else 0)


def is_ready(spec: Spec) -> bool:
    """Whether the process takes work now."""
    try:
        return _answers(spec.ready) if spec.ready else _listens(next(iter(spec.ports.values())))
    except (OSError, http.client.HTTPException):
        return False


def _newly_ready(home: Home, waiting: list[Spec]) -> list[Spec]:
    table = {process.name: process for process in read_table(home.processes)}
    for spec in waiting:
        if (process := table.get(spec.name)) and _has_died(process):
            raise CommandError(_last_words(home, spec.name))
    return [spec for spec in waiting if spec.name in table and is_ready(spec)]


def _has_died(process: Process) -> bool:
    return process.restarts > 0 or not alive(process)


def _last_words(home: Home, name: str) -> str:
    log = home.logs / f"{name}.log"
    said = last_lines(log, 1)
    return f"{name} ended while starting: {said[0] if said else 'it said nothing'} ({log})"


def _ports(spec: Spec) -> str:
    return " ".join(f"{kind} {LOOPBACK}:{port}" for kind, port in spec.ports.items())


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=PROBE_TIMEOUT_S)) as connection:
        connection.request("GET", parts.path)
        return connection.getresponse().status == http.client.OK


def _listens(port: int) -> bool:
    with socket.create_connection((LOOPBACK, port), timeout=PROBE_TIMEOUT_S):
        return True
