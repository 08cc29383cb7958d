"""`trunkctl mesh` from the outside: real supervisor, real store, stand-ins for the stages, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes.stage import ANSWER
from trunkctl.home import Home
from trunkctl.plan import Ports
from trunkctl.processes import Process, alive, read_table, supervisor

TRUNKCTL = Path(sys.executable).with_name("trunkctl")


class Place:
    """A working directory whose stage packages are stand-ins, and the mesh in it."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root / "home")
        self._root = root
        for role, package in (("gateway", "gateway"), ("router", "router"), ("worker", "workers")):
            (root / package).mkdir()
            (root / package / "__init__.py").touch()
            (root / package / "__main__.py").write_text(f"from tests.fakes.stage import main\nmain({role!r})\n")
        for model in ("m", "refuses"):
            (self.home.models / model).mkdir(parents=True)
            (self.home.models / model / "manifest.json").write_text("{}")
        with Ports() as ports:
            self.http, self.grpc = ports.free(), ports.free()

    def command(self, *args: str) -> list[str]:
        return [str(TRUNKCTL), "--home", str(self.home.root), "mesh", *args]

    def up(self, *args: str, model: str = "m") -> list[str]:
        ports = ("--http-port", str(self.http), "--grpc-port", str(self.grpc))
        return self.command("up", "--model", model, *ports, *args)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self._root, capture_output=True, text=True, timeout=40, check=False)

    def popen(self, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, cwd=self._root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def table(self) -> list[Process]:
        return read_table(self.home.processes)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    started = place.table()
    place.run(place.command("down"))
    assert not any(alive(process) for process in started)


def gone(processes: list[Process], within_s: float = 15.0) -> bool:
    give_up = time.monotonic() + within_s
    while any(alive(process) for process in processes):
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def running_with(text: str) -> list[str]:
    """Command lines of running processes that name `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_text())
    return [line for line in found if text in line]


def test_a_detached_mesh_answers_shows_its_waterfall_and_ends_on_down(place: Place) -> None:
    started = place.run(place.up("--detach", "--workers", "2"))
    assert started.returncode == 0, started.stderr
    for word in (ANSWER, "chat", "unattributed", f"http://127.0.0.1:{place.http}", f"127.0.0.1:{place.grpc}", "curl"):
        assert word in started.stdout
    table = place.table()
    assert [process.role for process in table] == ["supervisor", "redis", "worker", "worker", "router", "gateway"]
    assert table[-1].ports["http"] == place.http
    assert place.run(place.command("status")).returncode == 0

    again = place.run(place.up("--detach", "--workers", "5"))
    assert again.returncode == 0
    assert "2 workers" in again.stdout
    assert ANSWER in again.stdout
    assert place.table() == table, "a second up changed the mesh"

    assert place.run(place.command("down")).returncode == 0
    assert gone(table, 0)
    assert place.run(place.command("status")).returncode == 1
    assert not place.home.processes.exists()


def test_ctrl_c_in_the_foreground_ends_every_process(place: Place) -> None:
    with place.popen(place.up()) as shown:
        assert shown.stdout
        for line in shown.stdout:
            if "Ctrl-C" in line:
                break
        table = place.table()
        assert supervisor(table)
        os.kill(shown.pid, signal.SIGINT)
        assert shown.wait(20) == 0
    assert gone(table, 0)


def test_a_foreground_mesh_whose_command_is_killed_does_not_outlive_it(place: Place) -> None:
    with place.popen(place.up()) as shown:
        assert shown.stdout
        for line in shown.stdout:
            if "Ctrl-C" in line:
                break
        table = place.table()
        shown.kill()
        assert gone(table)


def test_a_stage_that_cannot_start_ends_the_start_with_its_own_words_and_leaves_nothing(place: Place) -> None:
    refused = place.run(place.up("--detach", model="refuses"))
    assert refused.returncode == 1
    assert "worker-1 ended while starting: not enough memory: 900 MiB are needed" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert place.table() == []
    assert not running_with(str(place.home.root))


def test_a_taken_port_ends_the_start_with_the_port_and_its_holder(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.grpc)):
        refused = place.run(place.up("--detach"))
    assert refused.returncode == 1
    assert str(place.grpc) in refused.stderr
    assert str(os.getpid()) in refused.stderr
    assert place.table() == []


def test_down_finds_a_mesh_whose_supervisor_was_killed(place: Place) -> None:
    assert place.run(place.up("--detach")).returncode == 0
    table = place.table()
    os.kill(table[0].pid, signal.SIGKILL)
    assert place.run(place.command("down")).returncode == 0
    assert gone(table, 0)
