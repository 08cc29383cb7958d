"""Bounds of a generation: each one refused by name, all at once, and the values unset fields take."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from google.protobuf import text_format

from gateway.validate import check_length, resolve_sampling, validate, validate_embed
from shared.errors import Reason, TrunklineError
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

VERSION = common_pb2.ModelVersion(
    model="small", version="1", max_context=100, vocab_size=1000, features=["generate", "logprobs"]
)


def spec(text: str = "", **fields: Any) -> inference_pb2.GenerationSpec:
    made = inference_pb2.GenerationSpec(model="small", **fields)
    text_format.Merge(text, made)
    if made.WhichOneof("input") is None and "no_input" not in text:
        made.prompt = "Hello"
    return made


def refused(made: inference_pb2.GenerationSpec, version: common_pb2.ModelVersion = VERSION) -> TrunklineError:
    with pytest.raises(TrunklineError) as caught:
        validate(made, version)
    return caught.value


def test_a_plain_request_passes() -> None:
    validate(spec(), VERSION)
    validate(spec("n: 16 max_tokens: 100 min_tokens: 100 sampling { temperature: 2 top_p: 1 logprobs: 20 }"), VERSION)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('prompt: ""', "prompt"),
        ("prompt_token_ids {}", "prompt_token_ids.ids"),
        ("prompt_token_ids { ids: [1, 999, 1000] }", "prompt_token_ids.ids[2]"),
        ("chat {}", "chat.messages"),
        ('chat { messages { content: "x" } }', "chat.messages[0].role"),
        ('chat { messages { role: "assistant" } continue_final_message: true }', "chat.messages[0].content"),
        ("sampling { temperature: -0.1 }", "sampling.temperature"),
        ("sampling { temperature: 2.1 }", "sampling.temperature"),
        ("sampling { temperature: nan }", "sampling.temperature"),
        ("sampling { top_p: 0 }", "sampling.top_p"),
        ("sampling { top_p: inf }", "sampling.top_p"),
        ("sampling { min_p: 1.5 }", "sampling.min_p"),
        ("sampling { top_k: 1001 }", "sampling.top_k"),
        ("sampling { repetition_penalty: 0 }", "sampling.repetition_penalty"),
        ("sampling { presence_penalty: -2.5 }", "sampling.presence_penalty"),
        ("sampling { frequency_penalty: 3 }", "sampling.frequency_penalty"),
        ("sampling { logit_bias { key: 1000 value: 1 } }", "sampling.logit_bias[1000]"),
        ("sampling { logit_bias { key: 7 value: 101 } }", "sampling.logit_bias[7]"),
        ("sampling { logit_bias { key: 7 value: nan } }", "sampling.logit_bias[7]"),
        ("sampling { logprobs: 21 }", "sampling.logprobs"),
        ("max_tokens: 0", "max_tokens"),
        ("max_tokens: 101", "max_tokens"),
        ("max_tokens: 5 min_tokens: 6", "min_tokens"),
        ("min_tokens: 101", "min_tokens"),
        ("n: 0", "n"),
        ("n: 17", "n"),
        ('stop: ""', "stop[0]"),
        ("stop_token_ids: 1000", "stop_token_ids[0]"),
        ("priority: 101", "priority"),
        ('client_request_id: "a\\nb"', "client_request_id"),
    ],
)
def test_each_bad_field_is_named(text: str, field: str) -> None:
    error = refused(spec(text))
    assert error.reason is Reason.BAD_FIELD
    assert [violation.field for violation in error.violations] == [f"spec.{field}"]
    assert field in error.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["é" * 129]}, "stop[0]"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"client_request_id": "é" * 65}, "client_request_id"),
        ({"session_id": "x" * 129}, "session_id"),
        ({"cache_salt": "x" * 65}, "cache_salt"),
        ({"sampling": common_pb2.Sampling(logit_bias=dict.fromkeys(range(1000), 1.0) | {1001: 1.0})}, "sampling"),
        ({"chat": inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="u")] * 4097)}, "chat.messages"),
        ({"chat": inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="u" * 65)])}, "chat.messages[0].role"),
    ],
)
def test_each_bound_on_size_is_kept(fields: dict[str, Any], field: str) -> None:
    error = refused(spec(**fields))
    assert error.violations[0].field.startswith(f"spec.{field}")


def test_more_than_the_allowed_biases_are_refused() -> None:
    version = common_pb2.ModelVersion(max_context=100, vocab_size=5000, features=["generate"])
    error = refused(spec(sampling=common_pb2.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))), version)
    assert error.violations[0].field == "spec.sampling.logit_bias"


def test_all_violations_come_at_once() -> None:
    error = refused(spec("sampling { temperature: 9 top_p: 7 } n: 99 max_tokens: 0 stop: '' prompt: ''"))
    assert {violation.field for violation in error.violations} == {
        f"spec.{field}" for field in ("prompt", "sampling.temperature", "sampling.top_p", "n", "max_tokens", "stop[0]")
    }


def test_a_flood_of_violations_is_cut() -> None:
    error = refused(spec(prompt_token_ids=inference_pb2.TokenIds(ids=[5000] * 100_000)))
    assert len(error.violations) < 40
    assert "more" in error.violations[-1].description


def test_an_input_is_needed() -> None:
    error = refused(inference_pb2.GenerationSpec(model="small"))
    assert error.violations[0].field == "spec.input"


@pytest.mark.parametrize("text", ["resume_window_ms: 3600001", 'idempotency_key: "\\n"'])
def test_windows_and_keys_have_bounds(text: str) -> None:
    assert [item.field for item in refused(spec(text)).violations] == [f"spec.{text.split(':')[0]}"]


def test_bad_fields_come_before_features_that_are_off() -> None:
    plain = common_pb2.ModelVersion(model="small", max_context=100, vocab_size=1000)
    assert refused(spec("n: 99"), plain).reason is Reason.BAD_FIELD


def test_what_a_version_does_not_serve_is_off() -> None:
    plain = common_pb2.ModelVersion(model="small", max_context=100, vocab_size=1000, features=["generate"])
    assert refused(spec("sampling { logprobs: 0 }"), plain).reason is Reason.FEATURE_OFF
    encoder = common_pb2.ModelVersion(model="small", max_context=100, vocab_size=1000, features=["encode"])
    assert refused(spec(), encoder).reason is Reason.FEATURE_OFF


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [(10, "", 90), (10, "max_tokens: 7", 7), (95, "max_tokens: 7", 5), (99, "", 1), (99, "min_tokens: 1", 1)],
)
def test_max_tokens_is_what_was_asked_for_as_far_as_the_context_goes(prompt: int, text: str, expected: int) -> None:
    assert check_length(prompt, spec(text), VERSION) == expected


@pytest.mark.parametrize(("prompt", "text"), [(100, ""), (4000, "max_tokens: 1"), (95, "min_tokens: 6")])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(prompt: int, text: str) -> None:
    with pytest.raises(TrunklineError) as caught:
        check_length(prompt, spec(text), VERSION)
    assert caught.value.reason is Reason.PROMPT_TOO_LONG
    assert str(prompt) in caught.value.message
    assert "100" in caught.value.message
    assert caught.value.metadata == {"prompt_tokens": str(prompt), "max_context": "100"}


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(TrunklineError) as caught:
        check_length(0, spec(), VERSION)
    assert caught.value.violations[0].field == "spec.prompt"


def test_unset_sampling_takes_the_models_defaults_then_the_neutral_values() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": [1, 2], "do_sample": True}
    got = resolve_sampling(spec("sampling { top_p: 0.5 }"), config, random.Random(1))
    assert math.isclose(got.temperature, 0.6, rel_tol=1e-6)
    assert (got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.5, 0, 0.0, 1.0)
    for field in got.DESCRIPTOR.fields:
        if field.name not in ("logit_bias", "logprobs"):
            assert got.HasField(field.name), field.name  # type: ignore[arg-type]
    assert not got.HasField("logprobs")


def test_a_model_that_does_not_sample_is_greedy_unless_asked() -> None:
    config = {"do_sample": False, "temperature": 0.7}
    assert resolve_sampling(spec(), config, random.Random(1)).temperature == 0
    assert resolve_sampling(spec("sampling { temperature: 1 }"), config, random.Random(1)).temperature == 1


def test_a_seed_is_kept_or_drawn_from_the_given_source() -> None:
    assert resolve_sampling(spec("sampling { seed: 0 }"), {}, random.Random(1)).seed == 0
    drawn = [resolve_sampling(spec(), {}, random.Random(1)).seed for _ in range(2)]
    assert drawn[0] == drawn[1] != 0
    original = spec()
    resolve_sampling(original, {}, random.Random(1))
    assert not original.HasField("sampling"), "the client's own spec is left as it is"


def test_embedding_inputs_are_checked_all_at_once() -> None:
    version = common_pb2.ModelVersion(model="small", vocab_size=10, features=["encode"])
    request = inference_pb2.EmbedRequest(model="small")
    with pytest.raises(TrunklineError, match="inputs"):
        validate_embed(request, version)
    request.inputs.add(text="ok")
    validate_embed(request, version)
    request.inputs.add(text="")
    request.inputs.add()
    request.inputs.add().token_ids.ids.extend([9, 10])
    with pytest.raises(TrunklineError) as caught:
        validate_embed(request, version)
    assert [item.field for item in caught.value.violations] == ["inputs[1]", "inputs[2]", "inputs[3].token_ids.ids[1]"]
    with pytest.raises(TrunklineError) as off:
        validate_embed(inference_pb2.EmbedRequest(inputs=request.inputs[:1]), VERSION)
    assert off.value.reason is Reason.FEATURE_OFF
