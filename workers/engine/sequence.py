"""Requests inside the engine and their sequences: one per choice of a generation, one per input of an encode.

Owns what is known about them and nothing about policy. The one rule: `computed` counts tokens whose keys and values the
next step finds in the pool, `length` those whose values are known, `pending` those that steps in flight draw; phase is
the explicit flag `prefilling`, never inferred.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers.engine.batch import BLOCK_SIZE
from workers.engine.blocks import Key, blocks_for, next_key
from workers.engine.messages import Admit, Encode, Finish, unpack_tokens

Tokens = npt.NDArray[np.int32]


class State(enum.Enum):
    """Where a sequence stands; it holds blocks exactly while RUNNING."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    DONE = enum.auto()


class Sequence:
    """Tokens of one choice or input, and the blocks that hold their keys and values."""

    __slots__ = (
        "_keys",
        "_table",
        "_tokens",
        "choice",
        "computed",
        "finish",
        "held",
        "length",
        "pending",
        "pooled",
        "pooled_sum",
        "preemptions",
        "prefilling",
        "prompt_length",
        "published",
        "request",
        "scope",
        "state",
    )

    def __init__(self, request: Request, choice: int, prompt: Tokens, emitted: Tokens, limit: int, scope: Key) -> None:
        """A waiting sequence of prompt and emitted tokens that may grow to `limit` tokens in all."""
        self.request = request
        self.choice = choice
        self.scope = scope
        self.prompt_length = len(prompt)
        self.length = len(prompt) + len(emitted)
        self.computed = 0
        self.pending = 0
        self.held = 0
        self.published = 0  # leading blocks of its table that were offered to the prefix cache, or came from it
        self.prefilling = True
        self.state = State.WAITING
        self.finish = Finish.NONE
        self.preemptions = 0
        self.pooled = 0  # leading tokens already in pooled_sum (encode)
        self.pooled_sum: npt.NDArray[np.float64] | None = None
        self._tokens = np.empty(max(limit, self.length), np.int32)
        self._tokens[: self.length] = np.concatenate((prompt, emitted))
        self._table = np.zeros(blocks_for(len(self._tokens)), np.int32)
        self._keys: list[Key] = []

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Seniority: higher priority, then begun elsewhere, then earlier arrival, then lower choice; smallest first."""
        request = self.request
        return (-request.priority, not request.begun, request.rank, self.choice)

    @property
    def tokens(self) -> Tokens:
        """Prompt and output, int32 [length] (a view)."""
        return self._tokens[: self.length]

    @property
    def alive(self) -> bool:
        """True until it ends."""
        return self.state is not State.DONE

    @property
    def full(self) -> bool:
        """True when a generation may draw no further token."""
        return not isinstance(self.request.spec, Encode) and self.length == len(self._tokens)

    @property
    def wanted(self) -> int:
        """Tokens to compute before its next draw; 0 while nothing can be done before the step in flight is read.

        That is so for an encode whose last chunk is in flight, for a generation whose last token is, and for one whose
        next draw depends on the value of that token.
        """
        if self.pending and (self.request.penalised or self.length + self.pending == len(self._tokens)):
            return 0
        return self.length + self.pending - self.computed

    @property
    def output_length(self) -> int:
        """Tokens of the output so far."""
        return self.length - self.prompt_length

    @property
    def blocks(self) -> Tokens:
        """Ids of the held blocks, int32 [held] (a view)."""
        return self._table[: self.held]

    @property
    def most_blocks(self) -> int:
        """Blocks it needs at its longest: the last token it may draw is never computed."""
        return blocks_for(max(len(self._tokens) - 1, self.prompt_length))

    def append(self, token: int) -> None:
        """One more output token: the oldest of those that were pending."""
        self._tokens[self.length] = token
        self.length += 1
        self.pending -= 1

    def hold(self, blocks: Items[int]) -> None:
        """More blocks at the end of its table."""
        self._table[self.held : self.held + len(blocks)] = blocks
        self.held += len(blocks)

    def surrender(self) -> list[int]:
        """Its blocks, which it no longer holds; what it computed counts as lost."""
        blocks: list[int] = self.blocks.tolist()
        self.held = 0
        self.computed = 0
        self.published = 0
        self.prefilling = True
        return blocks

    def keys(self, count: int) -> list[Key]:
        """Prefix keys of its first `count` full blocks (computed once, kept)."""
        assert count * BLOCK_SIZE <= self.length, "a key of tokens that are not known"
        while len(self._keys) < count:
            start = len(self._keys) * BLOCK_SIZE
            parent = self._keys[-1] if self._keys else self.scope
            self._keys.append(next_key(parent, self._tokens[start : start + BLOCK_SIZE]))
        return self._keys[:count]

    @property
    def known_keys(self) -> list[Key]:
        """All keys it ever asked the pool for or published under."""
        return self._keys


@dataclass(slots=True, eq=False)
class Request:
    """One admitted piece of work. Times are seconds of the engine's clock."""

    spec: Admit | Encode
    rank: int  # order of arrival
    arrived: float
    deadline: float  # infinity without a budget
    begun: bool = False  # it came with tokens: it has had its turn, and its reader is in the middle of them
    sequences: list[Sequence] = field(default_factory=list)
    alive: int = 0  # sequences that have not ended
    stop_ids: tuple[int, ...] = ()
    penalised: bool = False  # its draws depend on the values of the tokens before them
    paused: bool = False
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    steps: int = 0
    last_step: int = -1  # the engine's number of the last step it took part in
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def key(self) -> int:
        """The door's number for it."""
        return self.spec.key

    @property
    def priority(self) -> int:
        """Higher first."""
        return self.spec.priority

    @property
    def private(self) -> bool:
        """True when its blocks may be shared among its own choices only."""
        return isinstance(self.spec, Encode) or not self.spec.cache_scope

    @property
    def done(self) -> bool:
        """True when every sequence has ended."""
        return self.alive == 0


