"""OpenAI requests as generations, and the way back from a spec's fields to the names a client sent.

The one rule: what a face promises beyond the spec (a default, an older name) is decided here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.openai_types import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Generate,
    Message,
    Prompt,
    TokenizeRequest,
    bad_fields,
    not_served,
)
from gateway.validate import MAX_EMBED_INPUTS
from shared.errors import Violation
from trunkline.inference.v1 import inference_pb2

MAX_PROMPTS: Final = 64
COMPLETION_MAX_TOKENS: Final = 16  # OpenAI's default for completions; chats take what the context leaves

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SAME_NAME: Final = ("max_tokens", "min_tokens", "n", "ignore_eos", "return_token_ids", "priority")
_TEXTS: Final = ("session_id", "cache_salt", "resume_window_ms", "idempotency_key")


def chat_spec(request: ChatRequest) -> inference_pb2.GenerationSpec:
    """The generation a chat asks for. Raises BAD_FIELD, FEATURE_OFF."""
    _check_turn(request)
    spec = _spec(request)
    spec.chat.continue_final_message = bool(request.continue_final_message)
    spec.chat.messages.extend(chat_messages(request.messages))
    if request.logprobs:
        spec.sampling.logprobs = request.top_logprobs or 0
    elif request.top_logprobs:
        raise bad_fields([Violation("top_logprobs", "needs logprobs to be true")])
    return spec


def completion_specs(request: CompletionRequest) -> list[inference_pb2.GenerationSpec]:
    """One generation per prompt. Raises BAD_FIELD, FEATURE_OFF."""
    if request.echo and request.logprobs is not None:
        raise not_served("echo with logprobs")
    specs = []
    for prompt in prompts(request.prompt, "prompt", MAX_PROMPTS):
        spec = _spec(request)
        if isinstance(prompt, str):
            spec.prompt = prompt
        else:
            spec.prompt_token_ids.ids.extend(prompt)
        if not spec.HasField("max_tokens"):
            spec.max_tokens = COMPLETION_MAX_TOKENS
        spec.echo = bool(request.echo)
        if request.logprobs is not None:
            spec.sampling.logprobs = request.logprobs
        specs.append(spec)
    return specs


def set_key(specs: Sequence[inference_pb2.GenerationSpec], key: str | None) -> None:
    """The header Idempotency-Key, which says the same as the body's field. Raises BAD_FIELD where they differ, and
    FEATURE_OFF for several prompts: a key and a cursor name one generation."""
    for spec in specs:
        if key is not None and spec.idempotency_key not in ("", key):
            raise bad_fields([Violation("idempotency_key", "is not that of the header Idempotency-Key")])
        spec.idempotency_key = key or spec.idempotency_key
        if len(specs) > 1 and (spec.idempotency_key or spec.resume_window_ms):
            raise not_served("several prompts in a resumable request")


def embed_request(request: EmbeddingRequest) -> inference_pb2.EmbedRequest:
    """The embedding call. Raises BAD_FIELD."""
    if request.encoding_format not in (None, "float", "base64"):
        raise bad_fields([Violation("encoding_format", "must be float or base64")])
    made = inference_pb2.EmbedRequest(model=request.model)
    if request.normalize is not None:
        made.normalize = request.normalize
    for item in prompts(request.input, "input", MAX_EMBED_INPUTS):
        if isinstance(item, str):
            made.inputs.add(text=item)
        else:
            made.inputs.add().token_ids.ids.extend(item)
    return made


def tokenize_spec(request: TokenizeRequest) -> tuple[inference_pb2.GenerationSpec, bool]:
    """What to tokenise, and whether with the tokenizer's special tokens. Raises BAD_FIELD, FEATURE_OFF."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_fields([Violation("prompt", "either prompt or messages is needed")])
    spec = inference_pb2.GenerationSpec(model=request.model)
    if request.messages is not None:
        spec.chat.messages.extend(chat_messages(request.messages))
    else:
        spec.prompt = request.prompt or ""
    return spec, request.add_special_tokens is not False


