"""Whether four gateways together let through more than one tenant's limits allow.

Requests are fired at all of them at once, far above the rate, for some seconds. What was admitted is held against the
burst and what flowed back since the first request was sent.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

import grpc
from prometheus_client.parser import text_string_to_metric_families

from gateway.auth import KeyLimits
from shared.errors import Reason, from_rpc
from tests.bench.fleet import MOST, Counts, Fleet, running
from tests.bench.mesh.asking import Asker, askers, ids, run, spec
from tests.bench.mesh.row import Row

GATEWAYS = 4
TPM = 60_000
CONCURRENCY = 24
PROMPT, OUTPUT = 60, 40
FIRING = 16  # callers of each gateway
PAUSE_S = 0.05  # after a refusal
SECONDS = 6.0
ADMISSIONS = "trunkline_admissions_total"


def measure(home: Path) -> list[Row]:
    """Tokens a minute, then requests at once."""
    tokens = KeyLimits(rpm=MOST, tpm=TPM, concurrency=100_000)
    counts = Counts(gateways=GATEWAYS)
    engine = {"max_seqs": 512, "max_batch_tokens": 65_536, "kv_blocks": 1_000_000}
    with running(home / "tokens", counts, engine=engine, flags={"step-ms": 2}, limits=tokens) as fleet:
        row = run(_tokens(fleet))
    at_once = KeyLimits(rpm=MOST, tpm=MOST, concurrency=CONCURRENCY)
    with running(home / "at-once", counts, engine=engine, flags={"step-ms": 2}, limits=at_once) as fleet:
        return [row, run(_at_once(fleet))]


async def _tokens(fleet: Fleet) -> Row:
    admitted = refused = 0

    async def fire(asker: Asker, until: float, seed: int) -> None:
        nonlocal admitted, refused
        while time.monotonic() < until:
            if await _admitted(asker, seed):
                admitted += 1
            else:
                refused += 1
                await asyncio.sleep(PAUSE_S)

    async with askers(fleet) as opened, asyncio.TaskGroup() as group:
        began = time.monotonic()
        for number, asker in enumerate(opened * FIRING):
            group.create_task(fire(asker, began + SECONDS, number))
    spent = time.monotonic() - began
    allowed = TPM + TPM / 60 * spent
    used = admitted * (PROMPT + OUTPUT)
    remark = (
        f"{used:,} tokens in {spent:.1f} s of {allowed:,.0f} allowed, {refused:,} refusals, "
        f"{_by_themselves(fleet)} decided without the store"
    )
    return Row("limit overshoot, 4 gateways, tokens", "tokens", max(0.0, round(used - allowed)), 0, remark=remark)


async def _at_once(fleet: Fleet) -> Row:
    """The most that streamed at the same time, as clients saw them: from the first token to the last."""
    streaming = most = done = 0

    async def fire(asker: Asker, until: float, seed: int) -> None:
        nonlocal streaming, most, done
        while time.monotonic() < until:
            began = False

            def first(_: object) -> None:
                nonlocal began, streaming, most
                began, streaming = True, streaming + 1
                most = max(most, streaming)

            try:
                await asker.stream(spec(ids(seed, PROMPT), OUTPUT), first)
                done += 1
            except grpc.aio.AioRpcError as exc:
                _expect(exc, Reason.CONCURRENCY)
                await asyncio.sleep(PAUSE_S)
            finally:
                streaming -= began

    async with askers(fleet) as opened, asyncio.TaskGroup() as group:
        until = time.monotonic() + SECONDS / 2
        for number, asker in enumerate(opened * FIRING):
            group.create_task(fire(asker, until, number))
    remark = f"at most {most} at once of {CONCURRENCY}, {done:,} ended"
    return Row("limit overshoot, 4 gateways, at once", "requests", max(0, most - CONCURRENCY), 0, remark=remark)


async def _admitted(asker: Asker, seed: int) -> bool:
    try:
        await asker.complete(spec(ids(seed, PROMPT), OUTPUT))
    except grpc.aio.AioRpcError as exc:
        _expect(exc, Reason.TPM)
        return False
    return True


def _expect(exc: grpc.aio.AioRpcError, refusal: Reason) -> None:
    if from_rpc(exc).reason is not refusal:
        raise exc


def _by_themselves(fleet: Fleet) -> int:
    """Decisions that gateways made without the store, which answered too late or not at all: these may overshoot."""
    found = 0.0
    for address in fleet.http:
        with urllib.request.urlopen(f"{address}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        samples = (each for family in text_string_to_metric_families(text) for each in family.samples)
        found += sum(each.value for each in samples if each.name == ADMISSIONS and each.labels["by"] == "local")
    return round(found)
