"""Deaths of workers, routers and the store while streams run: every stream finishes with the text it would have had."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.e2e.harness import Answer, Mesh, clients, spec
from tests.e2e.leaks import assert_nothing_left
from trunkline.inference.v1 import inference_pb2

STREAMS, TOKENS = 64, 32
TOPICS = ("the sea", "a red fox", "old maps", "the moon", "bread", "a storm", "iron", "music")


def _specs() -> list[inference_pb2.GenerationSpec]:
    made = []
    for index in range(STREAMS):
        prompt = f"{index + 1}. Write one sentence about {TOPICS[index % len(TOPICS)]}:"
        seed = None if index % 2 else 1000 + index  # half greedy, half sampled
        made.append(spec(prompt, TOKENS, seed=seed, ignore_eos=True))
    return made


async def run_streams(
    mesh: Mesh, disturb: Callable[[asyncio.Semaphore], Awaitable[None]] | None = None
) -> list[Answer]:
    """Runs all streams at once over all gateways; `disturb` gets a semaphore that every first token releases once."""
    first_tokens = asyncio.Semaphore(0)
    async with clients(mesh) as opened, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(opened[index % len(opened)].stream(request, on_first=first_tokens.release))
            for index, request in enumerate(_specs())
        ]
        if disturb is not None:
            group.create_task(disturb(first_tokens))
    return [task.result() for task in tasks]


def _texts(answers: list[Answer]) -> list[str]:
    return [answer.text for answer in answers]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[str]]:
    """Texts of the undisturbed run, made by the first test that needs them."""
    return {}


async def _baseline(mesh: Mesh, kept: dict[str, list[str]]) -> list[str]:
    if "texts" not in kept:
        kept["texts"] = _texts(await run_streams(mesh))
    return kept["texts"]


@pytest.mark.timeout(300)
async def test_streams_survive_the_kill_of_a_worker_with_identical_text(
    mesh: Mesh, undisturbed: dict[str, list[str]]
) -> None:
    expected = await _baseline(mesh, undisturbed)

    async def disturb(first_tokens: asyncio.Semaphore) -> None:
        for _ in range(STREAMS // 4):
            await first_tokens.acquire()
        mesh.kill("worker-1")

    answers = await run_streams(mesh, disturb)
    assert _texts(answers) == expected
    assert sum(answer.receipt.migrations for answer in answers) > 0, "the kill hit no running stream"
    await mesh.ready()
    await assert_nothing_left(mesh)


@pytest.mark.timeout(300)
async def test_streams_survive_the_kill_of_a_router_with_identical_text(
    mesh: Mesh, undisturbed: dict[str, list[str]]
) -> None:
    expected = await _baseline(mesh, undisturbed)

    async def disturb(first_tokens: asyncio.Semaphore) -> None:
        await asyncio.sleep(0.3)  # most submissions are still with a router
        mesh.kill("router-1")

    answers = await run_streams(mesh, disturb)
    assert _texts(answers) == expected
    await mesh.ready()
    await assert_nothing_left(mesh)


@pytest.mark.timeout(300)
async def test_streams_survive_the_kill_of_the_store_with_identical_text(
    mesh: Mesh, undisturbed: dict[str, list[str]]
) -> None:
    expected = await _baseline(mesh, undisturbed)

    async def disturb(first_tokens: asyncio.Semaphore) -> None:
        await asyncio.sleep(1.0)
        mesh.kill("redis")

    assert _texts(await run_streams(mesh, disturb)) == expected
    await mesh.ready()
    await assert_nothing_left(mesh)
