"""Readiness and drain, ports and who has them, exit codes, the admin service, and the operation routes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest
from opentelemetry.trace import NoOpTracer

from shared import rpc
from shared.config import ConfigError
from shared.errors import StartError
from shared.ids import BUILD, Identity
from shared.lifecycle import AdminServicer, Lifecycle, PortTaken, bind, listen, run
from shared.ops_http import HttpServer, serve_ops
from shared.ports import _name, address_of
from shared.wire import PROTOCOL_TEXT
from tests.fakes.clock import FakeClock
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc

ME = Identity("router", "r0", 0xFF)
ROOT = Path(__file__).parent.parent.parent


@contextmanager
def python(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process, ended with the scope."""
    path = f"{ROOT}{os.pathsep}{ROOT / 'protos/gen/python'}"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


# --- readiness and drain ---


async def test_a_process_begins_not_ready_and_a_draining_one_never_gets_ready_again() -> None:
    life = Lifecycle(ME)
    assert (life.ready, life.draining, life.detail) == (False, False, "starting")
    life.set_ready(True, "degraded: the state store is away")
    assert (life.ready, life.detail) == (True, "degraded: the state store is away")
    life.drain(grace_ms=500)
    life.drain(grace_ms=900)
    assert (life.ready, life.draining, life.detail, life.grace_ms) == (False, True, "draining", 500)
    life.set_ready(True, "all is well")
    assert (life.ready, life.detail) == (False, "draining")


async def test_a_drain_turns_readiness_off_first_and_refuses_once_others_had_time_to_notice(clock: FakeClock) -> None:
    life = Lifecycle(ME, clock=clock, settle_s=0.5)
    clock.advance(10)
    life.set_ready(True)
    assert not life.refusing
    waiting = asyncio.create_task(life.settled())
    await asyncio.sleep(0)
    life.drain()
    await asyncio.sleep(0.01)
    assert (life.ready, life.serving(""), life.refusing, waiting.done()) == (False, False, False, False)
    clock.advance(0.4)
    assert not life.refusing
    clock.advance(0.1)
    assert life.refusing
    async with asyncio.timeout(2):
        await waiting


async def test_without_time_to_notice_a_drain_refuses_at_once() -> None:
    life = Lifecycle(ME)
    life.drain()
    assert life.refusing
    await life.settled()


async def test_everyone_who_waits_for_the_drain_wakes_also_if_it_had_begun() -> None:
    life = Lifecycle(ME)
    async with asyncio.timeout(2), asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(life.wait_drain())
        await asyncio.sleep(0)
        life.set_model("m", True)  # some other change
        await asyncio.sleep(0)
        life.drain()
    async with asyncio.timeout(2):
        await life.wait_drain()


async def test_a_change_between_reading_and_waiting_is_not_missed() -> None:
    life = Lifecycle(ME)
    seen = life.version
    life.set_ready(True)
    async with asyncio.timeout(1):
        await life.changed(seen)
    waiting = asyncio.create_task(life.changed(life.version))
    await asyncio.sleep(0.01)
    life.set_ready(True)  # nothing changed
    await asyncio.sleep(0.01)
    assert not waiting.done()
    life.set_ready(False)
    await waiting


async def test_a_model_is_healthy_only_in_a_ready_process() -> None:
    life = Lifecycle(ME, services=["a.B"])
    life.set_model("m", True)
    assert [life.serving(name) for name in ("", "a.B", "model/m", "m", "a.C", "model/x")] == [
        False, False, False, None, None, None,
    ]  # fmt: skip
    life.set_ready(True)
    assert [life.serving(name) for name in ("", "a.B", "model/m")] == [True] * 3
    life.set_model("m", None)
    assert life.serving("model/m") is None


SIGNALLED = """
import asyncio, signal, sys
from shared.ids import Identity
from shared.lifecycle import Lifecycle, run
async def main():
    life = Lifecycle(Identity("router", "r0", 1))
    life.install_signals(asyncio.get_running_loop())
    print("up", flush=True)
    await life.wait_drain()
    print("draining", flush=True)
    await asyncio.sleep({work})
    return 0
sys.exit(run(main))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_begins_the_drain_and_the_process_ends_when_its_work_does(number: signal.Signals) -> None:
    with python("-c", SIGNALLED.format(work=0.05)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.readline() == "draining\n"
        assert process.wait(5) == 0


def test_a_second_signal_ends_the_process_at_once() -> None:
    with python("-c", SIGNALLED.format(work=60)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == -signal.SIGTERM


# --- exit codes ---


@pytest.mark.parametrize(
    "error", [StartError("Too little memory."), ConfigError("g.yaml: no."), PortTaken("127.0.0.1:1", 7, "x")]
)
def test_a_process_that_cannot_start_says_why_in_one_line_and_exits_with_1(
    error: StartError, capfd: pytest.CaptureFixture[str]
) -> None:
    async def alone() -> None:
        raise error

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            group.create_task(alone())

    for main in (alone, in_a_group):
        assert run(main) == 1
        assert capfd.readouterr().err == f"{error}\n"


def test_exit_codes_are_passed_on_and_faults_of_the_program_are_not_hidden() -> None:
    async def none() -> None: ...

    async def three() -> int:
        return 3

    async def fault() -> None:
        raise RuntimeError("a bug")

    assert (run(none), run(three)) == (0, 3)
    with pytest.raises(RuntimeError, match="a bug"):
        run(fault)


# --- ports ---


@pytest.fixture(params=["127.0.0.1", "0.0.0.0", "::1"])
def taken(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(port, pid) of another process that listens, on one family and address or another."""
    listening = (
        "import socket, time\n"
        f"family = socket.{'AF_INET6' if ':' in request.param else 'AF_INET'}\n"
        f"s = socket.create_server(({request.param!r}, 0), family=family)\n"
        "print(s.getsockname()[1], flush=True)\n"
        "time.sleep(60)"
    )
    with python("-c", listening) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.skip(f"{request.param} is not there on this machine")
        yield int(line), process.pid


