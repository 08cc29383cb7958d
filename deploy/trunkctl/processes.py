"""The process table: which processes make up the mesh, and whether each of them still lives.

A process is its pid and its start time together, so that a pid which the kernel has given to somebody else is never
taken for ours, and never signalled.
"""

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trunkctl.home import write_private

SUPERVISOR = "supervisor"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the mesh, as `processes.json` holds it."""

    name: str
    role: str
    pid: int
    ports: dict[str, int] = {}
    started: int  # kernel clock ticks after boot, the other half of the identity
    restarts: int = 0


def read_table(path: Path) -> list[Process]:
    """The recorded processes, the supervisor first; empty where no mesh was started."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Process])
    except (FileNotFoundError, msgspec.DecodeError):
        return []


def write_table(path: Path, processes: Iterable[Process]) -> None:
    """Replaces the table as a whole, so that a reader never sees half of it."""
    write_private(path, msgspec.json.format(msgspec.json.encode(list(processes)), indent=2))


def start_time(pid: int) -> int | None:
    """When the process started, in clock ticks after boot; None where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else int(rest[18])


def alive(process: Process) -> bool:
    """Whether this very process still runs."""
    return start_time(process.pid) == process.started


def supervisor(processes: Sequence[Process]) -> Process | None:
    """The living supervisor, if there is one: where it lives, a mesh lives."""
    return next((process for process in processes if process.role == SUPERVISOR and alive(process)), None)


def send(process: Process, number: signal.Signals) -> None:
    """Signals the process if it is still the one that was recorded."""
    if alive(process):
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill_group(process: Process) -> None:
    """Kills the process with everything it started; each of ours leads a group of its own."""
    if alive(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
