"""The OpenAI faces on a real socket, spoken to by the real `openai` package and by hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.auth import Authenticator
from gateway.http.app import MAX_BODY_BYTES, Faces, build
from shared.clock import SYSTEM_CLOCK
from shared.errors import TABLE, Reason, TrunklineError, Violation
from tests.fakes.generations import (
    HEARTBEAT,
    MODEL,
    STUCK,
    FakeEmbeddings,
    FakeGenerations,
    FakeModels,
    serving,
)

SECRET = "tl_k_test_0123456789abcdefghijABCDEFGHIJ01"
NARROW = "tl_k_narrow_0123456789abcdefghijABCDEFGHIJ01"
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def core() -> FakeGenerations:
    return FakeGenerations()


@pytest.fixture
async def address(core: FakeGenerations, tmp_path: Path) -> AsyncIterator[str]:
    keys = [
        {"id": "k_test", "sha256": hashlib.sha256(SECRET.encode()).hexdigest(), "tenant": "dev"},
        {
            "id": "k_narrow",
            "sha256": hashlib.sha256(NARROW.encode()).hexdigest(),
            "tenant": "dev",
            "scopes": ["embed"],
            "models": ["other"],
        },
    ]
    keys_file = tmp_path / "keys.json"
    keys_file.write_text(json.dumps({"keys": keys}))
    authenticator = Authenticator(keys_file, SYSTEM_CLOCK)
    faces = Faces(authenticator, core, FakeEmbeddings(), FakeModels(), SYSTEM_CLOCK, random.Random(7))
    async with serving(build(faces.routes())) as where:
        yield where


@pytest.fixture
async def client(address: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=SECRET, max_retries=0) as made:
        yield made


async def post(address: str, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request by hand: status, headers, body as sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"authorization": f"Bearer {SECRET}", "content-length": str(len(data)), "connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    reader, writer = await asyncio.open_connection(*address.split(":"))
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items() if value)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    return _parsed(answer)


async def begin(address: str, stream: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A completion asked for by hand, its answer not read; the buffer is small so that a reader can be slow."""
    reader, writer = await asyncio.open_connection(*address.split(":"), limit=1024)
    ask(writer, stream)
    return reader, writer


def ask(writer: asyncio.StreamWriter, stream: bool = True) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": stream}).encode()
    head = f"authorization: Bearer {SECRET}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{head}".encode() + body)


def _parsed(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        rest = b"".join(re.findall(rb"(?:^|\r\n)[0-9a-fA-F]+\r\n(.*?)(?=\r\n(?:[0-9a-fA-F]+\r\n))", rest, re.DOTALL))
    return int(status.split()[1]), headers, rest


def frames(body: bytes) -> list[str]:
    return [frame for frame in body.decode().split("\n\n") if frame]


# --- chat


async def test_a_chat_answers_once_with_text_usage_and_receipt(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION)
    answer = raw.parse()
    assert answer.id == f"chatcmpl-{1:032x}"
    assert (answer.object, answer.created, answer.model) == ("chat.completion", 1_700_000_000, MODEL)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello world!", "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 3, 6)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    extension = answer.model_extra["trunkline"] if answer.model_extra else {}
    assert (extension["request_id"], extension["trace_id"]) == (f"{1:032x}", "ab" * 16)
    assert (extension["receipt"]["total_ms"], extension["receipt"]["worker"]) == (5.5, "w1")
    assert raw.headers["x-request-id"] == f"{1:032x}"
    assert raw.headers["x-trace-id"] == "ab" * 16
    assert raw.headers["x-ratelimit-remaining-requests"] == "99"
    assert raw.headers["x-ratelimit-reset-tokens"] == "6.000s"
    assert int(raw.headers["openai-processing-ms"]) >= 0


async def test_a_chat_streams_role_first_and_finish_last(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None]
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "Hello", " world", "!"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


