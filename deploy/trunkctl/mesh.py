"""`trunkctl mesh up|down|status|roll`: a whole mesh on this machine, and its first answer.

`up` leaves a plan to a supervisor process and waits until every process takes work. In the foreground it then stays,
and its end ends the mesh. Where a mesh already lives, `up` only asks it something.
"""

import argparse
import subprocess
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from shared.clock import SystemClock
from trunkctl import roll
from trunkctl.client import local_plan
from trunkctl.failure import START_ONE, CommandError
from trunkctl.first_answer import addresses, ask
from trunkctl.home import Home, find_home, write_private
from trunkctl.keys import ensure_dev_key
from trunkctl.locked import locked
from trunkctl.options import Subparsers, port, positive, seconds
from trunkctl.plan import Plan, Spec, Wish, make_plan
from trunkctl.processes import Process, alive, read_table
from trunkctl.processes import supervisor as supervisor_of
from trunkctl.start import is_ready, start_supervisor, wait_ready
from trunkctl.stop import end_mesh
from trunkctl.tables import show_table

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_PROMPT = "What is the capital of France?"


def add_parser(subparsers: Subparsers) -> None:
    """Adds `mesh`."""
    parser = subparsers.add_parser("mesh", help="run a mesh on this machine")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    commands.add_parser("down", help="end the mesh that `up` started").set_defaults(run=run_down)
    roll.add_parser(commands)
    status = commands.add_parser("status", help="show its processes; exit code 1 unless all of them take work")
    status.set_defaults(run=run_status)


def _add_up(commands: Subparsers) -> None:
    up = commands.add_parser(
        "up",
        help="start a mesh, wait until it is ready, stream a first answer",
        description="Starts a mesh on loopback, waits until it is ready, streams a first answer and draws where its "
        "time went. Stays in the foreground, where Ctrl-C ends the mesh, unless --detach is given.",
    )
    up.add_argument("--workers", type=positive, default=1, metavar="N", help="worker processes (%(default)s)")
    up.add_argument("--routers", type=positive, default=1, metavar="N", help="router processes (%(default)s)")
    up.add_argument("--gateways", type=positive, default=1, metavar="N", help="gateway processes (%(default)s)")
    up.add_argument("--detach", action="store_true", help="return when the mesh is ready and leave it running")
    up.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME|DIR", help="converted model (%(default)s)")
    up.add_argument("--http-port", type=port, default=8000, metavar="PORT", help="first gateway (%(default)s)")
    up.add_argument("--grpc-port", type=port, default=50051, metavar="PORT", help="first gateway (%(default)s)")
    up.add_argument("--redis-url", metavar="URL", help="state store to use (an embedded one)")
    up.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="seconds to get ready (%(default)g)")
    up.add_argument("--prompt", default=DEFAULT_PROMPT, help="first prompt (%(default)s)")
    up.set_defaults(run=run_up)


def run_up(args: argparse.Namespace) -> int:
    """Starts a mesh or finds one, and asks it something."""
    home, console = find_home(args.home), Console(highlight=False)
    with locked(home):
        running = _running(home)
        plan = running or make_plan(home, _wish(args))
        supervisor = None if running else _start(home, plan, args, console)
    if running:
        console.print(f"A mesh is up already: {_count(running)}.")
    if supervisor and not args.detach:
        return _stay(home, plan, supervisor, args, console)
    _show(home, plan, args, console)
    return 0


def run_down(args: argparse.Namespace) -> int:
    """Ends the mesh."""
    home, console = find_home(args.home), Console(highlight=False)
    with locked(home):
        ended = end_mesh(home, SystemClock())
    console.print(f"Ended {', '.join(process.name for process in ended)}." if ended else "No mesh is up.")
    return 0


def run_status(args: argparse.Namespace) -> int:
    """One line per process."""
    home, console = find_home(args.home), Console(highlight=False)
    plan = _running(home)
    if plan is None:
        console.print(f"No mesh is up; {START_ONE}.")
        return 1
    specs = {spec.name: spec for spec in plan.specs}
    states = [(process, _state(process, specs.get(process.name))) for process in read_table(home.processes)]
    show_table(_table(states))
    return 0 if all(state == "ready" for _, state in states) else 1


def _start(home: Home, plan: Plan, args: argparse.Namespace, console: Console) -> "subprocess.Popen[bytes]":
    """Starts a mesh and waits for it; what was started of one that failed to get ready is ended again."""
    ensure_dev_key(home)
    write_private(home.plan, msgspec.json.encode(plan))
    supervisor = start_supervisor(home, attached=not args.detach)
    try:
        wait_ready(home, plan, supervisor, SystemClock(), args.timeout, console)
    except BaseException:
        supervisor.terminate()
        end_mesh(home, SystemClock())
        raise
    return supervisor


def _stay(
    home: Home, plan: Plan, supervisor: "subprocess.Popen[bytes]", args: argparse.Namespace, console: Console
) -> int:
    try:
        _show(home, plan, args, console)
        console.print("\nCtrl-C ends the mesh.")
        code = supervisor.wait()
        raise CommandError(f"the supervisor ended with code {code}; its log is in {home.logs}")
    except KeyboardInterrupt:
        console.print("Ending the mesh.")
        return 0
    finally:
        end_mesh(home, SystemClock())


def _show(home: Home, plan: Plan, args: argparse.Namespace, console: Console) -> None:
    ask(home, plan, args.prompt, SystemClock(), console)
    addresses(home, plan, console)


def _running(home: Home) -> Plan | None:
    return local_plan(home) if supervisor_of(read_table(home.processes)) else None


def _wish(args: argparse.Namespace) -> Wish:
    return Wish(
        model=args.model,
        workers=args.workers,
        routers=args.routers,
        gateways=args.gateways,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        redis_url=args.redis_url,
    )


def _count(plan: Plan) -> str:
    counts = Counter(spec.role for spec in plan.specs)
    return ", ".join(f"{count} {role}{'s' if count > 1 else ''}" for role, count in counts.items())


def _state(process: Process, spec: Spec | None) -> str:
    if not alive(process):
        return "restarting"
    return "ready" if spec is None or is_ready(spec) else "not ready"


def _table(states: Sequence[tuple[Process, str]]) -> Table:
    table = Table(box=None, header_style="dim")
    for name in ("name", "pid", "state", "restarts", "ports"):
        table.add_column(name)
    for process, state in states:
        ports = " ".join(f"{kind}:{port}" for kind, port in process.ports.items())
        style = "green" if state == "ready" else "yellow"
        table.add_row(process.name, str(process.pid), f"[{style}]{state}[/]", str(process.restarts), ports)
    return table
