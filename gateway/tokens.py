"""Tokens and text: a tokenizer of one model, the incremental detokeniser, the matcher of stop strings.

Owns the way from ids to text. The one rule: text is made of the tokens' bytes, so `Detokenizer` pushes join to exactly
`Tokenizer.decode` of all ids, however the ids were split; only whole characters come out, and what is not UTF-8 becomes
U+FFFD once that is certain.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import tokenizers

_Step = Callable[[str, bool], str | bytes]  # (token, it is the first of the text) -> the token after one decoder


class UnsupportedTokenizerError(ValueError):
    """tokenizer.json holds something that cannot be turned into text token by token."""


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE writes bytes (GPT-2's table): printable bytes are themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES: Final = _byte_alphabet()
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CLEAN_UPS: Final = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _byte_level(token: str, _first: bool) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # an added token, written as itself
        return token.encode()


def _byte_fallback(token: str, _first: bool) -> str | bytes:
    found = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(found[1]) if found else token


def _joined_by_spaces(token: str, first: bool) -> str:
    return token if first else f" {token}"


def _replace(config: Mapping[str, Any]) -> _Step:
    if "String" not in config["pattern"]:
        raise UnsupportedTokenizerError("the tokenizer's decoder replaces by a regular expression")
    old, new = config["pattern"]["String"], config["content"]
    return lambda token, _first: token.replace(old, new)


def _metaspace(config: Mapping[str, Any]) -> _Step:
    mark, keeps = config["replacement"], config.get("prepend_scheme", "always") == "never"
    return lambda token, first: token.replace(mark, "" if first and not keeps else " ")


def _word_piece(config: Mapping[str, Any]) -> _Step:
    prefix, cleans = config["prefix"], config.get("cleanup", True)

    def step(token: str, first: bool) -> str:
        if not first:
            token = token[len(prefix) :] if token.startswith(prefix) else f" {token}"
        if cleans:
            for old, new in _CLEAN_UPS:
                token = token.replace(old, new)
        return token

    return step


_STEPS: Final[Mapping[str, Callable[[Mapping[str, Any]], _Step]]] = {
    "ByteLevel": lambda _config: _byte_level,
    "ByteFallback": lambda _config: _byte_fallback,
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
}


class _Decoder:
    """The decoder of a tokenizer.json, token by token: `piece` gives bytes; `strip` says what a text's start loses."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        self._steps: list[_Step] = [] if config else [_joined_by_spaces]
        self.strip = ("", 0)  # (character, at most so many of it)
        fused = False
        for part in _flat(config):
            kind = part["type"]
            if kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and not part["stop"]:
                self.strip = (part["content"], part["start"])
            elif kind in _STEPS and not fused:
                self._steps.append(_STEPS[kind](part))
            else:
                raise UnsupportedTokenizerError(f"the tokenizer's decoder {kind} is not supported in this place")

    def piece(self, token: str, first: bool) -> bytes:
        text: str | bytes = token
        for step in self._steps:
            if isinstance(text, bytes):
                return text
            text = step(text, first)
        return text if isinstance(text, bytes) else text.encode()