async def test_the_stream_on_the_wire_has_exactly_the_known_form(address: str) -> None:
    status, headers, body = await post(
        address,
        "/v1/chat/completions",
        {"model": MODEL, "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}},
    )
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["x-request-id"] == f"{1:032x}"
    *events, done = frames(body)
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    head = {"id": f"chatcmpl-{1:032x}", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": MODEL}
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert chunks[0] == {**head, "choices": [{**choice, "delta": {"role": "assistant", "content": ""}}], "usage": None}
    assert chunks[1] == {**head, "choices": [{**choice, "delta": {"content": "Hello"}}], "usage": None}
    assert chunks[3]["choices"][0]["finish_reason"] == "stop"
    assert chunks[3]["choices"][0]["stop_reason"] == "</s>"
    assert chunks[4]["choices"] == []
    assert chunks[4]["usage"]["total_tokens"] == 6
    assert chunks[4]["trunkline"]["receipt"]["decode_ms"] == 2.25


@pytest.mark.parametrize("text", ['"quoted" \\ back', "line\nbreak\r\n\n", "日本 🎉 \u2028", "</script>\x00\x1f"])
async def test_any_text_survives_the_prebuilt_frames(
    client: openai.AsyncOpenAI, core: FakeGenerations, text: str
) -> None:
    core.script = lambda _spec: [text, text, "."]
    chat = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == text * 2 + "."
    completion = await client.completions.create(model=MODEL, prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in completion]) == text * 2 + "."


async def test_every_choice_opens_and_ends_in_a_stream_as_in_a_whole_answer(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=QUESTION, n=3)
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [
        (i, "Hello world!") for i in range(3)
    ]
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, stream=True)
    texts, roles, ends = ["", "", ""], [0, 0, 0], [0, 0, 0]
    async for chunk in stream:
        (choice,) = chunk.choices
        assert not ends[choice.index]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        ends[choice.index] += choice.finish_reason == "stop"
    assert (texts, roles, ends) == (["Hello world!"] * 3, [1, 1, 1], [1, 1, 1])


async def test_chat_fields_reach_the_spec(client: openai.AsyncOpenAI, core: FakeGenerations) -> None:
    await client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        max_tokens=5,
        max_completion_tokens=9,
        n=2,
        temperature=0.5,
        top_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=-1,
        stop="END",
        logit_bias={"17": 5},
        logprobs=True,
        top_logprobs=2,
        user="someone",
        extra_body={
            "top_k": 4,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [1, 2],
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "priority": -3,
            "request_id": "mine",
            "session_id": "s",
            "cache_salt": "c",
            "not_known_to_anyone": {"x": 1},
        },
        extra_headers={"X-Request-Timeout-Ms": "1234", "traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"},
    )
    (call,) = core.calls
    spec, sampling = call.spec, call.spec.sampling
    assert [(message.role, message.content) for message in spec.chat.messages] == [
        ("system", "Be brief."),
        ("user", "a\nb"),
    ]
    assert (spec.max_tokens, spec.n, spec.min_tokens, list(spec.stop)) == (9, 2, 3, ["END"])
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k) == (0.5, 0.25, 0.125, 4)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.seed, dict(sampling.logit_bias), sampling.logprobs) == (2**64 - 1, {17: 5.0}, 2)
    assert (spec.ignore_eos, list(spec.stop_token_ids), spec.include_stop, spec.return_token_ids) == (
        True,
        [1, 2],
        True,
        True,
    )
    assert (spec.priority, spec.client_request_id, spec.session_id, spec.cache_salt) == (-3, "mine", "s", "c")
    assert (call.operation, call.budget_ms, call.principal.tenant) == ("chat", 1234, "dev")
    assert call.trace_parent[0].startswith("00-abab")


async def test_unset_fields_stay_unset(client: openai.AsyncOpenAI, core: FakeGenerations) -> None:
    await client.chat.completions.create(model=MODEL, messages=QUESTION)
    (call,) = core.calls
    assert call.spec.ListFields()[0][0].name == "model"
    assert [field.name for field, _ in call.spec.ListFields()] == ["model", "chat"]
    assert call.budget_ms is None


async def test_chat_logprobs_have_bytes_and_no_infinity(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in content] == ["Hello", " world", "!"]
    assert [(top.token, top.bytes, top.logprob) for top in content[2].top_logprobs] == [
        ("!", [33], -0.5),
        ("\ufffd", [255], -9999.0),
    ]


# --- completions


