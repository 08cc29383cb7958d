"""The `openai` package against a running gateway: chat, completions, streaming, errors, timeouts, cancel."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.harness import MODEL, Mesh
from tests.e2e.leaks import assert_nothing_left

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONTINUED = "The capital of France is"


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.http_addresses()[0]}/v1", api_key=mesh.key, max_retries=0) as made:
        yield made


def test_models_lists_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_a_chat_answers_with_text_usage_and_a_finish_reason(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, temperature=0, seed=1)
    (choice,) = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_equals_the_unary_one(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_completions_take_text_and_token_ids_and_report_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    text = client.completions.create(prompt=CONTINUED, logprobs=2, **asked)
    assert text.choices[0].text.startswith(" Paris")
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or []) == 4
    ids = [504, 3575, 282, 4649, 314]  # the tokens of CONTINUED
    again = client.completions.create(prompt=ids, **asked)
    assert again.choices[0].text == text.choices[0].text


def test_completions_honour_n_stop_min_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3,", max_tokens=12, n=3, temperature=0.9, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1
    stopped = client.completions.create(model=MODEL, prompt=CONTINUED, max_tokens=30, temperature=0, stop=["Paris"])
    assert stopped.choices[0].finish_reason == "stop"
    assert "Paris" not in stopped.choices[0].text
    long = client.completions.create(
        model=MODEL, prompt=CONTINUED, max_tokens=40, temperature=0, extra_body={"ignore_eos": True, "min_tokens": 40}
    )
    assert long.usage is not None
    assert long.usage.completion_tokens == 40
    assert long.choices[0].finish_reason == "length"


def test_errors_are_typed_and_name_every_bad_parameter(client: openai.OpenAI, mesh: Mesh) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9, top_p=7, n=99)
    assert all(name in str(bad.value) for name in ("temperature", "top_p", "n"))
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=8)
    assert "8192" in str(long.value)
    stranger = client.with_options(api_key="tl_nobody_x")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_client_timeout_ends_the_work(client: openai.OpenAI) -> None:
    began = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(
            model=MODEL, prompt=CONTINUED, max_tokens=2000, extra_body={"ignore_eos": True}, timeout=1.0
        )
    assert time.monotonic() - began < 3.0


async def test_leaving_a_stream_cancels_the_generation(mesh: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http_addresses()[0]}/v1", api_key=mesh.key) as client:
        stream = await client.completions.create(
            model=MODEL, prompt=CONTINUED, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
    await assert_nothing_left(mesh)
