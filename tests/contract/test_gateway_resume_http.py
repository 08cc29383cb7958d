"""The HTTP face of what can be resumed: Last-Event-ID, Idempotency-Key, and streams that join to the same bytes."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from tests.fakes.gateway_client import SECRETS, Client, until, world
from tests.fakes.mesh import MODEL

LONG = {"lengths": (40,) * 4, "step_s": 0.02}
PROMPT = [5, 6, 7]


async def send(client: Client, method: str, path: str, body: Any = None, key: str = "k1", **headers: str) -> Any:
    """A request by hand: (reader, writer) after its head is sent."""
    data = json.dumps(body).encode() if body is not None else b""
    sent = {"authorization": f"Bearer {SECRETS[key]}", "content-length": str(len(data)), "connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    reader, writer = await asyncio.open_connection(*client.gateway.http.split(":"))
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode() + data)
    return reader, writer


async def answer(client: Client, method: str, path: str, body: Any = None, key: str = "k1", **headers: str) -> Any:
    """(status, body) of a whole answer; chunks joined."""
    reader, writer = await send(client, method, path, body, key, **headers)
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    if b"transfer-encoding: chunked" in head.lower():
        rest = unchunked(rest)
    return int(head.split()[1]), rest


def unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        out, data = out + data[:length], data[length + 2 :]
    return out


def events(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n") if event]


def last_id(seen: list[bytes]) -> str:
    return re.findall(rb"^id: (\S+)$", b"".join(seen), re.MULTILINE)[-1].decode()


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "stream": True, "resume_window_ms": 60_000, "n": 2, "seed": 1, **fields}


async def cut(client: Client, path: str, body: dict[str, Any], count: int) -> list[bytes]:
    """The first `count` events of a stream that is then cut off."""
    reader, writer = await send(client, "POST", path, body)
    await reader.readuntil(b"\r\n\r\n")
    data = b""
    while len(events(data)) < count or not data.endswith(b"\n\n"):
        size = int(await reader.readuntil(b"\r\n"), 16)
        data += await reader.readexactly(size)
        await reader.readexactly(2)
    writer.close()
    return events(data)


async def test_a_stream_goes_on_after_last_event_id_to_the_same_bytes(redis_url: str, tmp_path: Path) -> None:
    chat = asked(messages=[{"role": "user", "content": "hi"}], stream_options={"include_usage": True}, seed=1)
    plain = asked(prompt=PROMPT, logprobs=1)
    async with world(redis_url, tmp_path, fakes=LONG) as (client, _, (worker,)):
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", plain)):
            seen = await cut(client, path, body, 12)
            whole_id = json.loads(seen[0].split(b"data: ")[1])["id"]
            place, request_id = last_id(seen), whole_id.partition("-")[2]
            usage = "?include_usage=true" if "stream_options" in body else ""
            status, again = await answer(client, "GET", f"/v1/generations/{request_id}/stream{usage}")
            assert status == 200
            for method, where, what in (
                ("GET", f"/v1/generations/{request_id}/stream{usage}", None),
                ("POST", path, body),
            ):
                status, rest = await answer(client, method, where, what, last_event_id=place)
                assert status == 200
                assert rest.endswith(b"data: [DONE]\n\n")
                told, whole = joined(b"".join(seen) + rest), joined(again)
                assert told == whole
                assert rest.count(b'"role"') == 0
                assert (b'"usage":{' in rest) == ("stream_options" in body)
        assert len(worker.submissions) == 2


def joined(data: bytes) -> dict[int, tuple[str, str | None]]:
    """Text and finish per choice."""
    texts: dict[int, tuple[str, str | None]] = {}
    for event in events(data):
        payload = event.split(b"data: ")[1]
        if payload.startswith(b"[DONE]"):
            continue
        for choice in json.loads(payload)["choices"]:
            text, finish = texts.get(choice["index"], ("", None))
            assert finish is None, "text after the end of a choice"
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = (text + piece, choice["finish_reason"])
    return texts


async def test_the_header_idempotency_key_makes_one_of_many(redis_url: str, tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20}
    async with world(redis_url, tmp_path, fakes=LONG) as (client, _, (worker,)):
        answers = await asyncio.gather(
            *(answer(client, "POST", "/v1/completions", body, idempotency_key="k") for _ in range(6))
        )
        bodies = [json.loads(data) for status, data in answers if status == 200]
        assert len(bodies) == 6
        assert len({made["id"] for made in bodies}) == len({made["choices"][0]["text"] for made in bodies}) == 1
        status, data = await answer(client, "POST", "/v1/completions", body | {"max_tokens": 5}, idempotency_key="k")
        assert (status, json.loads(data)["error"]["code"]) == (409, "IDEMPOTENCY_CONFLICT")
        status, data = await answer(
            client, "POST", "/v1/completions", body | {"idempotency_key": "other"}, idempotency_key="k"
        )
        assert (status, json.loads(data)["error"]["code"]) == (400, "BAD_FIELD")
        status, data = await answer(
            client, "POST", "/v1/completions", body | {"prompt": ["a", "b"]}, idempotency_key="many"
        )
        assert (status, json.loads(data)["error"]["code"]) == (501, "FEATURE_OFF")
        assert len(worker.submissions) == 1


async def test_resumes_are_refused_with_their_reason(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes=LONG) as (client, _, _):
        seen = await cut(client, "/v1/completions", asked(prompt=PROMPT), 3)
        request_id = json.loads(seen[0].split(b"data: ")[1])["id"].partition("-")[2]
        path = f"/v1/generations/{request_id}/stream"
        assert (await answer(client, "GET", path, key="k2"))[0] == 404
        assert (await answer(client, "GET", f"/v1/generations/{'0' * 32}/stream"))[0] == 404
        assert (await answer(client, "GET", path, last_event_id="-1"))[0] == 400
        assert (await answer(client, "POST", "/v1/completions", asked(prompt=PROMPT), last_event_id="?"))[0] == 400
        ordinary = await cut(client, "/v1/completions", asked(prompt=PROMPT, resume_window_ms=0), 3)
        assert not any(b"id: " in event for event in ordinary)
        await until(lambda: len(client.gateway.core.table) == 1)