async def test_a_completion_answers_whole_and_streamed_alike(client: openai.AsyncOpenAI, core: FakeGenerations) -> None:
    whole = await client.completions.create(model=MODEL, prompt="x", logprobs=1, extra_body={"return_token_ids": True})
    assert (whole.object, whole.choices[0].text, whole.choices[0].finish_reason) == (
        "text_completion",
        "Hello world!",
        "stop",
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " world", "!"]
    assert logprobs.text_offset == [0, 5, 11]
    assert logprobs.top_logprobs == [{"Hello": -0.5}, {" world": -0.5}, {"!": -0.5}]
    stream = await client.completions.create(
        model=MODEL, prompt="x", logprobs=1, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    offsets = [chunk.choices[0].logprobs.text_offset for chunk in chunks[:-1] if chunk.choices[0].logprobs]
    assert offsets == [[0], [5], [11]]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert core.calls[0].operation == "text_completion"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_prompts_come_in_four_forms(
    client: openai.AsyncOpenAI, core: FakeGenerations, prompt: Any, expected: list[Any]
) -> None:
    await client.completions.create(model=MODEL, prompt=prompt)
    got = [call.spec.prompt or list(call.spec.prompt_token_ids.ids) for call in core.calls]
    assert got == expected
    assert {call.spec.max_tokens for call in core.calls} == {16}, "OpenAI's default for completions"


async def test_choices_of_several_prompts_are_numbered_on(client: openai.AsyncOpenAI, core: FakeGenerations) -> None:
    core.script = lambda spec: [0.02 if spec.prompt == "a" else 0.0, spec.prompt, "."]
    whole = await client.completions.create(model=MODEL, prompt=["a", "b", "c"], n=2)
    assert [(choice.index, choice.text) for choice in whole.choices] == [
        (0, "a."),
        (1, "a."),
        (2, "b."),
        (3, "b."),
        (4, "c."),
        (5, "c."),
    ]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 9
    assert whole.model_extra is not None
    assert len(whole.model_extra["trunkline"]["generations"]) == 3
    stream = await client.completions.create(model=MODEL, prompt=["a", "b", "c"], n=2, stream=True)
    texts = [""] * 6
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a.", "a.", "b.", "b.", "c.", "c."]


async def test_one_failing_prompt_ends_them_all(client: openai.AsyncOpenAI, core: FakeGenerations) -> None:
    failure = TrunklineError(Reason.NO_REPLICA, "Nobody serves this.")
    core.script = lambda spec: [failure] if spec.prompt == "b" else ["x", 30.0]
    with pytest.raises(openai.InternalServerError, match="Nobody serves this"):
        await client.completions.create(model=MODEL, prompt=["a", "b", "c"])
    await asyncio.gather(*(call.left.wait() for call in core.calls))


# --- refusals


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_is_its_row_of_the_table(address: str, core: FakeGenerations, reason: Reason) -> None:
    if reason in (Reason.CLIENT_GONE, Reason.SLOW_READER):
        return  # nobody is there to be told
    left = {"x-ratelimit-remaining-tokens": "7", "subject": "TPM *"}
    core.refuse = TrunklineError(reason, "Said plainly.", retry_after_s=1.25, metadata=left)
    for stream in (False, True):
        status, headers, body = await post(
            address, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "stream": stream}
        )
        row = TABLE[reason]
        assert status == row.http
        assert json.loads(body) == {
            "error": {"message": "Said plainly.", "type": row.openai_type, "param": None, "code": reason.value}
        }
        assert headers["retry-after"] == "2"
        assert headers["retry-after-ms"] == "1250"
        assert headers["x-ratelimit-remaining-tokens"] == "7"
        assert "subject" not in headers
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
        assert ("x-should-retry" in headers) is (not row.retryable)


@pytest.mark.parametrize(
    ("authorization", "status", "code"),
    [("", 401, "KEY_UNKNOWN"), ("Bearer tl_k_x_y", 401, "KEY_UNKNOWN"), (f"Bearer {NARROW}", 403, "SCOPE_FORBIDDEN")],
)
async def test_callers_are_checked_before_anything_else(
    address: str, core: FakeGenerations, authorization: str, status: int, code: str
) -> None:
    got, headers, body = await post(
        address, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION}, authorization=authorization
    )
    assert (got, json.loads(body)["error"]["code"]) == (status, code)
    assert ("www-authenticate" in headers) is (status == 401)
    assert core.calls == []


