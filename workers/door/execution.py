"""One request as the engine runs it: the tokens of its choices, or the bytes of its embeddings, and how it ended.

Owns what was produced, whoever it is delivered to (`delivery`). The one rule: choices only grow, except by a stop
string's `cut`; a choice with a finish never changes again.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2
from workers.door.ledger import Need
from workers.engine import messages as m

TOKEN_BYTES = 4
LOGPROB_BYTES = 160  # what a `Logprob` costs to keep, and each of its alternatives
LOGPROB_TOP_BYTES = 48
TOKEN_WIRE_BYTES = 5  # the most that a token takes in a message, its log-probability, and each of its alternatives
LOGPROB_WIRE_BYTES = 16
LOGPROB_TOP_WIRE_BYTES = 9


class EngineBroken(Exception):
    """The engine said something that cannot be; it is not to be trusted any further."""


class Choice:
    """One choice: every token it has, those its owner submitted included."""

    __slots__ = ("finish", "given", "logprobs", "logprobs_from", "stop_token", "tokens", "unit_bytes")

    def __init__(self, emitted: bytes, finish: int, unit_bytes: int) -> None:
        """`emitted`: int32 little-endian ids the owner has; `unit_bytes`: what one more token costs to keep."""
        self.tokens = array("i")
        self.tokens.frombytes(emitted)
        self.given = len(self.tokens)
        self.finish = finish
        self.stop_token = -1
        self.logprobs: list[m.Logprob] = []  # of tokens from `logprobs_from` on, where asked for
        self.logprobs_from = self.given
        self.unit_bytes = unit_bytes

    def extend(self, run: m.Run) -> bool:
        """Appends what the engine produced; True for the first of it. Raises EngineBroken if it does not follow."""
        if self.finish:
            return False  # a stop string ended it before the engine knew
        tokens, new = self.tokens, run.tokens
        start = len(tokens)
        if run.index != start:
            raise EngineBroken(f"a run starts at {run.index} where {start} tokens are")
        if len(new) == 1:
            tokens.append(new[0])
        else:
            tokens.extend(new)
        if run.logprobs:
            self.logprobs += run.logprobs
        if run.finish:
            self.finish, self.stop_token = run.finish, run.stop_token
        return start == self.given

    def cut(self, length: int) -> None:
        """A stop string ended it after `length` tokens; a finish further on gives way to it."""
        if self.finish and length >= len(self.tokens):
            return
        del self.tokens[length:]
        del self.logprobs[max(0, length - self.logprobs_from) :]
        self.finish, self.stop_token = m.Finish.STOP, -1

    def forget(self, before: int) -> None:
        """Tokens below `before` are in their owner's transcript: ids stay, to be compared; log-probabilities go."""
        if before > self.logprobs_from:
            del self.logprobs[: before - self.logprobs_from]
            self.logprobs_from = before

    @property
    def produced(self) -> int:
        """Tokens there are."""
        return len(self.tokens)

    def retained(self, acked: int) -> int:
        """Bytes kept for an owner that has acknowledged what is below `acked`."""
        return (len(self.tokens) - acked) * self.unit_bytes

    def continues(self, emitted: Sequence[int], *, logprobs: bool) -> bool:
        """An owner that has `emitted` can be served from here."""
        known = len(emitted)
        kept = not logprobs or known >= self.logprobs_from
        return kept and known <= len(self.tokens) and all(map(operator.eq, emitted, self.tokens))


class BulkResult:
    """Embeddings of all inputs end to end, float32 little-endian, filled in as they come. Kept whole to its end."""

    finish = m.Finish.NONE  # it ends with its request

    def __init__(self, inputs: int, width: int, prompt_tokens: int) -> None:
        """`width`: bytes of one vector. Nothing is set aside before the first vector comes."""
        self.total = inputs * width
        self.data = bytearray()
        self.produced = 0  # leading bytes that are there
        self.prompt_tokens = prompt_tokens
        self._width = width
        self._there = bytearray(inputs)

    def put(self, index: int, data: bytes) -> None:
        """One vector. Raises EngineBroken if it has no place here."""
        if not (0 <= index < len(self._there) and len(data) == self._width):
            raise EngineBroken(f"an embedding of {len(data)} bytes for input {index}")
        self.data = self.data or bytearray(self.total)
        self.data[index * self._width : (index + 1) * self._width] = data
        self._there[index] = True
        missing = self._there.find(b"\0", self.produced // self._width)
        self.produced = self.total if missing < 0 else missing * self._width

    def retained(self, acked: int) -> int:
        """Bytes kept, whatever was acknowledged: encode work is retried whole, from here too."""
        return len(self.data)

    def forget(self, before: int) -> None:
        """Nothing is let go before the end."""


@dataclass(slots=True, eq=False)
class Times:
    """Seconds of the door's monotonic clock; None: not yet."""

    admitted: float
    scheduled: float | None = None
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class Execution:
    """See the module. `key` is its number at the engine.

    It is live until it has an `ending`, which is kept for its owner, or is dropped, and nothing is.
    """

    request_id: bytes
    stamp: Stamp
    key: int
    spec_hash: bytes
    lane: worker_pb2.Lane
    need: Need
    choices: Sequence[Choice]
    bulk: BulkResult | None
    logprobs: int  # as in `messages.Sampling`
    traceparent: str
    tracestate: str
    times: Times
    live: bool = True  # the engine works or will work on it
    paused_at: float | None = None
    scheduled: m.Scheduled | None = None  # None: it is in no step yet
    ending: worker_pb2.RequestEvent | None = None
    wire_bytes: int = TOKEN_WIRE_BYTES  # the most that one token takes in a message

    def __post_init__(self) -> None:
        if self.logprobs >= 0:
            self.wire_bytes += LOGPROB_WIRE_BYTES + LOGPROB_TOP_WIRE_BYTES * self.logprobs

    @property
    def waiting(self) -> bool:
        """It has not been in a step."""
        return self.live and self.scheduled is None

    def adoptable(self, sub: worker_pb2.Submission) -> bool:
        """`sub` asks for what this is, and its owner's transcript is a prefix of what is here (rule 6)."""
        if sub.spec_hash != self.spec_hash or not (self.live or _finished(self.ending)):
            return False
        return all(
            self.choices[given.index].continues(given.emitted, logprobs=self.logprobs >= 0)
            for given in sub.generate.choices
        )


def _finished(ending: worker_pb2.RequestEvent | None) -> bool:
    return ending is not None and ending.HasField("finished")


def unit_bytes(logprobs: int) -> int:
    """What keeping one token costs; `logprobs` as in `messages.Sampling`."""
    return TOKEN_BYTES + (LOGPROB_BYTES + LOGPROB_TOP_BYTES * logprobs if logprobs >= 0 else 0)
