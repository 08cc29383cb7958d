"""The hash of what a client asked for under an idempotency key: committed vectors, a second computation, and the rule
which fields count."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
from google.protobuf import text_format

from shared.wire import body_hash
from trunkline.inference.v1 import inference_pb2 as pb

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "body_hash.json").read_text())
NOT_COUNTED = {
    "priority", "deadline_ms", "client_request_id", "session_id", "cache_salt", "resume_window_ms", "idempotency_key",
}  # fmt: skip
FULL = """
    model: "m" prompt: "Hello" sampling { temperature: 0.5 } max_tokens: 4 min_tokens: 1 stop: "x" stop_token_ids: 3
    include_stop: true ignore_eos: true n: 2 echo: true return_token_ids: true priority: 1 deadline_ms: 5
    client_request_id: "c" session_id: "s" cache_salt: "z" resume_window_ms: 9 idempotency_key: "k"
"""


def spec(text: str) -> pb.GenerationSpec:
    return text_format.Parse(text, pb.GenerationSpec())


def field(number: int, value: bytes) -> bytes:
    return struct.pack("<II", number, len(value)) + value


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["spec"][:40])
def test_the_hash_is_that_of_the_committed_vectors(vector: dict[str, str]) -> None:
    assert body_hash(spec(vector["spec"])).hex() == vector["sha256"]


def test_the_hash_is_over_length_prefixed_fields_in_order_of_their_numbers() -> None:
    ids = field(1, struct.pack("<3I", 1, 2, 300))
    whole = field(1, b"m") + field(3, ids) + field(6, struct.pack("<Q", 7)) + field(11, struct.pack("<Q", 1))
    asked = spec('model: "m" prompt_token_ids { ids: [1, 2, 300] } max_tokens: 7 n: 2 ignore_eos: true')
    assert body_hash(asked) == hashlib.sha256(whole + field(12, struct.pack("<Q", 2))).digest()


@pytest.mark.parametrize("name", [field.name for field in spec(FULL).DESCRIPTOR.fields])
def test_every_field_counts_but_for_those_that_may_differ_between_two_tries(name: str) -> None:
    whole, less = spec(FULL), spec(FULL)
    if name in ("prompt_token_ids", "chat"):
        getattr(less, name).SetInParent()
    else:
        less.ClearField(name)
    assert (body_hash(less) == body_hash(whole)) == (name in NOT_COUNTED)


def test_kinds_of_input_with_equal_bytes_differ_and_so_do_lists_that_join_alike() -> None:
    made = [
        'prompt: "ab"', 'chat { messages { content: "ab" } }', 'chat { messages { role: "ab" } }',
        'chat { messages { content: "a" } messages { content: "b" } }', 'prompt: "" stop: "ab"',
        'prompt: "" stop: "a" stop: "b"', "prompt_token_ids { ids: 1 } stop_token_ids: 2",
        "prompt_token_ids { ids: [1, 2] }", 'prompt: "" max_tokens: 0', 'prompt: ""',
    ]  # fmt: skip
    assert len({body_hash(spec(text)) for text in made}) == len(made)
