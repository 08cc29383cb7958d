"""The rest of the HTTP faces against a running mesh: embeddings, tokens, headers, receipts, several prompts."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import Any

import openai

from tests.e2e.harness import MODEL, Mesh


def call(mesh: Mesh, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    request = urllib.request.Request(
        mesh.http_addresses()[0] + path,
        json.dumps({"model": MODEL} | body).encode(),
        {"authorization": f"Bearer {mesh.key}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, json.load(answer)
    except urllib.error.HTTPError as exc:
        return exc.code, {k.lower(): v for k, v in exc.headers.items()}, json.load(exc)


def test_embeddings_have_length_one_and_tell_alike_from_unlike(mesh: Mesh) -> None:
    with openai.OpenAI(base_url=f"{mesh.http_addresses()[0]}/v1", api_key=mesh.key, max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=["a small cat", "a small kitten", "interest rates rose"])
    vectors = [item.embedding for item in answer.data]
    assert all(math.isclose(sum(number**2 for number in vector), 1, abs_tol=1e-3) for vector in vectors)
    alike, unlike = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert alike > unlike


def test_tokens_of_a_text_come_back_and_serve_as_a_prompt(mesh: Mesh) -> None:
    _, _, tokens = call(mesh, "/tokenize", {"prompt": "The capital of France is"})
    assert call(mesh, "/detokenize", {"tokens": tokens["tokens"]})[2] == {"prompt": "The capital of France is"}
    asked = {"max_tokens": 4, "temperature": 0}
    by_ids = call(mesh, "/v1/completions", {"prompt": tokens["tokens"], **asked})[2]
    by_text = call(mesh, "/v1/completions", {"prompt": "The capital of France is", **asked})[2]
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"]["prompt_tokens"] == tokens["count"]


def test_an_answer_carries_ids_limits_and_a_receipt_that_adds_up(mesh: Mesh) -> None:
    status, headers, body = call(mesh, "/v1/completions", {"prompt": "One, two,", "max_tokens": 8})
    assert status == 200
    extension = body["trunkline"]
    assert headers["x-request-id"] == extension["request_id"] == body["id"].removeprefix("cmpl-")
    assert headers["x-trace-id"] == extension["trace_id"] == extension["receipt"]["trace_id"]
    assert int(headers["x-ratelimit-remaining-requests"]) < int(headers["x-ratelimit-limit-requests"])
    receipt = {name: value for name, value in extension["receipt"].items() if name.endswith("_ms")}
    assert math.isclose(receipt.pop("total_ms"), sum(receipt.values()), abs_tol=0.1)


def test_several_prompts_answer_as_each_alone(mesh: Mesh) -> None:
    prompts = ["The capital of France is", "1, 2, 3,"]
    asked = {"max_tokens": 6, "temperature": 0}
    together = call(mesh, "/v1/completions", {"prompt": prompts, **asked})[2]["choices"]
    alone = [call(mesh, "/v1/completions", {"prompt": prompt, **asked})[2]["choices"][0] for prompt in prompts]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]
    assert [choice["index"] for choice in together] == [0, 1]


def test_refusals_of_the_whole_mesh_name_the_clients_fields(mesh: Mesh) -> None:
    status, _, body = call(mesh, "/v1/completions", {"prompt": "x", "top_p": 0, "logit_bias": {"49152": 1}, "n": 17})
    assert status == 400
    assert {item["field"] for item in body["error"]["violations"]} == {"top_p", "logit_bias[49152]", "n"}
    status, _, body = call(mesh, "/v1/completions", {"prompt": "x", "resume_window_ms": 3_600_001})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "BAD_FIELD", "resume_window_ms")
    status, _, body = call(mesh, "/v1/completions", {"prompt": [1, 2, 60_000]})
    assert (status, body["error"]["param"]) == (400, "prompt[2]")