async def test_a_taken_port_is_named_with_the_process_that_has_it(
    taken: tuple[int, int], request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    port, pid = taken
    address = f"[::1]:{port}" if "::1" in request.node.name else f"127.0.0.1:{port}"
    server = rpc.make_server(tracer=NoOpTracer(), public=False)
    with pytest.raises(PortTaken) as caught:
        await bind(server, address)
    assert (caught.value.port, caught.value.pid) == (port, pid)
    assert re.fullmatch(
        rf"port {port} is taken by process {pid} \(python[\d.]*\): cannot listen on {re.escape(address)}",
        str(caught.value),
    )
    with pytest.raises(PortTaken):
        HttpServer(None, address)  # type: ignore[arg-type] # it gets no further than its socket
    assert capfd.readouterr().err == "", "grpc must not print its own page about it"


async def test_two_servers_never_share_a_port_silently() -> None:
    first, second = (rpc.make_server(tracer=NoOpTracer(), public=public) for public in (False, True))
    address = await bind(first, "127.0.0.1:0")
    await first.start()
    with pytest.raises(PortTaken) as caught:
        await bind(second, address)
    assert caught.value.pid == os.getpid()
    await first.stop(None)


async def test_a_port_is_free_again_right_after_its_server_stopped() -> None:
    address = "127.0.0.1:0"
    for _ in range(3):
        server = rpc.make_server(tracer=NoOpTracer(), public=False)
        address = await bind(server, address)
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
        await server.stop(None)


def test_a_module_is_named_and_its_arguments_are_not() -> None:
    with python("-m", "http.server", "0", "--bind", "127.0.0.1") as process:
        assert process.stdout is not None
        process.stdout.readline()  # it runs
        assert re.fullmatch(r"python[\d.]* -m http.server", _name(process.pid))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense", "is not an address of the form host:port"),
        ("127.0.0.1:", "is not an address of the form host:port"),
        ("127.0.0.1:70000", "is not an address of the form host:port"),
        (":80", "is not an address of the form host:port"),
        ("no-such-host.invalid:0", "the host no-such-host.invalid is not known"),
        ("203.0.113.7:0", "cannot assign requested address"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_refused_in_a_sentence(address: str, said: str) -> None:
    with pytest.raises(StartError, match=said):
        listen(address).close()


def test_a_socket_tells_its_address_in_the_form_that_clients_take() -> None:
    with listen("127.0.0.1:0") as sock:
        host, port = address_of(sock).split(":")
        assert host == "127.0.0.1"
        assert int(port) > 0


# --- the admin service ---


@asynccontextmanager
async def admin(life: Lifecycle) -> AsyncIterator[admin_pb2_grpc.AdminServiceStub]:
    server = rpc.make_server(tracer=NoOpTracer(), public=False)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(life, lambda: {"queued": 2}), server)
    address = await bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)
    await server.stop(None)


async def test_the_admin_service_shows_the_process_and_begins_its_drain(clock: FakeClock) -> None:
    life = Lifecycle(ME, clock=clock)
    life.set_ready(True, "degraded")
    clock.advance(12.5)
    async with admin(life) as stub:
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert status == admin_pb2.GetStatusResponse(
            role="router", id="r0", incarnation="00000000000000ff", build=BUILD, protocol=PROTOCOL_TEXT, uptime_s=12.5,
            ready=True, detail="degraded", gauges={"queued": 2},
        )  # fmt: skip
        for _ in range(2):
            await stub.Drain(admin_pb2.DrainRequest(grace_ms=7))
        status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        assert (status.ready, status.draining, life.grace_ms) == (False, True, 7)


# --- the operation routes ---


async def fetch(address: str, path: str) -> tuple[int, str]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(5):
        answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_the_operation_routes_tell_life_from_readiness() -> None:
    life = Lifecycle(ME)
    server = serve_ops("127.0.0.1:0", life)
    try:
        assert (await fetch(server.address, "/health"))[0] == 200
        code, body = await fetch(server.address, "/ready")
        assert (code, json.loads(body)) == (503, {"ready": False, "detail": "starting"})
        life.set_ready(True, "degraded")
        code, body = await fetch(server.address, "/ready")
        assert (code, json.loads(body)) == (200, {"ready": True, "detail": "degraded"})
        code, body = await fetch(server.address, "/metrics")
        assert code == 200
        assert "process_resident_memory_bytes" in body
        assert (await fetch(server.address, "/nothing"))[0] == 404
    finally:
        await server.close()
    with socket.socket() as probe:
        host, port = server.address.rsplit(":", 1)
        assert probe.connect_ex((host, int(port))) != 0, "it still listens"


async def test_an_open_connection_does_not_hold_the_end_of_the_server_up() -> None:
    server = serve_ops("127.0.0.1:0", Lifecycle(ME))
    host, port = server.address.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HT")
    await asyncio.sleep(0.05)
    async with asyncio.timeout(4):
        await server.close()
    writer.close()


async def test_the_http_server_leaves_signals_to_the_lifecycle() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = serve_ops("127.0.0.1:0", Lifecycle(ME))
    await fetch(server.address, "/health")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    await server.close()
