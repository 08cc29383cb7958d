"""Gateways that die under resumable streams: clients come back to another one, and read the text they would have read.

Nothing runs twice under an idempotency key, whoever dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import pytest

from shared.errors import from_rpc
from tests.e2e.harness import Client, Mesh, clients, spec
from tests.e2e.leaks import assert_nothing_left
from trunkline.inference.v1 import inference_pb2

STREAMS, TOKENS = 24, 48
TOPICS = ("the sea", "a red fox", "old maps", "the moon", "bread", "a storm", "iron", "music")


@dataclass
class Reader:
    """A client that comes back: what it has read, over all its streams."""

    asked: inference_pb2.GenerationSpec
    request_id: str = ""
    cursor: str = ""
    text: list[str] = field(default_factory=list)
    ended: bool = False
    resumes: int = 0

    async def read(self, opened: list[Client], first: int) -> str:
        """To the end, from one gateway after the other."""
        turn = first
        async with asyncio.timeout(150):
            while not await self._try(opened[turn % len(opened)]):
                turn += 1
                await asyncio.sleep(0.3)
        return "".join(self.text)

    async def _try(self, client: Client) -> bool:
        if self.request_id:
            self.resumes += 1
            again = inference_pb2.ResumeRequest(request_id=self.request_id, cursor=self.cursor)
            call = client.stub.Resume(again, metadata=client.metadata, timeout=150)
        else:
            call = client.stub.Generate(
                inference_pb2.GenerateRequest(spec=self.asked), metadata=client.metadata, timeout=150
            )
        try:
            async for event in call:
                self._take(event)
        except grpc.aio.AioRpcError as exc:
            if not from_rpc(exc).row.retryable:
                raise
            return False
        finally:
            call.cancel()
        return self.ended

    def _take(self, event: inference_pb2.GenerateResponse | inference_pb2.ResumeResponse) -> None:
        match event.WhichOneof("event"):
            case "started":
                assert self.request_id in ("", event.started.request_id)
                self.request_id = event.started.request_id
            case "delta":
                self.text.append(event.delta.text)
                self.cursor = event.delta.cursor
            case "finished":
                self.ended = True


def _asked(index: int, **fields: object) -> inference_pb2.GenerationSpec:
    prompt = f"{index + 1}. Write one sentence about {TOPICS[index % len(TOPICS)]}:"
    seed = None if index % 2 else 1000 + index  # half greedy, half sampled
    return spec(prompt, TOKENS, seed=seed, ignore_eos=True, **fields)


async def _read_all(mesh: Mesh, readers: list[Reader], disturb: Callable[[], Awaitable[None]]) -> list[str]:
    async with clients(mesh) as opened, asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader.read(opened, index)) for index, reader in enumerate(readers)]
        group.create_task(disturb())
    return [task.result() for task in tasks]


async def _nothing() -> None:
    pass


@pytest.mark.timeout(300)
async def test_streams_of_a_killed_gateway_go_on_at_another_with_identical_text(mesh: Mesh) -> None:
    expected = await _read_all(mesh, [Reader(_asked(index)) for index in range(STREAMS)], _nothing)
    readers = [Reader(_asked(index, resume_window_ms=60_000)) for index in range(STREAMS)]

    async def kill() -> None:
        async with asyncio.timeout(60):
            while sum(len(reader.text) > 2 for reader in readers) < STREAMS // 2:  # noqa: ASYNC110 - the readers' own
                await asyncio.sleep(0.05)
        mesh.kill("gateway-1")

    assert await _read_all(mesh, readers, kill) == expected
    assert sum(reader.resumes > 0 for reader in readers) >= STREAMS // 4, "the kill hit no running stream"
    await mesh.ready()
    await assert_nothing_left(mesh)


@pytest.mark.timeout(300)
async def test_duplicates_of_a_key_make_one_transcript_though_a_gateway_is_killed(mesh: Mesh) -> None:
    keys = 8
    # Sampled without a seed: only one execution can have made equal texts.
    asked = [
        spec(f"{index}. A word about {TOPICS[index]}:", TOKENS, ignore_eos=True, idempotency_key=f"key {index}")
        for index in range(keys)
    ]
    for each in asked:
        each.sampling.temperature = 1.0
    readers = [Reader(each) for each in asked for _ in range(4)]

    async def kill() -> None:
        await asyncio.sleep(2.0)
        mesh.kill("gateway-2")

    texts = await _read_all(mesh, readers, kill)
    for index in range(keys):
        same = range(4 * index, 4 * index + 4)
        assert len({texts[place] for place in same}) == 1
        assert len({readers[place].request_id for place in same}) == 1
    assert len(set(texts)) == keys
    await mesh.ready()
    await assert_nothing_left(mesh)