def _flat(config: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if config is None:
        return
    if config["type"] == "Sequence":
        for part in config["decoders"]:
            yield from _flat(part)
    else:
        yield config


class _File(msgspec.Struct):
    """What is read of a tokenizer.json beside the library: the vocabulary as Python's objects would take megabytes."""

    decoder: dict[str, Any] | None = None


class Tokenizer:
    """A model's tokenizer. Safe to share between threads.

    Raises `UnsupportedTokenizerError`, or ValueError where the file cannot be read at all.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
            self._decoder = _Decoder(msgspec.json.decode(tokenizer_json, type=_File).decoder)
        except UnsupportedTokenizerError:
            raise
        except Exception as exc:  # the library raises bare Exception
            raise ValueError(f"tokenizer.json cannot be read: {exc}") from exc
        # Files of embedding models carry both; a prompt must come through whole and alone.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, bytes] = {}  # filled as tokens are seen; at most one entry per token

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text; with `special`, also what the tokenizer puts around a prompt, such as the BOS token.

        Takes about 0.4 s per MB of text, during which other threads run: long texts belong on a thread.
        """
        # The batch call is the one that lets go of the interpreter lock.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True, after_text: bool = False) -> str:
        """Text of ids. Ids outside the vocabulary have none. `after_text` as in `Detokenizer`."""
        detokenizer = Detokenizer(self, skip_special, after_text)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds in the middle of a text; empty outside the vocabulary."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self.first_bytes(token_id, first=False)
            if token_id < self.vocab_size:
                self._pieces[token_id] = piece
        return piece

    def first_bytes(self, token_id: int, first: bool = True) -> bytes:
        """Bytes that a token adds at the start of a text, where some tokenizers leave out a space."""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._decoder.piece(token, first)

    def token_text(self, token_id: int) -> str:
        """Text of one token in the middle of a text; a special token's name; U+FFFD for what is not UTF-8."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name, such as <|im_end|>."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    @property
    def leading_strip(self) -> tuple[str, int]:
        """(character, count): a text that begins with the character loses at most so many of it."""
        return self._decoder.strip


class Detokenizer:
    """Turns ids into text as they come; O(1) per token. Not thread-safe.

    `after_text`: the ids go on after other text (a completion after its prompt), so the first token keeps its space.
    """

    __slots__ = ("_begun", "_skip", "_strip", "_strip_char", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, after_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
        self._begun = after_text
        self._strip_char, strip = tokenizer.leading_strip
        self._strip = 0 if after_text else strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """The whole characters that these ids complete."""
        kept = [token_id for token_id in ids if token_id not in self._skip]
        data = b"".join(map(self._tokenizer.token_bytes, kept))
        if kept and not self._begun:
            self._begun = True
            data = self._tokenizer.first_bytes(kept[0]) + data[len(self._tokenizer.token_bytes(kept[0])) :]
        return self._out(self._utf8.decode(data))

    def finish(self) -> str:
        """U+FFFD if the text ends inside a character, else nothing."""
        return self._out(self._utf8.decode(b"", final=True))

    def _out(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip_char:
                self._strip = 0
            else:
                self._strip -= 1
                text = text[1:]
        return text


class StopMatcher:
    """Looks for stop strings in a text that comes in pieces (Aho and Corasick's automaton; O(1) per character).

    The match that completes first wins, the longest of those that complete together: a result does not depend on how
    the text was split. Only a suffix that is a proper prefix of a stop string is held back. Pushed one token at a time,
    the token that returns a match is the one that completed it. `stops` must hold no empty string.
    """

    __slots__ = ("_depth", "_fail", "_first", "_held", "_include", "_matched", "_next", "_node", "_stop")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._include = include_stop
        self._matched: str | None = None
        self._held = ""
        self._node = 0
        self._first = frozenset(stop[0] for stop in stops)
        # Nodes are the prefixes of the stop strings, 0 the empty one.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            self._add(stop)
        self._fail = [0] * len(self._next)  # the longest other node that is a suffix of this one
        self._link()

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that was matched). After a match there is no more text."""
        if self._matched is not None:
            return "", self._matched
        node = self._node
        if node == 0 and self._first.isdisjoint(text):
            return text, None
        for place, char in enumerate(text, start=1):
            node = self._step(node, char)
            stop = self._stop[node]
            if stop is not None:
                return self._end(self._held + text[:place], stop), stop
        whole = self._held + text
        cut = len(whole) - self._depth[node]
        self._node, self._held = node, whole[cut:]
        return whole[:cut], None

    def finish(self) -> str:
        """What was held back: the text ended before a stop string was complete."""
        held, self._held, self._node = self._held, "", 0
        return held

    def _end(self, whole: str, stop: str) -> str:
        self._matched, self._held = stop, ""
        return whole if self._include else whole[: len(whole) - len(stop)]

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(char, 0)

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._next[node].get(char)
            if child is None:
                child = self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._stop.append(None)
            node = child
        self._stop[node] = stop

    def _link(self) -> None:
        queue = list(self._next[0].values())
        for node in queue:  # grows: breadth first, so a node's suffixes are linked before it
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                queue.append(child)
            if self._stop[node] is None:
                self._stop[node] = self._stop[self._fail[node]]
