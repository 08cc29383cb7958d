"""A real mesh for the tests: real processes under `trunkctl mesh up`, real sockets, the real model.

Owns start, end and observation of one mesh in a directory of its own. The one rule: signal only processes that the
mesh's own process table names.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc

MODEL = "smollm2-135m-instruct"
START_S = 120.0


class Process(msgspec.Struct):
    """One row of the process table."""

    name: str
    role: str
    pid: int
    ports: dict[str, int]
    restarts: int


@dataclass(frozen=True)
class Answer:
    """What one stream said."""

    request_id: str
    text: str
    finish: int
    usage: common_pb2.Usage
    receipt: common_pb2.Receipt
    first_s: float
    total_s: float
    gaps_s: list[float] = field(default_factory=list)


class Mesh:
    """A running mesh."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.key = (home / "dev.key").read_text().strip()

    @classmethod
    def start(cls, home: Path, models: Path, *, workers: int = 1, routers: int = 1, gateways: int = 1) -> Mesh:
        """Starts a mesh whose first gateway takes free ports; returns when it is ready."""
        home.mkdir(parents=True, exist_ok=True)
        (home / "models").symlink_to(models)
        counts = ["--workers", str(workers), "--routers", str(routers), "--gateways", str(gateways)]
        ports = ["--http-port", str(free_port()), "--grpc-port", str(free_port())]
        done = trunkctl(home, "mesh", "up", "--detach", *counts, *ports, timeout=START_S)
        if done.returncode != 0:
            trunkctl(home, "mesh", "down")
            raise AssertionError(f"mesh up failed:\n{done.stdout}\n{done.stderr}\n{_tails(home)}")
        return cls(home)

    def stop(self) -> None:
        """Ends every process of the mesh."""
        done = trunkctl(self.home, "mesh", "down", timeout=60.0)
        assert done.returncode == 0, done.stderr

    def processes(self, role: str | None = None) -> list[Process]:
        """The living table, optionally of one role."""
        table = msgspec.json.decode((self.home / "processes.json").read_bytes(), type=list[Process])
        return [process for process in table if role in (None, process.role)]

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signals one process of the mesh."""
        (process,) = [process for process in self.processes() if process.name == name]
        os.kill(process.pid, number)

    def grpc_addresses(self) -> list[str]:
        """Public gRPC addresses of the gateways."""
        return [f"127.0.0.1:{gateway.ports['grpc']}" for gateway in self.processes("gateway")]

    def http_addresses(self) -> list[str]:
        """HTTP addresses of the gateways."""
        return [f"http://127.0.0.1:{gateway.ports['http']}" for gateway in self.processes("gateway")]

    def redis_port(self) -> int:
        """Port of the embedded store."""
        (store,) = self.processes("redis")
        return store.ports["redis"]

    def metrics(self, process: Process) -> dict[str, float]:
        """Samples of one process, by name (labels summed)."""
        port = process.ports["http" if process.role == "gateway" else "ops"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    async def ready(self, timeout_s: float = START_S) -> None:
        """Returns when every process of the plan takes work."""
        async with asyncio.timeout(timeout_s):
            while True:
                done = await asyncio.to_thread(trunkctl, self.home, "mesh", "status", timeout=20.0)
                if done.returncode == 0:
                    return
                await asyncio.sleep(0.3)


class Client:
    """A gRPC client of one gateway."""

    def __init__(self, address: str, key: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {key}"),)

    async def stream(
        self,
        spec: inference_pb2.GenerationSpec,
        timeout_s: float = 120.0,
        on_first: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Runs one generation to its end, checking the stream's state machine on the way; `on_first` is called with
        its first delta."""
        began = time.monotonic()
        call = self.stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=self.metadata, timeout=timeout_s)
        request_id, text, finish, finished, times = "", [], 0, None, []
        try:
            async for response in call:
                kind = response.WhichOneof("event")
                assert finished is None, "an event after Finished"
                if kind == "started":
                    assert not request_id, "two Started"
                    request_id = response.started.request_id
                elif kind == "delta":
                    assert request_id, "a Delta before Started"
                    assert not finish, "a Delta after the choice's finish"
                    times.append(time.monotonic())
                    if len(times) == 1:
                        on_first()
                    text.append(response.delta.text)
                    finish = response.delta.finish_reason
                elif kind == "finished":
                    finished = response.finished
        finally:
            call.cancel()
        assert finished is not None, "the stream ended without Finished"
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        total = time.monotonic() - began
        return Answer(
            request_id, "".join(text), finish, finished.usage, finished.receipt, times[0] - began, total, gaps
        )


async def to_its_end(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    """Reads what is left of a stream; raises what ends it."""
    while await call.read() is not grpc.aio.EOF:
        pass


@asynccontextmanager
async def clients(mesh: Mesh) -> AsyncIterator[list[Client]]:
    """One client per gateway."""
    opened = [Client(address, mesh.key) for address in mesh.grpc_addresses()]
    try:
        yield opened
    finally:
        for client in opened:
            await client.channel.close()


def spec(
    prompt: str | Sequence[int], max_tokens: int, *, seed: int | None = None, **fields: object
) -> inference_pb2.GenerationSpec:
    """A generation: greedy, or sampled at temperature 0.8 when a seed is given."""
    made = inference_pb2.GenerationSpec(model=MODEL, max_tokens=max_tokens, **fields)  # type: ignore[arg-type]
    if isinstance(prompt, str):
        made.prompt = prompt
    else:
        made.prompt_token_ids.ids.extend(prompt)
    made.sampling.temperature = 0.0 if seed is None else 0.8
    if seed is not None:
        made.sampling.seed = seed
    return made


def trunkctl(home: Path, *args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs the tool against a home directory."""
    command = [sys.executable, "-m", "trunkctl", "--home", str(home), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def free_port() -> int:
    """A port below the range of outgoing connections that nobody listens on."""
    import socket

    for port in range(20000 + os.getpid() % 500, 21000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.add(port)
                return port
    raise AssertionError("no free port")


_given: set[int] = set()


def _tails(home: Path) -> str:
    logs = sorted((home / "logs").glob("*.log"))
    return "\n".join(f"== {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs)
