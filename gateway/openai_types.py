"""OpenAI's request shapes, and the reading of them.

Owns which fields are known, which are known and not served, and which are ignored. The one rule: a body is read field
by field, so that a refusal names every field of a wrong type at once, and what is not known is counted, never refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, Generic, TypeVar, get_type_hints

import msgspec
from prometheus_client import Counter

from shared.errors import Reason, TrunklineError, Violation

_ignored = Counter(
    "trunkline_http_unknown_fields_total", "Request fields that no face knows; they are ignored.", ["face"]
)

Uint32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Uint63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Prompt = str | list[str | Uint32 | list[Uint32]]  # a text, texts, token ids, or lists of token ids


class Part(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """A message of a chat."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream also tells."""

    include_usage: bool | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Uint32 | None = None
    max_tokens: Uint32 | None = None
    max_completion_tokens: Uint32 | None = None  # the newer name, which wins
    min_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None  # -1 and 0 keep all
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Uint32, float] | None = None
    seed: int | None = None  # OpenAI's is signed; its low 64 bits count
    stop: str | list[str] | None = None
    stop_token_ids: list[Uint32] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    priority: Int32 | None = None
    request_id: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    resume_window_ms: Uint63 | None = None
    idempotency_key: str | None = None


class ChatRequest(Generate, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(Generate, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Uint32 | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    model: str
    input: Prompt
    encoding_format: str | None = None
    normalize: bool | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str
    tokens: list[Uint32]


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


# Fields that would change the answer and are not served, with the values that ask for nothing.
_OFF_UNLESS_EMPTY: Final = """
    tools functions structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf
    structural_tag stop_regex suffix prompt_logprobs truncate_prompt_tokens allowed_token_ids bad_words use_beam_search
    chat_template chat_template_kwargs documents audio prediction web_search_options logits_processors
    kv_transfer_params prompt_embeds lora_path dimensions mm_processor_kwargs
"""
_NOT_SERVED: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(_OFF_UNLESS_EMPTY.split(), operator.not_),
    "tool_choice": _one_of(None, "none", "auto"),
    "function_call": _one_of(None, "none", "auto"),
    "response_format": _one_of(None, {"type": "text"}),
    "modalities": _one_of(None, [], ["text"]),
    "best_of": _one_of(None, 1),
    "length_penalty": _one_of(None, 1),
    "skip_special_tokens": _one_of(None, True),
    "echo": _one_of(None, False),
}

# Fields that change nothing here and that clients send as a matter of course.
_IGNORED: Final = """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention parallel_tool_calls
    spaces_between_special_tokens add_special_tokens verbosity
"""
_HARMLESS: Final = frozenset(_IGNORED.split())

_T = TypeVar("_T", bound=msgspec.Struct)
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Form(Generic[_T]):
    """Reads bodies of one type. `face` names it in metrics."""

    def __init__(self, type_: type[_T], face: str) -> None:
        self._type = type_
        self._ignored = _ignored.labels(face)
        hints = get_type_hints(type_, include_extras=True)
        fields = msgspec.structs.fields(type_)
        self._decoders = {field.name: msgspec.json.Decoder(hints[field.name]) for field in fields}
        self._required = [field.name for field in fields if field.required]

    def read(self, body: bytes) -> _T:
        """The request. Raises BAD_FIELD with every field that is missing or of a wrong type, FEATURE_OFF."""
        try:
            pieces = _object.decode(body)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise bad_fields([Violation("", f"the body is not a JSON object: {exc}")]) from exc
        values: dict[str, Any] = {}
        violations = [Violation(name, "is required") for name in self._required if name not in pieces]
        off = []
        for name, piece in pieces.items():
            decoder = self._decoders.get(name)
            try:
                if decoder is not None:
                    values[name] = decoder.decode(piece)
                elif not self._asks_nothing(name, piece):
                    off.append(name)
            except (msgspec.DecodeError, RecursionError) as exc:
                violations.append(_violation(name, exc))
        if violations:
            raise bad_fields(violations)
        if off:
            raise not_served(off[0])
        return self._type(**values)

    def _asks_nothing(self, name: str, piece: msgspec.Raw) -> bool:
        nothing = _NOT_SERVED.get(name)
        if nothing is not None:
            return nothing(msgspec.json.decode(piece))
        if name not in _HARMLESS:
            self._ignored.inc()
        return True


def not_served(field: str) -> TrunklineError:
    """The refusal of a field that asks for what is not served."""
    return TrunklineError(Reason.FEATURE_OFF, f"{field} is not served.", metadata={"field": field})


def bad_fields(violations: Iterable[Violation]) -> TrunklineError:
    """The refusal of all these fields; its message names them."""
    found = list(violations)
    message = "; ".join(f"{item.field}: {item.description}" if item.field else item.description for item in found)
    return TrunklineError(Reason.BAD_FIELD, message, violations=found)


def _violation(name: str, exc: Exception) -> Violation:
    # msgspec says "Expected `str`, got `int` - at `$[0].role`".
    what, _, place = str(exc).partition(" - at `$")
    path = place.rstrip("`").replace("[...]", "") if "`key`" not in str(exc) else ""
    what = what.partition(" - at ")[0].replace("`", "")
    return Violation(name + path, what[:1].lower() + what[1:])
