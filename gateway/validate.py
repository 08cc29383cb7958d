"""Checks of a generation before it costs anything, and the values that unset fields take.

Owns the bounds written in inference.proto. The one rule: a refusal names every bad field at once, by its path in the
proto, and is decided before tokenising; only the length needs the tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from shared.errors import Reason, TrunklineError, Violation
from shared.ids import Rng
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

MAX_CHOICES: Final = 16
MAX_STOPS: Final = 16
MAX_STOP_BYTES: Final = 256
MAX_STOP_TOKENS: Final = 64
MAX_LOGIT_BIAS: Final = 1024
MAX_LOGPROBS: Final = 20
MAX_MESSAGES: Final = 4096
MAX_ROLE_BYTES: Final = 64
MAX_PRIORITY: Final = 100
MAX_EMBED_INPUTS: Final = 256
MAX_VIOLATIONS: Final = 32

# (field, lower bound, may equal it, upper bound)
_RANGES: Final = (
    ("temperature", 0.0, True, 2.0),
    ("top_p", 0.0, False, 1.0),
    ("min_p", 0.0, True, 1.0),
    ("repetition_penalty", 0.0, False, 10.0),
    ("presence_penalty", -2.0, True, 2.0),
    ("frequency_penalty", -2.0, True, 2.0),
)
_TEXT_LIMITS: Final = (
    ("client_request_id", 128),
    ("session_id", 128),
    ("cache_salt", 64),
    ("idempotency_key", 128),
)
MAX_RESUME_WINDOW_MS: Final = 3_600_000

# What an unset field becomes where the model's generation defaults do not say otherwise.
_NEUTRAL: Final[Mapping[str, float]] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def validate(spec: inference_pb2.GenerationSpec, version: common_pb2.ModelVersion) -> None:
    """Check everything that does not need tokens.

    Raises BAD_FIELD with all violations; FEATURE_OFF for what this version or this build does not serve.
    """
    _refuse_if_any(_violations(spec, version))
    if "generate" not in version.features:
        raise _feature_off("spec.model", f"the model {spec.model} does not generate text")
    if spec.sampling.HasField("logprobs") and "logprobs" not in version.features:
        raise _feature_off("spec.sampling.logprobs", f"the model {spec.model} does not report log-probabilities")


def resumable(spec: inference_pb2.GenerationSpec) -> bool:
    """Whether it is to outlive its client and its gateway."""
    return bool(spec.resume_window_ms or spec.idempotency_key)


def check_length(prompt_tokens: int, spec: inference_pb2.GenerationSpec, version: common_pb2.ModelVersion) -> int:
    """max_tokens as it holds: what was asked for, at most what the context leaves.

    Raises PROMPT_TOO_LONG where nothing, or less than min_tokens, is left; BAD_FIELD for a prompt without tokens.
    """
    if prompt_tokens == 0:
        _refuse_if_any([Violation(f"spec.{spec.WhichOneof('input')}", "has no tokens")])
    room = version.max_context - prompt_tokens
    least = max(1, spec.min_tokens)
    if room < least:
        raise TrunklineError(
            Reason.PROMPT_TOO_LONG,
            f"The prompt has {prompt_tokens} tokens; the context of {spec.model} holds {version.max_context}, "
            f"{least} of them for the answer.",
            metadata={"prompt_tokens": str(prompt_tokens), "max_context": str(version.max_context)},
        )
    return min(spec.max_tokens, room) if spec.HasField("max_tokens") else room


def resolve_sampling(
    spec: inference_pb2.GenerationSpec, generation_config: Mapping[str, Any], rng: Rng
) -> common_pb2.Sampling:
    """The request's sampling with every field set (logprobs excepted: unset means none), the seed drawn if need be.

    Unset fields take the value of the model's generation_config.json, then the neutral one. A model whose configuration
    says `do_sample: false` is greedy unless asked otherwise.
    """
    sampling = common_pb2.Sampling()
    sampling.CopyFrom(spec.sampling)
    defaults = {key: generation_config[key] for key in _NEUTRAL if generation_config.get(key) is not None}
    if generation_config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    for field, neutral in _NEUTRAL.items():
        if not sampling.HasField(field):
            setattr(sampling, field, defaults.get(field, neutral))
    if not sampling.HasField("seed"):
        sampling.seed = rng.getrandbits(64)
    return sampling


def validate_embed(request: inference_pb2.EmbedRequest, version: common_pb2.ModelVersion) -> None:
    """Check an embedding request before tokenising. Raises BAD_FIELD with all violations, FEATURE_OFF."""
    found: list[Violation] = []
    if not 1 <= len(request.inputs) <= MAX_EMBED_INPUTS:
        found.append(Violation("inputs", f"must have 1 to {MAX_EMBED_INPUTS} entries, has {len(request.inputs)}"))
    for place, item in enumerate(request.inputs[:MAX_EMBED_INPUTS]):
        which = item.WhichOneof("input")
        if which == "token_ids":
            found.extend(_token_ids(f"inputs[{place}].token_ids.ids", item.token_ids.ids, version.vocab_size))
        if which is None or (which == "text" and not item.text):
            found.append(Violation(f"inputs[{place}]", "must not be empty"))
    _refuse_if_any(found)
    if "encode" not in version.features:
        raise _feature_off("model", f"the model {request.model} does not embed")


def _violations(spec: inference_pb2.GenerationSpec, version: common_pb2.ModelVersion) -> Iterator[Violation]:
    parts = (_input(spec, version), _sampling(spec.sampling, version), _counts(spec, version))
    for violation in itertools.chain(*parts, _stops(spec, version), _texts(spec)):
        yield Violation(f"spec.{violation.field}", violation.description)


def _input(spec: inference_pb2.GenerationSpec, version: common_pb2.ModelVersion) -> Iterator[Violation]:
    match spec.WhichOneof("input"):
        case "prompt":
            if not spec.prompt:
                yield Violation("prompt", "must not be empty")
        case "prompt_token_ids":
            yield from _token_ids("prompt_token_ids.ids", spec.prompt_token_ids.ids, version.vocab_size)
        case "chat":
            yield from _chat(spec.chat)
        case _:
            yield Violation("input", "one of prompt, prompt_token_ids and chat is needed")


def _chat(chat: inference_pb2.Chat) -> Iterator[Violation]:
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        yield Violation("chat.messages", f"must have 1 to {MAX_MESSAGES} entries, has {len(chat.messages)}")
        return
    for place, message in enumerate(chat.messages):
        if not 1 <= len(message.role.encode()) <= MAX_ROLE_BYTES:
            yield Violation(f"chat.messages[{place}].role", f"must have 1 to {MAX_ROLE_BYTES} bytes")
    if chat.continue_final_message and not chat.messages[-1].content.strip():
        yield Violation(f"chat.messages[{len(chat.messages) - 1}].content", "must not be empty to be continued")


def _sampling(sampling: common_pb2.Sampling, version: common_pb2.ModelVersion) -> Iterator[Violation]:
    for field, low, closed, high in _RANGES:
        value = getattr(sampling, field)
        if sampling.HasField(field) and not ((low <= value if closed else low < value) and value <= high):
            bounds = f"{'[' if closed else '('}{low:g}, {high:g}]"
            yield Violation(f"sampling.{field}", f"must be in {bounds}, is {value:g}")
    if sampling.top_k > version.vocab_size:
        yield Violation("sampling.top_k", f"must be at most the vocabulary, {version.vocab_size}, is {sampling.top_k}")
    if sampling.logprobs > MAX_LOGPROBS:
        yield Violation("sampling.logprobs", f"must be at most {MAX_LOGPROBS}, is {sampling.logprobs}")
    yield from _logit_bias(sampling.logit_bias, version.vocab_size)


def _logit_bias(bias: Mapping[int, float], vocab_size: int) -> Iterator[Violation]:
    if len(bias) > MAX_LOGIT_BIAS:
        yield Violation("sampling.logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries, has {len(bias)}")
        return
    for token_id, value in bias.items():
        if token_id >= vocab_size:
            yield Violation(f"sampling.logit_bias[{token_id}]", f"token ids must be below {vocab_size}")
        elif not (math.isfinite(value) and -100 <= value <= 100):
            yield Violation(f"sampling.logit_bias[{token_id}]", f"must be in [-100, 100], is {value:g}")


def _counts(spec: inference_pb2.GenerationSpec, version: common_pb2.ModelVersion) -> Iterator[Violation]:
    most = spec.max_tokens if spec.HasField("max_tokens") else version.max_context
    if not 1 <= most <= version.max_context:
        yield Violation("max_tokens", f"must be in [1, {version.max_context}], is {most}")
    elif spec.min_tokens > most:
        yield Violation("min_tokens", f"must be at most max_tokens, {most}, is {spec.min_tokens}")
    if spec.HasField("n") and not 1 <= spec.n <= MAX_CHOICES:
        yield Violation("n", f"must be in [1, {MAX_CHOICES}], is {spec.n}")
    if not -MAX_PRIORITY <= spec.priority <= MAX_PRIORITY:
        yield Violation("priority", f"must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], is {spec.priority}")


def _stops(spec: inference_pb2.GenerationSpec, version: common_pb2.ModelVersion) -> Iterator[Violation]:
    if len(spec.stop) > MAX_STOPS:
        yield Violation("stop", f"must have at most {MAX_STOPS} entries, has {len(spec.stop)}")
    for place, stop in enumerate(spec.stop[:MAX_STOPS]):
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            yield Violation(f"stop[{place}]", f"must have 1 to {MAX_STOP_BYTES} bytes, has {len(stop.encode())}")
    if len(spec.stop_token_ids) > MAX_STOP_TOKENS:
        yield Violation(
            "stop_token_ids", f"must have at most {MAX_STOP_TOKENS} entries, has {len(spec.stop_token_ids)}"
        )
    for place, token_id in enumerate(spec.stop_token_ids[:MAX_STOP_TOKENS]):
        if token_id >= version.vocab_size:
            yield Violation(f"stop_token_ids[{place}]", f"must be below {version.vocab_size}")


def _texts(spec: inference_pb2.GenerationSpec) -> Iterator[Violation]:
    for field, limit in _TEXT_LIMITS:
        value: str = getattr(spec, field)
        if len(value.encode()) > limit:
            yield Violation(field, f"must have at most {limit} bytes, has {len(value.encode())}")
    if spec.resume_window_ms > MAX_RESUME_WINDOW_MS:
        yield Violation("resume_window_ms", f"must be at most {MAX_RESUME_WINDOW_MS}, is {spec.resume_window_ms}")
    if not spec.idempotency_key.isprintable():
        yield Violation("idempotency_key", "must be printable")
    if not spec.client_request_id.isprintable():
        yield Violation("client_request_id", "must be printable")


def _token_ids(field: str, ids: Sequence[int], vocab_size: int) -> Iterator[Violation]:
    if not ids:
        yield Violation(field, "must not be empty")
    elif max(ids) >= vocab_size:
        for place, token_id in enumerate(ids):
            if token_id >= vocab_size:
                yield Violation(f"{field}[{place}]", f"must be below {vocab_size}")


def _refuse_if_any(violations: Iterable[Violation]) -> None:
    found = list(itertools.islice(violations, MAX_VIOLATIONS + 1))
    if not found:
        return
    if len(found) > MAX_VIOLATIONS:
        found[-1] = Violation("", "more fields are not valid")
    message = "; ".join(f"{violation.field}: {violation.description}" for violation in found)
    raise TrunklineError(Reason.BAD_FIELD, message, violations=found)


def _feature_off(field: str, why: str) -> TrunklineError:
    return TrunklineError(Reason.FEATURE_OFF, f"{field}: {why}", metadata={"field": field})