def chat_messages(messages: Sequence[Message]) -> list[inference_pb2.ChatMessage]:
    """Messages with their parts joined by line breaks; what is not text is refused (FEATURE_OFF)."""
    return [
        inference_pb2.ChatMessage(
            # OpenAI's newer name for the same role, which templates do not know.
            role="system" if message.role == "developer" else message.role,
            content=_content(message, f"messages[{place}]"),
        )
        for place, message in enumerate(messages)
    ]


def prompts(value: Prompt, field: str, most: int) -> list[str | list[int]]:
    """The prompts of any of OpenAI's four forms: a text, texts, token ids, lists of token ids. Raises BAD_FIELD."""
    if isinstance(value, str):
        return [value]
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return [[item for item in value if isinstance(item, int)]]
    if len(kinds) != 1:
        raise bad_fields([Violation(field, "must hold texts, token ids or lists of token ids, and not be empty")])
    if len(value) > most:
        raise bad_fields([Violation(field, f"must have at most {most} entries, has {len(value)}")])
    return [item for item in value if not isinstance(item, int)]


def _check_turn(request: ChatRequest) -> None:
    starts_turn = request.add_generation_prompt
    if request.continue_final_message and starts_turn:
        raise bad_fields([Violation("continue_final_message", "cannot go with add_generation_prompt")])
    if starts_turn is False and not request.continue_final_message:
        raise not_served("add_generation_prompt = false without continue_final_message")


def _content(message: Message, path: str) -> str:
    if message.tool_calls:
        raise not_served(f"{path}.tool_calls")
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    for place, part in enumerate(message.content):
        if part.type != "text":
            raise not_served(f"{path}.content[{place}].type = {part.type[:32]}")
    return "\n".join(part.text or "" for part in message.content)


def _spec(request: Generate) -> inference_pb2.GenerationSpec:
    spec = inference_pb2.GenerationSpec(
        model=request.model,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or [],
        stop_token_ids=request.stop_token_ids or [],
        include_stop=bool(request.include_stop_str_in_output),
        client_request_id=request.request_id or "",
    )
    _copy(request, spec, _SAME_NAME + _TEXTS)
    _copy(request, spec.sampling, _SAMPLING)
    if request.max_completion_tokens is not None:
        spec.max_tokens = request.max_completion_tokens
    if request.top_k is not None:
        spec.sampling.top_k = max(0, request.top_k)
    if request.seed is not None:
        spec.sampling.seed = request.seed & (2**64 - 1)
    spec.sampling.logit_bias.update(request.logit_bias or {})
    return spec


def _copy(source: Generate, target: Any, fields: Sequence[str]) -> None:
    for field in fields:
        value = getattr(source, field)
        if value is not None:
            setattr(target, field, value)


_RENAMED: Final = (
    (re.compile(r"^spec\.(sampling\.|chat\.)?"), ""),
    (re.compile(r"^prompt_token_ids(\.ids)?"), "prompt"),
    (re.compile(r"^client_request_id"), "request_id"),
    (re.compile(r"^inputs(\[\d+\])(\.token_ids\.ids|\.text)?"), r"input\1"),
)


def json_name(field: str) -> str:
    """The client's name of a field of the proto: `spec.sampling.top_p` is `top_p`."""
    for pattern, name in _RENAMED:
        field = pattern.sub(name, field)
    return field


def renames(request: Generate, place: int | None) -> Callable[[str], str]:
    """Names of a request's own fields; `place` is the prompt's among several."""

    def rename(field: str) -> str:
        field = json_name(field)
        if field.startswith("prompt") and place is not None:
            return f"prompt[{place}]" + field.removeprefix("prompt")
        if field == "max_tokens" and request.max_completion_tokens is not None:
            return "max_completion_tokens"
        if field == "logprobs" and isinstance(request, ChatRequest):
            return "top_logprobs"
        return field

    return rename
