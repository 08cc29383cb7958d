"""`trunkctl mesh roll`: every process of the mesh is started anew, one after the other, while the mesh serves.

Workers first, then routers, then gateways: what a newer process asks for, those behind it offer already. Each is told
to drain (SIGTERM), the supervisor starts it again, and the next one's turn comes a while after it takes work, when the
others have found it. The one rule: the roll stops at the first process that does not come back.
"""

import argparse
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console

from shared.clock import Clock, SystemClock
from trunkctl.client import local_plan
from trunkctl.failure import START_ONE, CommandError
from trunkctl.home import Home, find_home
from trunkctl.locked import locked
from trunkctl.logs import last_lines
from trunkctl.options import Subparsers, seconds
from trunkctl.plan import DRAIN_MS, Plan, Spec
from trunkctl.processes import Process, alive, kill_group, read_table, send, supervisor
from trunkctl.start import is_ready

ORDER = ("worker", "router", "gateway")
ALONE = {
    "worker": "what runs there finishes first; then requests wait up to 2 s for it and are refused (NO_REPLICA) after",
    "router": "running streams go on; new requests wait for it about 2 s and are refused (NO_REPLICA) after",
    "gateway": "running streams finish first; then nobody can connect until it is back",
}
POLL_S = 0.05
FORCE_S = 5.0  # from the second SIGTERM to SIGKILL


def add_parser(commands: Subparsers) -> None:
    """Adds `roll`."""
    roll = commands.add_parser(
        "roll",
        help="restart every process, one after the other, while the mesh serves",
        description="Restarts workers, routers and gateways one after the other: each is drained, started again with "
        f"its present configuration file, and ready before the next one's turn. With two of each role no request fails "
        f"that ends within a drain ({DRAIN_MS / 1000:g} s), if its client has both gateways' addresses and goes on to "
        "the other while one restarts; a client with one address gets UNAVAILABLE in that time. Of a role with one "
        "process, what is interrupted is said. The state store is not restarted.",
    )
    roll.add_argument("names", nargs="*", metavar="NAME", help="processes to restart, such as worker-1 (all)")
    roll.add_argument("--grace", type=seconds, default=30.0, metavar="S", help="for a drain, then forced (%(default)g)")
    roll.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="to get ready again (%(default)g)")
    roll.add_argument("--pause", type=seconds, default=2.0, metavar="S", help="ready before the next (%(default)g)")
    roll.set_defaults(run=run_roll)


def run_roll(args: argparse.Namespace) -> int:
    """Restarts them."""
    home, console = find_home(args.home), Console(highlight=False)
    with locked(home):
        plan = local_plan(home) if supervisor(read_table(home.processes)) else None
        if plan is None:
            raise CommandError(f"no mesh is up; {START_ONE}")
        chosen = choose(plan, args.names)
        for warning in warnings(plan, chosen):
            console.print(f"[yellow]![/] {warning}", soft_wrap=True)
        roll = Roll(home, SystemClock(), args.grace, args.timeout)
        for number, name in enumerate(chosen):
            if number:
                time.sleep(args.pause)
            took_s = roll.restart(name)
            console.print(f"[green]✓[/] {name:<10} {took_s:>6.1f} s", soft_wrap=True)
    return 0


def choose(plan: Plan, names: Sequence[str]) -> list[str]:
    """Names of what is to be restarted, in order. Raises CommandError for what is not there."""
    known = [spec.name for role in ORDER for spec in plan.specs if spec.role == role]
    for name in names:
        if name not in known:
            raise CommandError(f"there is no {name} to restart; there are {', '.join(known)}")
    return [name for name in known if not names or name in names]


def warnings(plan: Plan, chosen: Sequence[str]) -> list[str]:
    """What is interrupted, since there is one process of a role."""
    counts = Counter(spec.role for spec in plan.specs)
    roles = {spec.name: spec.role for spec in plan.specs}
    return [f"{name} is the only {roles[name]}: {ALONE[roles[name]]}" for name in chosen if counts[roles[name]] == 1]


class Roll:
    """Restarts processes of the mesh in this home directory."""

    def __init__(self, home: Home, clock: Clock, grace_s: float, ready_s: float) -> None:
        self._home = home
        self._clock = clock
        self._grace_s = grace_s
        self._ready_s = ready_s

    def restart(self, name: str) -> float:
        """Returns when its next life takes work; seconds it took. Raises CommandError."""
        began = self._clock.monotonic()
        old = self._process(name)
        self._end(old)
        if not self._within(self._ready_s, lambda: self._is_back(old)):
            raise CommandError(self._last_words(name))
        return self._clock.monotonic() - began

    def _end(self, old: Process) -> None:
        """Asks; asks again, which ends a drain; makes it."""
        for patience_s in (self._grace_s, FORCE_S):
            send(old, signal.SIGTERM)
            if self._within(patience_s, lambda: not alive(old)):
                return
        kill_group(old)

    def _is_back(self, old: Process) -> bool:
        now = self._process(old.name)
        if now.restarts > old.restarts and not alive(now):
            raise CommandError(self._last_words(old.name))
        return (now.pid, now.started) != (old.pid, old.started) and alive(now) and is_ready(self._spec(old.name))

    def _within(self, most_s: float, holds: Callable[[], bool]) -> bool:
        give_up = self._clock.monotonic() + most_s
        while not holds():
            if self._clock.monotonic() > give_up:
                return False
            time.sleep(POLL_S)
        return True

    def _process(self, name: str) -> Process:
        found = next((process for process in read_table(self._home.processes) if process.name == name), None)
        if found is None:
            raise CommandError("the mesh has ended")
        return found

    def _spec(self, name: str) -> Spec:
        """As it is planned now: its ports may have changed."""
        plan = local_plan(self._home)
        found = next((spec for spec in plan.specs if spec.name == name), None) if plan else None
        if found is None:
            raise CommandError("the mesh has ended")
        return found

    def _last_words(self, name: str) -> str:
        log = self._home.logs / f"{name}.log"
        said = last_lines(log, 1)
        return (
            f"{name} did not come back, the others are as they were: {said[0] if said else 'it said nothing'} ({log})"
        )