async def test_all_fields_of_wrong_types_are_named_at_once(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post(
            "/chat/completions",
            cast_to=object,
            body={
                "messages": [{"role": "user", "content": 5}],
                "temperature": "hot",
                "n": -1,
                "stop": {"a": 1},
                "logit_bias": {"x": 1},
                "stream": "yes",
            },
        )
    error: Any = refused.value.body
    assert {item["field"] for item in error["violations"]} == {
        "model", "messages[0].content", "temperature", "n", "stop", "logit_bias", "stream"
    }  # fmt: skip
    assert error["type"] == "invalid_request_error"


async def test_violations_of_the_core_come_by_the_clients_own_names(
    client: openai.AsyncOpenAI, core: FakeGenerations
) -> None:
    fields = ["sampling.top_p", "chat.messages[2].role", "max_tokens", "sampling.logprobs", "client_request_id"]
    violations = [Violation(f"spec.{name}", "must be other") for name in fields]
    core.refuse = TrunklineError(Reason.BAD_FIELD, "spec.sampling.top_p: must be other", violations=violations)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=3)
    error: Any = refused.value.body
    assert [item["field"] for item in error["violations"]] == [
        "top_p", "messages[2].role", "max_completion_tokens", "top_logprobs", "request_id"
    ]  # fmt: skip
    assert refused.value.param == "top_p"
    assert "spec." not in str(refused.value)


async def test_a_bad_prompt_among_several_is_named_with_its_place(
    client: openai.AsyncOpenAI, core: FakeGenerations
) -> None:
    violation = Violation("spec.prompt_token_ids.ids[4]", "must be below 1000, is 2000")
    core.refuse = TrunklineError(Reason.BAD_FIELD, "x", violations=[violation])
    with pytest.raises(openai.BadRequestError, match=r"prompt\[4\]: must be below"):
        await client.completions.create(model=MODEL, prompt=[1, 2, 3, 4, 2000])
    with pytest.raises(openai.BadRequestError, match=r"prompt\[[01]\]\[4\]: must be below"):
        await client.completions.create(model=MODEL, prompt=[[1, 2, 3, 4, 2000], [1, 2, 3, 4, 2000]])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not a JSON object"),
        (b"{", "not a JSON object"),
        (b"[1]", "not a JSON object"),
        (b'{"model": "m\xff", "messages": []}', "model: invalid UTF-8"),
        (b'{"model": "\\ud800", "messages": []}', "not a JSON object"),
        (b'{"model": "small", "messages": [], "temperature": NaN}', "not a JSON object"),
        (b'{"model": "small", "messages": [], "temperature": 1e999}', "temperature: number out of range"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not a JSON object"),
        (b'{"model": "small", "messages": [{"role": "u", "content": ' + b"[" * 50_000 + b"}", "not a JSON object"),
    ],
)
async def test_bodies_that_are_not_right_are_refused_with_words(address: str, body: bytes, says: str) -> None:
    status, _, answer = await post(address, "/v1/chat/completions", body)
    assert status == 400
    error = json.loads(answer)["error"]
    assert error["code"] == "BAD_FIELD"
    assert says in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("chat_template", "x"),
        ("skip_special_tokens", False),
        ("echo", True),
        ("best_of", 2),
        ("suffix", "end"),
        ("guided_json", {"a": 1}),
    ],
)
async def test_fields_that_would_change_the_answer_are_refused_by_name(address: str, field: str, value: Any) -> None:
    status, _, body = await post(address, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, field: value})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (501, "FEATURE_OFF", field)
    assert field in error["message"]


async def test_fields_that_ask_for_nothing_are_taken(address: str) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
    }
    status, _, _ = await post(
        address, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "suffix": None, **nothing}
    )
    assert status == 200


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type = image_url"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls"),
    ],
)
async def test_content_that_is_not_text_is_refused_by_its_place(address: str, message: Any, says: str) -> None:
    status, _, body = await post(address, "/v1/chat/completions", {"model": MODEL, "messages": [message]})
    assert status == 501
    assert says in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[1], 2], ["x"] * 65, {"a": 1}, None])
