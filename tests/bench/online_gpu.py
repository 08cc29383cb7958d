"""`make bench-online`: the open-loop load of `online.py` on the whole mesh, and on `vllm serve` where it is installed.

Both serve the same artefact's config and tokenizer (vLLM with weights of its own) and get the same requests from the
same client, one server after the other. What was measured is written after every rate, so that a run that is cut off
leaves what it had.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc

from tests.bench.engine_gpu import GPU_MEMORY, RESULTS
from tests.bench.facts import machine_facts, write_result
from tests.bench.fleet import free_ports, serving
from tests.bench.targets import Online, load
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc
from workers.models.config import read_config
from workers.models.loader import KERNEL_MODES
from workers.weights.manifest import MANIFEST
from workers.weights.random_model import SHAPES, make_random

CLIENT = Path(__file__).with_name("online.py")
SERVERS = ("trunkline", "vllm")
COLUMNS = "{:<12}{:>6}{:>26}{:>24}{:>9}{:>8}  {}"
WARM_UP = (2.0, 1.5)  # requests per second, seconds: two requests
CONTEXT = 16_384  # tokens; the longest request has 9,216
START_S = 300.0  # that a server may take to load and to warm up
END_S = 30.0
AFTER_S = 240.0  # that the last answers may take


@dataclass(frozen=True)
class Server:
    """Where one listens, and as what it serves the model."""

    url: str
    model: str
    key: str = ""


@contextmanager
def trunkline(args: argparse.Namespace) -> Iterator[Server]:
    """One gateway, one router and one worker on the device."""
    engine = {
        "device": args.device,
        "kernel_mode": args.kernel_mode,
        "max_batch_tokens": args.max_batch_tokens,
        "max_seqs": args.max_seqs,
        "max_context": min(CONTEXT, read_config(args.model).max_context),
        **({"kv_memory_fraction": GPU_MEMORY} if args.device != "cpu" else {}),
    }
    with (
        tempfile.TemporaryDirectory(prefix="trunkline-online-") as root,
        serving(Path(root), str(args.model.absolute()), engine=engine, start_s=START_S) as fleet,
    ):
        (worker,) = fleet.specs("worker")
        serves = _kernel_mode(f"127.0.0.1:{worker.ports['grpc']}")
        if serves != args.kernel_mode:
            sys.exit(f"{args.kernel_mode} does not serve on this machine; {serves} does")
        yield Server(fleet.http[0], args.model.name, fleet.key)


def _kernel_mode(address: str) -> str:
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return stub.Describe(worker_pb2.DescribeRequest(), timeout=10).kernel_mode


@contextmanager
def vllm(args: argparse.Namespace) -> Iterator[Server]:
    """`vllm serve` with its defaults, but for the prefix cache, which no request can use."""
    (port,) = free_ports(1)
    flags = {
        "host": "127.0.0.1",
        "port": port,
        "load-format": "dummy",
        "max-model-len": CONTEXT,
        "served-model-name": "m",
    }
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(args.model),
        "--no-enable-prefix-caching",
    ]
    command += [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    child = subprocess.Popen(command, env={**os.environ, **quiet}, stdout=sys.stderr, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(url, child)
        yield Server(url, "m")
    finally:
        _end_group(child)


def _await_health(url: str, child: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        if child.poll() is not None:
            sys.exit(f"vllm serve ended with code {child.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    sys.exit(f"vllm serve is not ready after {START_S:.0f} s")


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """The server and its engine processes, which are a group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(END_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def ask(server: Server, vocabulary: int, rate: float, seconds: float) -> dict[str, Any]:
    """What the client says of one load."""
    flags = {"url": server.url, "model": server.model, "key": server.key, "vocab": vocabulary}
    flags |= {"rate": rate, "seconds": seconds}
    command = [sys.executable, str(CLIENT), *(f"--{flag}={value}" for flag, value in flags.items())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=seconds + AFTER_S)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def main() -> None:
    """Loads each server at each rate, prints a table, writes the JSON."""
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # whoever ends this ends the servers too
    if not (args.model / MANIFEST).exists():
        make_random(args.model, args.shape)
    vocabulary = read_config(args.model).vocab_size
    machine, rows = machine_facts(), list[dict[str, Any]]()
    table = {target.rate: target for target in load().online if target.shape == args.shape}
    _say(COLUMNS.format("server", "rate", "TTFT p50/p90/p99 ms", "ITL p50/p90/p99 ms", "goodput", "errors", "gate"))
    for name in args.servers:
        start: AbstractContextManager[Server] = (trunkline if name == "trunkline" else vllm)(args)
        with start as server:
            ask(server, vocabulary, *WARM_UP)
            for rate in args.rates:
                said = ask(server, vocabulary, rate, args.seconds)
                mode = {"mode": args.kernel_mode} if name == "trunkline" else {}
                rows.append({"server": name, "shape": args.shape, **mode, **said})
                _say(_line(name, said, table.get(rate) if name == "trunkline" else None))
                command = f"python -m tests.bench.online_gpu {shlex.join(sys.argv[1:])}"
                write_result(args.out, machine, command, rows)
    _say(f"rows in {args.out}")


def _line(name: str, said: dict[str, Any], target: Online | None) -> str:
    first, gaps = (" / ".join(f"{ms:g}" for ms in said[what] if ms is not None) for what in ("ttft_ms", "itl_ms"))
    verdict = f"{target.gate} {'met' if target.met(said) else 'MISSED'}" if target else "-"
    return COLUMNS.format(name, f"{said['rate']:g}", first, gaps, f"{said['goodput']:.2f}", said["errors"], verdict)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.online_gpu", description=main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="%(default)s")
    parser.add_argument("--model", type=Path, help="artefact, made if it is absent (.trunkline/models/random-SHAPE)")
    parser.add_argument("--device", default="cuda", help="%(default)s")
    parser.add_argument("--kernel-mode", choices=KERNEL_MODES, default="fused", help="%(default)s")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, help="trunkline, and vllm where it is installed")
    parser.add_argument("--rates", type=float, nargs="+", default=(10, 15, 20, 25), help="requests/s; %(default)s")
    parser.add_argument("--seconds", type=float, default=45, help="of each load (%(default)s)")
    parser.add_argument("--max-batch-tokens", type=int, default=2048, help="tokens of one step (%(default)s)")
    parser.add_argument("--max-seqs", type=int, default=256, help="sequences that run at once (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "online.json", help="%(default)s")
    args = parser.parse_args()
    args.model = args.model or Path(".trunkline/models") / f"random-{args.shape}"
    args.servers = args.servers or SERVERS[: 2 if find_spec("vllm") else 1]
    return args


if __name__ == "__main__":
    main()
