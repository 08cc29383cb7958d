"""What the load asks for, and the only transcript that each request may have.

The one rule: everything follows from the seed, so that a run is made again by its number.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.tokens import Tokenizer
from tests.fakes import engine
from tests.fakes.mesh import TEXT_TOKENS
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2 as pb

WINDOW_MS = 60_000
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


class Kind(StrEnum):
    """How a client deals with a broken stream."""

    ORDINARY = "ordinary"  # not at all
    RESUMABLE = "resumable"  # comes back with its cursor
    KEYED = "keyed"  # the same, and asks again under its key where it has no id yet


@dataclass(frozen=True)
class Choice:
    """What one choice must say."""

    ids: tuple[int, ...]
    text: str
    finish: int


@dataclass(frozen=True)
class Ask:
    """One request."""

    number: int
    kind: Kind
    spec: pb.GenerationSpec
    expected: Mapping[int, Choice]
    cancel_after: int | None = None  # deltas, after which the client has enough


def draw_kind(rng: random.Random) -> Kind:
    """Half ordinary, half such as come back."""
    return rng.choice((Kind.ORDINARY, Kind.ORDINARY, Kind.RESUMABLE, Kind.KEYED))


def cancel_after(rng: random.Random) -> int | None:
    """A few clients have enough before the end."""
    return rng.randint(1, 8) if rng.random() < 0.05 else None


def outlive(spec: pb.GenerationSpec, kind: Kind, key: str) -> None:
    """Makes a request what its kind says."""
    if kind is not Kind.ORDINARY:
        spec.resume_window_ms = WINDOW_MS
    if kind is Kind.KEYED:
        spec.idempotency_key = key


class FormulaAsks:
    """Requests to the engine without a model: its formula says what must come."""

    def __init__(self, rng: random.Random, model: str, tokenizer: Tokenizer, tokens: tuple[int, int]) -> None:
        """`tokens`: fewest and most of a choice."""
        self._rng, self._model, self._tokenizer, self._tokens = rng, model, tokenizer, tokens

    def draw(self, number: int) -> Ask:
        """The next one."""
        rng = self._rng
        prompt = [rng.randrange(TEXT_TOKENS) for _ in range(rng.randint(4, 60))]
        seed, length = rng.randrange(1 << 32), rng.randint(*self._tokens)
        choices = 2 if rng.random() < 0.15 else 1
        spec = pb.GenerationSpec(
            model=self._model, max_tokens=length, n=choices, ignore_eos=True, return_token_ids=True
        )  # fmt: skip
        spec.prompt_token_ids.ids.extend(prompt)
        spec.sampling.seed = seed
        spec.sampling.temperature = rng.choice((0.0, 0.8))
        if rng.random() < 0.25:
            spec.stop_token_ids.append(rng.randrange(TEXT_TOKENS))
        kind = draw_kind(rng)
        outlive(spec, kind, f"key {number}")
        expected = {choice: self._choice(prompt, spec, choice) for choice in range(choices)}
        return Ask(number, kind, spec, expected, cancel_after(rng))

    def _choice(self, prompt: Sequence[int], spec: pb.GenerationSpec, choice: int) -> Choice:
        data = struct.pack(f"<{len(prompt)}i", *prompt)
        ids: list[int] = []
        while len(ids) < spec.max_tokens:
            drawn = engine.token(data, spec.sampling.seed, choice, len(ids), TEXT_TOKENS)
            if drawn in spec.stop_token_ids:
                return Choice(tuple(ids), self._text(ids), STOP)
            ids.append(drawn)
        return Choice(tuple(ids), self._text(ids), LENGTH)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, after_text=True)
