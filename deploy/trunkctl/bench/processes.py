"""A load in one process or several: starts them, gives them a common beginning, gathers what they measured.

The one rule: the beginning is named only once every process has warmed up, so that none of them runs alone.
"""

import asyncio
import multiprocessing
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from shared.clock import SYSTEM_CLOCK
from trunkctl.bench.clients import Client, Target
from trunkctl.bench.grpc_client import GrpcClient
from trunkctl.bench.http_client import HttpClient
from trunkctl.bench.load import Load, Pace, Result, Share
from trunkctl.bench.workload import Mix
from trunkctl.failure import CommandError

LEAD_S = 0.2  # from the last process's "warm" to the beginning


@dataclass(frozen=True)
class Job:
    """A whole load, or one process's part of it."""

    target: Target
    mix: Mix
    pace: Pace
    warm_up: int  # requests of each process
    share: Share = field(default_factory=Share)


def run_load(job: Job, processes: int) -> list[Result]:
    """Runs it to the last answer; one result per process. Raises CommandError if a process dies."""
    if processes == 1:
        return [uvloop.run(_run(job, _at_once))]
    context = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    pipes, children = [], []
    for index in range(processes):
        ours, theirs = context.Pipe()
        part = replace(job, share=Share(index, processes))
        child = context.Process(target=_child, args=(part, theirs), daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        for pipe in pipes:
            _receive(pipe)  # it is warm
        begin = SYSTEM_CLOCK.monotonic() + LEAD_S
        for pipe in pipes:
            pipe.send(begin)
        return [_receive(pipe) for pipe in pipes]
    finally:
        for child in children:
            child.terminate()
            child.join()


def make_client(target: Target) -> Client:
    """A client of the target's protocol. Inside a running loop."""
    return GrpcClient(target) if target.protocol == "grpc" else HttpClient(target)


def _receive(pipe: "Connection[Any, Any]") -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise CommandError("a client process ended before its load did") from None


def _child(job: Job, pipe: "Connection[Any, Any]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends it

    def wait() -> float:
        pipe.send("warm")
        return float(pipe.recv())

    pipe.send(uvloop.run(_run(job, lambda: asyncio.to_thread(wait))))


async def _at_once() -> float:
    return SYSTEM_CLOCK.monotonic()


async def _run(job: Job, begin: Callable[[], Awaitable[float]]) -> Result:
    client = make_client(job.target)
    try:
        return await Load(client, job.mix, job.pace, job.share, SYSTEM_CLOCK).run(job.warm_up, begin)
    finally:
        await client.close()
