"""Ending a mesh: exactly the processes in its table, first by asking, then by force."""

import signal
import time
from collections.abc import Iterable

from shared.clock import Clock
from trunkctl.home import Home
from trunkctl.processes import Process, alive, kill_group, read_table, send, supervisor
from trunkctl.supervisor import GRACE_S, STOP_ORDER

POLL_S = 0.05
ORDERLY_S = GRACE_S * len(STOP_ORDER) + 5.0  # what the supervisor may need for an end in order


def end_mesh(home: Home, clock: Clock) -> list[Process]:
    """Ends what still lives of the mesh and returns it; its table and plan are gone afterwards. Idempotent."""
    living = [process for process in read_table(home.processes) if alive(process)]
    if leader := supervisor(living):
        send(leader, signal.SIGTERM)
        _wait_for_end(living, clock, ORDERLY_S)
    for process in living:
        send(process, signal.SIGTERM)
    _wait_for_end(living, clock, GRACE_S)
    for process in living:
        kill_group(process)
    home.processes.unlink(missing_ok=True)
    home.plan.unlink(missing_ok=True)
    return living


def _wait_for_end(processes: Iterable[Process], clock: Clock, timeout_s: float) -> None:
    give_up = clock.monotonic() + timeout_s
    while any(alive(process) for process in processes) and clock.monotonic() < give_up:
        time.sleep(POLL_S)
