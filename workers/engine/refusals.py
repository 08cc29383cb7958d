"""Why the engine would not take a piece of work, before it costs anything.

Owns the last check: gateway and door refuse earlier and in kinder words, but nothing that gets here may break a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import Reason
from workers.engine.messages import Admit, Encode, Sampling, unpack_tokens

MAX_LOGPROBS = 20
SCOPE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed no, in a sentence a client may read."""

    reason: Reason
    message: str


def refusal(spec: Admit | Encode, vocab_size: int, max_context: int) -> Refusal | None:
    """The answer if `spec` can never be run by this model, else None."""
    flaws = _encode_flaws(spec, vocab_size) if isinstance(spec, Encode) else _admit_flaws(spec, vocab_size)
    flaw = next(flaws, None)
    if flaw is not None:
        return Refusal(Reason.BAD_FIELD, flaw)
    # A generation needs room for at least one token; an encode only for itself.
    longest = max(map(_length, spec.inputs)) if isinstance(spec, Encode) else _length(spec.prompt) + 1
    if longest > max_context:
        return Refusal(Reason.PROMPT_TOO_LONG, f"{longest} tokens are needed, the context holds {max_context}")
    return None


def _admit_flaws(spec: Admit, vocab_size: int) -> Iterator[str]:
    yield from _token_flaws("prompt", spec.prompt, vocab_size)
    if len({choice.index for choice in spec.choices}) != len(spec.choices) or not spec.choices:
        yield "choices must be distinct and at least one"
    for choice in spec.choices:
        if choice.emitted:
            yield from _token_flaws("emitted", choice.emitted, vocab_size)
        if _length(choice.emitted) >= spec.max_tokens:
            yield f"choice {choice.index} already has max_tokens ({spec.max_tokens})"
    if any(not 0 <= token < vocab_size for token in spec.stop_token_ids):
        yield f"stop_token_ids has ids outside the vocabulary of {vocab_size}"
    if len(spec.cache_scope) not in (0, SCOPE_BYTES):
        yield f"cache_scope must have {SCOPE_BYTES} bytes"
    yield from _sampling_flaws(spec.sampling, vocab_size)


def _encode_flaws(spec: Encode, vocab_size: int) -> Iterator[str]:
    if not spec.inputs:
        yield "there is nothing to encode"
    for data in spec.inputs:
        yield from _token_flaws("input", data, vocab_size)


def _token_flaws(name: str, data: bytes, vocab_size: int) -> Iterator[str]:
    tokens = unpack_tokens(data)
    if len(tokens) == 0:
        yield f"{name} is empty"
    elif tokens.min() < 0 or tokens.max() >= vocab_size:
        yield f"{name} has token ids outside the vocabulary of {vocab_size}"


def _sampling_flaws(sampling: Sampling, vocab_size: int) -> Iterator[str]:
    ranges = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_k", sampling.top_k, 0, math.inf),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, math.inf),
        ("presence_penalty", sampling.presence_penalty, -math.inf, math.inf),
        ("frequency_penalty", sampling.frequency_penalty, -math.inf, math.inf),
        ("logprobs", sampling.logprobs, -1, MAX_LOGPROBS),
    )
    for name, value, least, most in ranges:
        if not (least <= value <= most and math.isfinite(value)):
            yield f"{name} {value} is out of range"
    if sampling.repetition_penalty == 0.0:
        yield "repetition_penalty 0 divides by zero"
    if not _bias_sound(sampling.logit_bias, vocab_size):
        yield "logit_bias needs finite values for ids of the vocabulary"


def _bias_sound(bias: dict[int, float], vocab_size: int) -> bool:
    return all(0 <= token < vocab_size and math.isfinite(value) for token, value in bias.items())


def _length(data: bytes) -> int:
    return len(data) // 4
