"""What clients write and what models answer stays out of logs, spans, metrics and the store, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from contextlib import suppress

import grpc
import redis

from tests.e2e.harness import MODEL, Client, Mesh, clients, spec
from trunkline.inference.v1 import inference_pb2

MARKER = "quuxzanzibar"
IDS = (40961, 40973, 40987)
BAD_ID = 4_123_456_789  # no other number looks like it
SETTLE_S = 2.0  # several times the interval at which spans are written


async def test_no_text_and_no_token_ids_are_in_logs_spans_metrics_and_records(mesh: Mesh) -> None:
    async with clients(mesh) as opened:
        answers = [
            await opened[0].stream(spec(f"The {MARKER} is a bird that", 24, ignore_eos=True, stop=[MARKER])),
            await opened[1].stream(spec(IDS, 24, ignore_eos=True, stop_token_ids=IDS)),
        ]
        await _refusals(opened[0])
        await _left_in_its_middle(opened[1])
        await asyncio.to_thread(_over_http, mesh)
    await asyncio.sleep(SETTLE_S)
    told = {**_logs(mesh), **_metrics(mesh), **_stored(mesh)}
    assert any(answers[0].request_id in text for text in told.values()), "nothing was told at all"
    ids = re.compile(rf"{IDS[0]}\D{{1,4}}{IDS[1]}|{BAD_ID}")
    texts = [MARKER, *(answer.text[-40:] for answer in answers)]
    for place, text in told.items():
        assert not [word for word in texts if word in text or json.dumps(word)[1:-1] in text], place
        assert not ids.search(text), place


async def _refusals(client: Client) -> None:
    """Text and ids in requests that are not served."""
    for bad in (
        spec(f"{MARKER} " * 9000, 4),
        spec(MARKER, 4, n=99, stop=[MARKER * 40]),
        spec([*IDS, BAD_ID], 4, stop_token_ids=[*IDS, BAD_ID]),
        spec(MARKER, 4, deadline_ms=1),
        inference_pb2.GenerationSpec(
            model=MODEL, chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=MARKER * 9, content=MARKER)])
        ),
    ):
        with suppress(grpc.aio.AioRpcError):
            await client.stub.Complete(
                inference_pb2.CompleteRequest(spec=bad), metadata=client.metadata, timeout=30
            )  # fmt: skip


async def _left_in_its_middle(client: Client) -> None:
    request = inference_pb2.GenerateRequest(spec=spec(f"{MARKER} and", 2000, ignore_eos=True))
    call = client.stub.Generate(request, metadata=client.metadata, timeout=30)
    await call.read()
    call.cancel()


def _over_http(mesh: Mesh) -> None:
    message = {"role": "user", "content": f"What is a {MARKER}?"}
    for path, body in (
        ("/v1/chat/completions", {"messages": [message], "max_tokens": 8}),
        ("/v1/chat/completions", {"messages": [message], "temperature": MARKER}),
        ("/v1/completions", {"prompt": MARKER, "logit_bias": {MARKER: 1}}),
        ("/v1/completions", {"prompt": list(IDS), "max_tokens": 2}),
        ("/v1/embeddings", {"input": [MARKER]}),
        ("/tokenize", {"prompt": MARKER}),
        ("/detokenize", {"tokens": list(IDS)}),
    ):
        request = urllib.request.Request(
            mesh.http_addresses()[0] + path,
            json.dumps({"model": MODEL} | body).encode(),
            {"authorization": f"Bearer {mesh.key}", "content-type": "application/json"},
        )
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30).close()


def _logs(mesh: Mesh) -> dict[str, str]:
    return {path.name: path.read_text() for path in (mesh.home / "logs").glob("*.log")}


def _metrics(mesh: Mesh) -> dict[str, str]:
    found = {}
    for process in mesh.processes():
        if process.role in ("gateway", "router", "worker"):
            port = process.ports["http" if process.role == "gateway" else "ops"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                found[f"metrics of {process.name}"] = answer.read().decode()
    return found


def _stored(mesh: Mesh) -> dict[str, str]:
    """Every key of the store with its value: records, traces, limits, addresses."""
    with redis.Redis(port=mesh.redis_port()) as store:
        read = {
            b"string": store.get,
            b"hash": store.hgetall,
            b"list": lambda key: store.lrange(key, 0, -1),
            b"zset": lambda key: store.zrange(key, 0, -1),
        }
        return {f"key {key.decode()}": f"{key!r} {read[store.type(key)](key)!r}" for key in store.scan_iter(count=1000)}