async def test_prompts_of_no_form_are_refused(address: str, prompt: Any) -> None:
    status, _, body = await post(address, "/v1/completions", {"model": MODEL, "prompt": prompt})
    assert (status, json.loads(body)["error"]["param"]) == (400, "prompt")


async def test_a_timeout_header_must_be_a_number(address: str) -> None:
    for value in ("soon", "0", "-5", "1e3"):
        status, _, body = await post(
            address, "/v1/completions", {"model": MODEL, "prompt": "x"}, x_request_timeout_ms=value
        )
        assert (status, json.loads(body)["error"]["param"]) == (400, "x-request-timeout-ms")


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read(address: str, core: FakeGenerations) -> None:
    status, _, body = await post(address, "/v1/completions", b"x", content_length=str(MAX_BODY_BYTES + 1))
    assert (status, json.loads(body)["error"]["code"]) == (400, "TOO_LARGE")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SECRET}\r\n"
        "transfer-encoding: chunked\r\n\r\n".encode()
    )
    piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    for _ in range(5):
        writer.write(piece)
    async with asyncio.timeout(5):
        assert b" 400 " in await reader.readline()
    writer.close()
    assert core.calls == []


async def test_the_largest_allowed_prompt_arrives_whole(client: openai.AsyncOpenAI, core: FakeGenerations) -> None:
    prompt = "é" * (MAX_BODY_BYTES // 2 - 100)
    await client.completions.create(model=MODEL, prompt=prompt, extra_headers={"content-type": "application/json"})
    assert len(core.calls[0].spec.prompt) == len(prompt)


async def test_paths_and_methods_that_are_not_there_answer_in_the_same_form(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.get("/nowhere", cast_to=object)
    with pytest.raises(openai.APIStatusError) as refused:
        await client.get("/completions", cast_to=object)
    assert refused.value.status_code == 405
    assert refused.value.type == "invalid_request_error"


async def test_an_exception_nobody_foresaw_says_nothing_outside(
    address: str, core: FakeGenerations, caplog: pytest.LogCaptureFixture
) -> None:
    core.refuse = ZeroDivisionError("secret detail")
    for stream in (False, True):
        status, _, body = await post(address, "/v1/completions", {"model": MODEL, "prompt": "x", "stream": stream})
        assert status == 500
        assert b"secret" not in body
        assert json.loads(body)["error"]["code"] == "INTERNAL"
    assert caplog.text.count("secret detail") >= 2


# --- streams that fail, wait, or are left


async def test_a_failure_after_the_first_text_is_an_event_and_then_done(
    address: str, client: openai.AsyncOpenAI, core: FakeGenerations
) -> None:
    core.script = lambda _spec: ["Hello", TrunklineError(Reason.POISON_SUSPECTED, "Two workers were lost.")]
    status, _, body = await post(
        address, "/v1/chat/completions", {"model": MODEL, "messages": QUESTION, "stream": True}
    )
    *_, error, done = frames(body)
    assert (status, done) == (200, "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "POISON_SUSPECTED"
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    with pytest.raises(openai.APIError, match="Two workers were lost"):
        async for _ in stream:
            pass


async def test_an_unforeseen_failure_in_mid_stream_says_nothing_outside(address: str, core: FakeGenerations) -> None:
    core.script = lambda _spec: ["Hello", ZeroDivisionError("secret detail")]
    _, _, body = await post(address, "/v1/completions", {"model": MODEL, "prompt": "x", "stream": True})
    assert b"secret" not in body
    assert frames(body)[-1] == "data: [DONE]"
    assert b'"INTERNAL"' in body


async def test_a_silent_stream_shows_life_by_comments_that_clients_skip(
    address: str, client: openai.AsyncOpenAI, core: FakeGenerations
) -> None:
    core.script = lambda _spec: [HEARTBEAT, "Hello", HEARTBEAT, "!"]
    body = (await post(address, "/v1/completions", {"model": MODEL, "prompt": "x", "stream": True}))[2]
    assert [frame.startswith(": ") for frame in frames(body)] == [True, False, True, False, False]
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello!"


async def test_headers_wait_for_the_first_text(address: str, core: FakeGenerations) -> None:
    core.script = lambda _spec: [0.1, TrunklineError(Reason.WOULD_MISS, "Too late.")]
    status, _, _ = await post(address, "/v1/completions", {"model": MODEL, "prompt": "x", "stream": True})
    assert status == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_silence_ends_its_generation_at_once(
    address: str, core: FakeGenerations, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    core.script = lambda _spec: [30.0, "never"]
    _, writer = await begin(address, stream)
    async with asyncio.timeout(5):
        call = await core.called()
        left_at = asyncio.get_running_loop().time()
        writer.close()
        await call.left.wait()
    assert asyncio.get_running_loop().time() - left_at < 0.5
    assert not call.finished
    await asyncio.sleep(0.05)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_leaving_a_stream_in_its_middle_ends_the_generation(
    client: openai.AsyncOpenAI, core: FakeGenerations
) -> None:
    core.script = lambda _spec: [step for _ in range(1000) for step in ("x", 0.01)]
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(2):
        await core.calls[0].left.wait()
    assert not core.calls[0].finished


async def test_a_client_timeout_ends_the_generation(client: openai.AsyncOpenAI, core: FakeGenerations) -> None:
    core.script = lambda _spec: [30.0, "never"]
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model=MODEL, messages=QUESTION, timeout=0.3)
    async with asyncio.timeout(2):
        await core.calls[0].left.wait()


async def test_a_client_that_reads_nothing_is_given_up(address: str, core: FakeGenerations) -> None:
    core.script = lambda _spec: [STUCK, *["x" * 100_000] * 1000]
    _, writer = await begin(address)
    async with asyncio.timeout(10):
        call = await core.called()
        await call.left.wait()
    assert not call.finished
    writer.transport.abort()


async def test_one_connection_carries_requests_one_after_the_other(address: str) -> None:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    for _ in range(3):
        ask(writer)
        async with asyncio.timeout(5):
            assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()


# --- embeddings, tokens, models


async def test_texts_and_token_ids_are_embedded_in_order(client: openai.AsyncOpenAI, address: str) -> None:
    for form in ("float", "base64"):
        answer = await client.embeddings.create(model=MODEL, input=["a", "bcd"], encoding_format=form)  # type: ignore[call-overload]
        assert [item.index for item in answer.data] == [0, 1]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)
    vectors = (await client.embeddings.create(model=MODEL, input=[[1, 2], [3]])).data  # the client asks for base64
    assert [[round(number, 6) for number in item.embedding] for item in vectors] == [[0, 2, 0.1], [1, 1, 0.1]]
    status, headers, body = await post(address, "/v1/embeddings", {"model": MODEL, "input": "x", "dimensions": 2})
    assert (status, json.loads(body)["error"]["param"]) == (501, "dimensions")
    status, headers, body = await post(address, "/v1/embeddings", {"model": MODEL, "input": "x"})
    assert headers["x-request-id"] == json.loads(body)["trunkline"]["request_id"] == "cd" * 16
    status, _, body = await post(address, "/v1/embeddings", {"model": MODEL, "input": "x", "encoding_format": "hex"})
    assert (status, json.loads(body)["error"]["param"]) == (400, "encoding_format")


async def test_texts_and_chats_become_tokens_and_tokens_text(address: str) -> None:
    async def tokens(**asked: Any) -> Any:
        return json.loads((await post(address, "/tokenize", {"model": MODEL, **asked}))[2])

    assert (await tokens(prompt="hé"))["count"] == 4
    plain = await tokens(prompt="hé", add_special_tokens=False)
    assert (plain["count"], plain["max_model_len"]) == (3, 100)
    assert (await tokens(messages=[{"role": "user", "content": "hi"}]))["count"] == 3
    assert (await tokens())["error"]["param"] == "prompt"
    _, _, text = await post(address, "/detokenize", {"model": MODEL, "tokens": (await tokens(prompt="hé"))["tokens"]})
    assert json.loads(text) == {"prompt": "<s>hé"}
    status, _, _ = await post(address, "/detokenize", {"model": "other", "tokens": [1]})
    assert status == 404


async def test_models_are_listed_and_found(client: openai.AsyncOpenAI, address: str) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "trunkline"
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        await client.models.retrieve("no-such-model")
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=NARROW, max_retries=0) as other:
        assert [model.id async for model in other.models.list()] == []
        with pytest.raises(openai.NotFoundError):
            await other.models.retrieve(MODEL)
