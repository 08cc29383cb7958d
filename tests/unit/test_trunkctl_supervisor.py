"""The supervisor keeps real processes alive, and leaves none behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import yaml

from shared.clock import SystemClock
from shared.ports import listen
from trunkctl import supervisor as module
from trunkctl.failure import CommandError
from trunkctl.home import Home
from trunkctl.plan import Plan, Spec
from trunkctl.processes import SUPERVISOR, Process, alive, read_table, start_time
from trunkctl.roll import Roll, choose, warnings
from trunkctl.stop import end_mesh
from trunkctl.supervisor import Backoff, Supervisor

SLEEPS = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
SLOW_TO_END = """
import signal, sys, time

def end(*_):
    time.sleep(0.2)
    sys.exit()

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(60)
"""
LISTENS = """
import signal, socket, sys, time, yaml
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit())
config = yaml.safe_load(Path(sys.argv[1]).read_text())
if "fault" in config:
    sys.exit(config["fault"])
servers = [socket.create_server(("127.0.0.1", int(at.rpartition(":")[2]))) for at in config.values()]
time.sleep(60)
"""
LEAVES_A_CHILD = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "time.sleep(60)"
)


def spec(name: str, code: str, role: str = "worker") -> Spec:
    return Spec(name=name, role=role, argv=[sys.executable, "-c", code], ports={})


def plan(*specs: Spec) -> Plan:
    return Plan(specs=list(specs), model="m", redis_url="", http="", grpc="")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nobody sets an event for what other processes do
            await asyncio.sleep(0.01)


@asynccontextmanager
async def supervised(home: Home, *specs: Spec, grace_s: float = 5.0) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(home, plan(*specs), SystemClock(), grace_s=grace_s)
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.run())
        try:
            await until(lambda: len(read_table(home.processes)) == 1 + len(specs))
            yield supervisor
        finally:
            supervisor.stop()


def named(home: Home, name: str) -> Process:
    (process,) = [process for process in read_table(home.processes) if process.name == name]
    return process


def group_members(pid: int) -> list[int]:
    stats = (path.read_text() for path in Path("/proc").glob("[0-9]*/stat") if path.exists())
    fields = [(int(stat.split()[0]), stat.rpartition(")")[2].split()) for stat in stats]
    return [member for member, rest in fields if int(rest[2]) == pid and rest[0] not in "ZX"]


async def test_a_killed_process_is_started_again_under_the_same_name_and_counted(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with supervised(home, spec("a", SLEEPS), spec("b", SLEEPS)):
        first, other = named(home, "a"), named(home, "b")
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: named(home, "a").restarts == 1)
        assert named(home, "a").pid != first.pid
        assert named(home, "b") == other


async def test_what_a_dead_process_left_running_in_its_group_dies_before_the_next_start(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with supervised(home, spec("a", LEAVES_A_CHILD)):
        first = named(home, "a").pid
        await until(lambda: len(group_members(first)) == 2)
        os.kill(first, signal.SIGKILL)
        await until(lambda: named(home, "a").restarts == 1)
        assert group_members(first) == []


async def test_stopping_ends_every_process_even_a_deaf_one_and_removes_the_table(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with supervised(home, spec("a", SLEEPS, "gateway"), spec("b", STUBBORN), grace_s=0.2) as supervisor:
        await until(lambda: "deaf" in (home.logs / "b.log").read_text())
        started = read_table(home.processes)
        supervisor.stop()
        await until(lambda: not any(alive(process) for process in started if process.role != SUPERVISOR))
    assert not home.processes.exists()


async def test_gateways_end_before_the_workers_that_serve_them(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ends: dict[str, float] = {}
    async with supervised(home, spec("worker", SLOW_TO_END), spec("gateway", SLOW_TO_END, "gateway")) as supervisor:
        await until(lambda: all("up" in (home.logs / f"{name}.log").read_text() for name in ("worker", "gateway")))
        processes = read_table(home.processes)[1:]
        supervisor.stop()
        while len(ends) < len(processes):
            for process in processes:
                if not alive(process):
                    ends.setdefault(process.name, time.monotonic())
            await asyncio.sleep(0.01)
    assert ends["gateway"] < ends["worker"]


async def test_a_process_that_drained_is_started_again_at_once_and_does_not_count_as_crashed(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with supervised(home, spec("a", SLOW_TO_END)):
        await until(lambda: "up" in (home.logs / "a.log").read_text())
        await asyncio.sleep(module.SOUND_LIFE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            first = named(home, "a")
            os.kill(first.pid, number)
            await until(lambda first=first: named(home, "a").pid != first.pid)
            await asyncio.sleep(0.1)
            assert named(home, "a").restarts == (number is signal.SIGKILL)
            await asyncio.sleep(module.SOUND_LIFE_S)


async def test_a_process_that_ends_well_as_soon_as_it_begins_is_not_started_in_circles(tmp_path: Path) -> None:
    home = Home(tmp_path)
    async with supervised(home, spec("a", "pass")):
        await asyncio.sleep(0.8)
        assert named(home, "a").restarts in (1, 2)


def listening(home: Home, role: str) -> Spec:
    """A process that needs the ports of its role, which are free now."""
    kinds = ("grpc", "http") if role == "gateway" else ("grpc", "ops")
    sockets = [listen("127.0.0.1:0") for _ in kinds]
    ports = {kind: each.getsockname()[1] for kind, each in zip(kinds, sockets, strict=True)}
    for each in sockets:
        each.close()
    path = home.run / f"{role}-1.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({f"{kind}_listen": f"127.0.0.1:{port}" for kind, port in ports.items()}))
    return Spec(name=f"{role}-1", role=role, argv=[sys.executable, "-c", LISTENS, str(path)], ports=ports)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_port_that_was_stolen_is_exchanged_where_the_others_find_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
    home = Home(tmp_path)
    wanted = listening(home, "worker")
    with listen(f"127.0.0.1:{wanted.ports['grpc']}"):
        async with supervised(home, wanted):
            await until(lambda: named(home, "worker-1").ports != wanted.ports)
            now = named(home, "worker-1").ports
            assert (now["ops"], now["grpc"] != wanted.ports["grpc"]) == (wanted.ports["ops"], True)
            await until(lambda: answers(now["grpc"]) and answers(now["ops"]))
            (told,) = msgspec.json.decode(home.plan.read_bytes(), type=Plan).specs
            assert told.ports == now
            assert told.ready == f"http://127.0.0.1:{now['ops']}/ready"


async def test_a_port_that_clients_know_is_waited_for_and_its_thief_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(module, "LONGEST_DELAY_S", 0.1)
    home = Home(tmp_path)
    wanted = listening(home, "gateway")
    thief = listen(f"127.0.0.1:{wanted.ports['grpc']}")
    async with supervised(home, wanted):
        with thief:
            await until(lambda: "clients know this port" in caplog.text)
            assert f"port {wanted.ports['grpc']} is taken by process {os.getpid()}" in caplog.text
        await until(lambda: answers(wanted.ports["grpc"]))
        assert named(home, "gateway-1").ports == wanted.ports


async def test_a_roll_restarts_one_process_and_stops_where_one_does_not_come_back(tmp_path: Path) -> None:
    home = Home(tmp_path)
    one, other = listening(home, "worker"), listening(home, "router")
    home.plan.write_bytes(msgspec.json.encode(plan(one, other)))
    async with supervised(home, one, other):
        await until(lambda: all(answers(each.ports["grpc"]) for each in (one, other)))
        await asyncio.sleep(module.SOUND_LIFE_S)
        before = {name: named(home, name) for name in ("worker-1", "router-1")}
        roll = Roll(home, SystemClock(), grace_s=5.0, ready_s=10.0)
        await asyncio.to_thread(roll.restart, "worker-1")
        after = named(home, "worker-1")
        assert (after.pid != before["worker-1"].pid, after.restarts) == (True, 0)
        assert named(home, "router-1") == before["router-1"]
        (home.run / "router-1.yaml").write_text(yaml.safe_dump({"fault": "a setting is wrong"}))
        with pytest.raises(CommandError, match=r"router-1 did not come back.*a setting is wrong"):
            await asyncio.to_thread(roll.restart, "router-1")


def test_a_roll_goes_against_the_flow_of_requests_and_says_what_it_interrupts() -> None:
    own = plan(*(spec(f"{role}-{n}", "", role) for role in ("redis", "worker", "router", "gateway") for n in (1, 2)))
    assert choose(own, []) == ["worker-1", "worker-2", "router-1", "router-2", "gateway-1", "gateway-2"]
    assert choose(own, ["gateway-2", "worker-1"]) == ["worker-1", "gateway-2"]
    assert warnings(own, choose(own, [])) == []
    single = plan(spec("worker-1", "", "worker"), spec("router-1", "", "router"), spec("router-2", "", "router"))
    (warning,) = warnings(single, choose(single, []))
    assert warning.startswith("worker-1 is the only worker")
    with pytest.raises(CommandError, match="there is no redis to restart; there are worker-1"):
        choose(single, ["redis"])


def test_delays_double_up_to_a_bound_and_begin_anew_after_a_stable_life() -> None:
    backoff = Backoff()
    delays = [backoff.after(0.1) for _ in range(9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.after(31) == 0.5


def test_children_of_a_supervisor_that_was_killed_end_by_themselves_and_are_not_forgotten(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.run.mkdir()
    home.plan.write_bytes(msgspec.json.encode(plan(spec("a", SLEEPS), spec("b", STUBBORN))))
    supervisor = subprocess.Popen([sys.executable, "-m", "trunkctl.supervisor", str(tmp_path)], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while len(read_table(home.processes)) < 3 or "deaf" not in (home.logs / "b.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        obedient, deaf = named(home, "a"), named(home, "b")
    finally:
        supervisor.kill()
        supervisor.communicate()
    while alive(obedient):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert alive(deaf)
    os.kill(deaf.pid, signal.SIGKILL)
    assert end_mesh(home, SystemClock()) in ([], [deaf])
    assert not home.processes.exists()


def test_a_recycled_pid_is_never_signalled(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with subprocess.Popen([sys.executable, "-c", SLEEPS], start_new_session=True) as innocent:
        started = start_time(innocent.pid)
        assert started is not None
        stale = Process(name="worker-1", role="worker", pid=innocent.pid, started=started - 1)
        home.processes.write_bytes(msgspec.json.encode([stale]))
        assert end_mesh(home, SystemClock()) == []
        assert innocent.poll() is None
        innocent.kill()