def generation(spec: Admit, rank: int, now: float, ends: Items[int], max_context: int) -> Request:
    """The request of an `Admit`. `ends` are the model's end-of-sequence ids."""
    stops = tuple(sorted({*spec.stop_token_ids, *(() if spec.ignore_eos else ends)}))
    begun = any(choice.emitted for choice in spec.choices)
    penalised = spec.sampling.penalised
    request = Request(spec, rank, now, _deadline(spec, now), begun, stop_ids=stops, penalised=penalised)
    prompt = unpack_tokens(spec.prompt)
    limit = min(len(prompt) + spec.max_tokens, max_context)
    scope = spec.cache_scope or _private_scope(spec.key, 0)
    for choice in spec.choices:
        emitted = unpack_tokens(choice.emitted)
        request.sequences.append(Sequence(request, choice.index, prompt, emitted, limit, scope))
    request.alive = len(request.sequences)
    return request


def encoding(spec: Encode, rank: int, now: float) -> Request:
    """The request of an `Encode`: each input is a sequence that draws no token."""
    request = Request(spec, rank, now, _deadline(spec, now))
    nothing = np.zeros(0, np.int32)
    for index, data in enumerate(spec.inputs):
        tokens = unpack_tokens(data)
        scope = _private_scope(spec.key, index)
        request.sequences.append(Sequence(request, index, tokens, nothing, len(tokens), scope))
    request.alive = len(request.sequences)
    return request


def _deadline(spec: Admit | Encode, now: float) -> float:
    return now + spec.budget_ms / 1e3 if spec.budget_ms else math.inf


def _private_scope(key: int, index: int) -> Key:
    """An h0 no other request has: keys are never reused within an engine's life."""
    return hashlib.sha256(b"private" + key.to_bytes(8, "little") + index.to_bytes(8, "little")).digest()
