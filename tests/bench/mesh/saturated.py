"""How much of what the engine can make reaches clients when there is always more to do.

The engine is measured alone, behind its mailbox, with as many requests held as the mesh's clients keep under way.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from shared.mailbox import Mailbox, socket_pair
from tests.bench.fleet import MODEL, running
from tests.bench.mesh.asking import ids
from tests.bench.mesh.row import Row
from trunkctl.bench.clients import Target
from trunkctl.bench.load import Pace
from trunkctl.bench.processes import Job, run_load
from trunkctl.bench.workload import Lengths, Mix
from workers.engine import messages as m
from workers.engine.options import EngineOptions, to_arguments

STEP_MS = 20.0
RUNNING = 64
CLIENTS = 96  # more than run, so that a place that becomes free is taken
CLIENT_PROCESSES = 2
TOKENS = 100
PROMPT = 32
SECONDS = 12.0
SETTLE_S = 3.0
ENGINE: dict[str, Any] = {"max_seqs": RUNNING, "max_batch_tokens": 4096, "kv_blocks": 100_000}


def measure(home: Path) -> list[Row]:
    """The share."""
    with running(home / "mesh", engine=ENGINE, flags={"step-ms": STEP_MS}) as fleet:
        alone = _engine_alone(fleet.home.models / MODEL)
        target = Target(
            protocol="grpc",
            addresses=tuple(fleet.grpc),
            key=fleet.key,
            model=MODEL,
            timeout_s=300.0,
            temperature=0.0,
            ignore_eos=True,
        )
        mix = Mix(seed=1, prompt=Lengths(PROMPT), output=Lengths(TOKENS), vocab=8192)
        pace = Pace(rate=None, concurrency=CLIENTS, seconds=SECONDS, count=None)
        results = run_load(Job(target, mix, pace, warm_up=1), CLIENT_PROCESSES)
    outcomes = [outcome for result in results for outcome in result.outcomes]
    moments = [pair for each in outcomes for pair in zip(each.times, each.counts, strict=True)]
    tokens = sum(count for moment, count in moments if SETTLE_S < moment <= SECONDS)
    through = tokens / (SECONDS - SETTLE_S)
    assert not any(outcome.error for outcome in outcomes)
    remark = (
        f"{through:,.0f} of {alone:,.0f} tok/s; busiest client {max(result.health.cpu for result in results):.2f} CPUs"
    )
    return [Row("engine's throughput that reaches clients", "%", round(100 * through / alone, 2), 95, "least", remark)]


def _engine_alone(artefact: Path) -> float:
    """Tokens a second of a real engine process, nothing but its mailbox before it."""
    ours, theirs = socket_pair()
    options = EngineOptions(model=str(artefact), **ENGINE)
    with theirs:
        arguments = [f"--step-ms={STEP_MS}", *to_arguments(theirs.fileno(), options)]
        command = [sys.executable, "-m", "tests.fakes.engine", *arguments]
        engine = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        return _drive(Mailbox(ours))
    finally:
        engine.kill()
        engine.wait()


def _drive(mailbox: Mailbox) -> float:
    """Keeps CLIENTS requests there and counts tokens after SETTLE_S."""
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(m.FromEngine).decode
    keys, made, began = itertools.count(1), Counter[bool](), 0.0

    def admit() -> None:
        key = next(keys)
        prompt = m.pack_tokens(ids(key, PROMPT))
        mailbox.send(encode(m.Admit(key, prompt, [m.ChoiceIn(0)], m.Sampling(), TOKENS, ignore_eos=True)))

    while True:
        for frame in mailbox.recv_all(1.0):
            said = decode(frame)
            if isinstance(said, m.Ready):
                began = time.monotonic()
                for _ in range(CLIENTS):
                    admit()
            elif isinstance(said, m.StepOut):
                passed = time.monotonic() - began
                if passed > SECONDS:
                    return made[True] / (SECONDS - SETTLE_S)
                made[passed > SETTLE_S] += sum(len(run.tokens) for run in said.runs)
                for _ in (event for event in said.events if isinstance(event, m.Finished)):
                    admit()
