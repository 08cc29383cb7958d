"""OpenAI's answers: whole bodies, and the chunks of a stream.

Owns their exact shape. The one rule: a chunk that carries only text is a prebuilt frame around the encoded text, since
every token passes here; everything else goes through the general encoder.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

_FINISH: Final = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
_LOWEST_LOGPROB: Final = -9999.0  # JSON has no infinity
_encode = msgspec.json.Encoder().encode

DONE: Final = b"data: [DONE]\n\n"
HEARTBEAT: Final = b": heartbeat\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(data) + b"\n\n"


@dataclass
class ChoiceText:
    """One choice as it grows."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def take(self, delta: inference_pb2.Delta) -> None:
        """Append a delta."""
        self.pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = _FINISH.get(delta.finish_reason, self.finish_reason)
        self.stop_reason = delta.matched_stop or self.stop_reason


class Form(Protocol):
    """What differs between chat and completions."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        """A choice of a whole answer."""
        ...

    def chunk(self, index: int, choice: ChoiceText, offset: int) -> dict[str, Any]:
        """A choice of a chunk; `offset` characters of it came before."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of the chunk that opens a stream's choice, if there is one."""
        ...

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands around the encoded text of `chunk` for a choice that only has text."""
        ...


class ChatForm:
    """chat.completion and chat.completion.chunk."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        """With the message; `refusal` is there because typed clients want it."""
        made = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": _chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return _with_ids(made, choice.token_ids)

    def chunk(self, index: int, choice: ChoiceText, offset: int) -> dict[str, Any]:
        """With the delta."""
        text = choice.text
        made = {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": _chat_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason:
            made["stop_reason"] = choice.stop_reason
        return _with_ids(made, choice.token_ids)

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first delta has the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """As `chunk` makes it."""
        return b'{"index":%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}'


class CompletionForm:
    """text_completion, whole and in chunks."""

    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def whole(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        """With the text."""
        made = self.chunk(index, choice, 0)
        made["stop_reason"] = choice.stop_reason
        return made

    def chunk(self, index: int, choice: ChoiceText, offset: int) -> dict[str, Any]:
        """With the text; offsets of logprobs count from the choice's first character."""
        made = {
            "index": index,
            "text": choice.text,
            "logprobs": _completion_logprobs(choice.logprobs, offset),
            "finish_reason": choice.finish_reason,
        }
        if choice.finish_reason:
            made["stop_reason"] = choice.stop_reason
        return _with_ids(made, choice.token_ids)

    def opening(self, index: int) -> dict[str, Any] | None:
        """Completions have none."""
        return None

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """As `chunk` makes it."""
        return b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}'


class Chunks:
    """Encodes one stream's chunks. Not for several streams: it remembers which choices were opened."""

    def __init__(
        self, form: Form, response_id: str, created_s: int, model: str, with_usage: bool, with_ids: bool = False
    ) -> None:
        """`with_ids`: events carry their cursor as id, with which a client that was cut off comes back."""
        self._with_ids = with_ids
        head = {"id": response_id, "object": form.chunk_object, "created": created_s, "model": model}
        self._form = form
        self._head = head
        # With usage asked for, every chunk has the field.
        self._tail: dict[str, Any] = {"usage": None} if with_usage else {}
        self._before = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._offsets: dict[int, int] = {}

    def delta(self, index: int, delta: inference_pb2.Delta) -> bytes:
        """The chunk of a delta, after the one that opens its choice if it is the first."""
        opening = b"" if index in self._frames else self.open(index)
        if self._with_ids:
            opening += b"id: %s\n" % delta.cursor.encode()
        offset = self._offsets[index]
        self._offsets[index] += len(delta.text)
        if not (delta.finish_reason or delta.logprobs or delta.token_ids):
            before, after = self._frames[index]
            return opening + before + _encode(delta.text) + after
        choice = ChoiceText()
        choice.take(delta)
        return opening + self._chunk([self._form.chunk(index, choice, offset)])

    def go_on(self, index: int, offset: int) -> None:
        """A choice that the client has seen opened, and so many characters of."""
        before, after = self._form.text_frame(index)
        self._frames[index] = (self._before + before, after + self._after)
        self._offsets[index] = offset

    def open(self, index: int) -> bytes:
        """The chunk that opens a choice; empty where this face has none or it was opened before."""
        if index in self._frames:
            return b""
        self.go_on(index, 0)
        opening = self._form.opening(index)
        return self._chunk([opening]) if opening else b""

    def usage(self, usage: dict[str, Any], extension: dict[str, Any]) -> bytes:
        """The last chunk, with no choices."""
        return event({**self._head, "choices": [], "usage": usage, "trunkline": extension})

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return event({**self._head, "choices": choices, **self._tail})


def usage_body(usage: common_pb2.Usage) -> dict[str, Any]:
    """`usage` of a generation."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def embeddings_body(answer: inference_pb2.EmbedResponse, model: str, as_base64: bool) -> dict[str, Any]:
    """The answer of /v1/embeddings; in base64 the numbers are little-endian fp32."""
    data = [
        {"object": "embedding", "index": place, "embedding": _vector(item.values, as_base64)}
        for place, item in enumerate(answer.embeddings)
    ]
    usage = {"prompt_tokens": answer.usage.prompt_tokens, "total_tokens": answer.usage.prompt_tokens}
    extension = {
        "request_id": answer.request_id,
        "trace_id": answer.receipt.trace_id,
        "receipt": receipt_body(answer.receipt),
    }
    return {"object": "list", "data": data, "model": model, "usage": usage, "trunkline": extension}


def _vector(values: Sequence[float], as_base64: bool) -> str | list[float]:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode() if as_base64 else list(values)


def receipt_body(receipt: common_pb2.Receipt) -> dict[str, Any]:
    """The latency receipt, by the proto's names; milliseconds."""
    made = {name: getattr(receipt, name) for name in receipt.DESCRIPTOR.fields_by_name}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in made.items()}


def _with_ids(choice: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    if token_ids:
        choice["token_ids"] = token_ids
    return choice


def _candidate(candidate: inference_pb2.Candidate) -> dict[str, Any]:
    return {
        "token": candidate.token.decode(errors="replace"),
        "logprob": max(candidate.logprob, _LOWEST_LOGPROB),
        "bytes": list(candidate.token),
    }


def _chat_logprobs(logprobs: Sequence[inference_pb2.TokenLogprob]) -> dict[str, Any] | None:
    if not logprobs:
        return None
    content = [
        {**_candidate(entry.chosen), "top_logprobs": [_candidate(candidate) for candidate in entry.top]}
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: Sequence[inference_pb2.TokenLogprob], offset: int) -> dict[str, Any] | None:
    if not logprobs:
        return None
    tokens = [entry.chosen.token.decode(errors="replace") for entry in logprobs]
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return {
        "tokens": tokens,
        "token_logprobs": [max(entry.chosen.logprob, _LOWEST_LOGPROB) for entry in logprobs],
        "top_logprobs": [
            {
                candidate.token.decode(errors="replace"): max(candidate.logprob, _LOWEST_LOGPROB)
                for candidate in entry.top
            }
            for entry in logprobs
        ],
        "text_offset": offsets,
    }
