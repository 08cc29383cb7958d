"""The transcript of one generation: the one place where its tokens, their text, its stops and its usage are decided.

Owned by the gateway that holds the client. The one rule: every token is appended exactly once, by (choice, index); what
an execution says twice is compared and skipped, and what does not join on is refused, never spliced in.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gateway import cursor
from gateway.cursor import Place
from gateway.tokens import Detokenizer, StopMatcher, Tokenizer
from shared.clock import Clock
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2
from trunkline.worker.v1 import worker_pb2

GOES_ON: Final = common_pb2.FINISH_REASON_UNSPECIFIED
STOP: Final = common_pb2.FINISH_REASON_STOP
LENGTH: Final = common_pb2.FINISH_REASON_LENGTH

_DIGEST_BYTES: Final = 8  # of the sha256 of the ids so far, in a cursor
_ID: Final = struct.Struct("<I")


class Fit(Enum):
    """How a run joined on. GAP and DIVERGED: nothing was taken; the execution that said so is at fault."""

    TAKEN = "taken"
    KNOWN = "known"
    GAP = "gap"
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Form:
    """What a transcript holds and how it is told: counts of choices and tokens, and what a delta carries."""

    choices: int
    max_tokens: int
    request_id: bytes = bytes(16)
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    prefix: str = ""  # echoed in front of each choice's text
    token_ids: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class Stop:
    """A choice that the gateway ended: its worker keeps `at_index` tokens of it."""

    choice: int
    at_index: int


class Run(NamedTuple):
    """New tokens of one choice, as an execution tells them: ids from index `start`, and what ended it, if it did."""

    choice: int
    start: int
    ids: list[int]
    finish: int = GOES_ON
    stop_token: int | None = None
    logprobs: Sequence[common_pb2.TokenLogprob] = ()


class Transcript:
    """All choices of one generation. Not thread-safe; no call waits. `tokens` and `text_s` only grow.

    Text is made when it is taken, so that a client that takes rarely costs little; where stop strings are asked for it
    is made at once, so that a match ends the choice at once.
    """

    def __init__(self, form: Form, tokenizer: Tokenizer, clock: Clock) -> None:
        self.form = form
        self.tokens = 0
        self.text_s = 0.0  # seconds spent on turning tokens into text
        self._tokenizer = tokenizer
        self._clock = clock
        self._choices = [_Choice(index, form, tokenizer) for index in range(form.choices)]
        self._open = form.choices
        self._stops: list[Stop] = []
        self._plain = not (form.stops or form.logprobs)

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return self._open == 0

    def token(self, choice: int, index: int, token: int) -> bool:
        """Take one more token of a choice, if it joins on and ends nothing and has nothing but its id; False, and
        nothing is taken, if it must be appended as a run."""
        if choice >= len(self._choices):
            return False
        line = self._choices[choice]
        if index != len(line.ids) or index + 1 >= self.form.max_tokens or line.finish or not self._plain:
            return False
        line.ids.append(token)
        self.tokens += 1
        return True

    def append(self, run: Run) -> Fit:
        """Take a run. Runs of an ended choice are known: what comes after a stop is dropped."""
        if run.choice >= len(self._choices):
            return Fit.DIVERGED
        choice = self._choices[run.choice]
        if choice.finish:
            return Fit.KNOWN
        before = len(choice.ids)
        fit = choice.append(run)
        if fit is Fit.TAKEN:
            if self.form.stops:
                self._advance(choice)
            held = len(choice.ids)
            if held >= self.form.max_tokens and not choice.finish:
                choice.finish = LENGTH
                self._stops.append(Stop(choice.index, held))
            self.tokens += held - before
            if choice.finish:
                self._open -= 1
        return fit

    def stops(self) -> Sequence[Stop]:
        """The choices ended here so far, oldest first, for their worker to be told."""
        return self._stops

    def take(self) -> Iterator[inference_pb2.Delta]:
        """Everything appended since the last call: one delta per choice with news, in order of choices."""
        for choice in self._choices:
            self._advance(choice)
            delta = choice.take(self._tokenizer)
            if delta is not None:
                delta.cursor = self.cursor()
                yield delta

    def cursor(self) -> str:
        """The opaque place up to which deltas were taken, over all choices."""
        return cursor.encode(self.form.request_id, [choice.place for choice in self._choices])

    def places(self) -> list[Place]:
        """The same, per choice."""
        return [choice.place for choice in self._choices]

    def skip(self, places: Sequence[Place], runs: Sequence[Run]) -> int | None:
        """Take `runs` of an empty transcript as they were told up to `places`; deltas then go on from there.

        None if that is where the runs lead; else the choice whose place they do not lead to.
        """
        if len(places) != len(self._choices):
            return 0
        for run in runs:
            self.append(_until(run, places[run.choice]))
        for choice, place in zip(self._choices, places, strict=True):
            if not place.at_start:
                self._advance(choice)
                choice.take(self._tokenizer)
            if choice.place != place:
                return choice.index
        for run in runs:
            self.append(run)
        return None

    def short_of(self, places: Sequence[Place]) -> bool:
        """Some choice has not come as far as that yet."""
        return any(
            len(choice.ids) < place.tokens or (place.ended and not choice.finish)
            for choice, place in zip(self._choices, places, strict=False)
        )

    def next_indices(self) -> list[worker_pb2.NextIndex]:
        """Where each choice goes on, for Hello."""
        return [worker_pb2.NextIndex(choice=choice.index, index=len(choice.ids)) for choice in self._choices]

    def progress(self) -> list[worker_pb2.ChoiceProgress]:
        """What each choice has so far, for a submission."""
        return [
            worker_pb2.ChoiceProgress(index=choice.index, emitted=choice.ids, finish=choice.finish)
            for choice in self._choices
        ]

    def finishes(self) -> list[common_pb2.FinishReason]:
        """Why each choice ended; unspecified where it goes on."""
        return [choice.finish for choice in self._choices]

    def _advance(self, choice: _Choice) -> None:
        started = self._clock.monotonic()
        if choice.advance():
            self._stops.append(Stop(choice.index, len(choice.ids)))
        self.text_s += self._clock.monotonic() - started


class _Choice:
    """One choice: its ids, how many of them became text, how much of both was taken."""

    def __init__(self, index: int, form: Form, tokenizer: Tokenizer) -> None:
        self.index = index
        self.ids: list[int] = []
        self.finish: common_pb2.FinishReason = GOES_ON
        self._form = form
        self._logprobs: list[common_pb2.TokenLogprob] = []
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, after_text=True)
        self._matcher = StopMatcher(form.stops, form.include_stop) if form.stops else None
        self._matched = ""
        self._text = form.prefix  # made, not taken
        self._read = 0  # ids turned into text
        self._flushed = False
        self._taken = 0  # ids
        self._taken_chars = 0
        self._told_finish = False
        self._digest = hashlib.sha256()
        self.place = self._where()

    def append(self, run: Run) -> Fit:
        known = len(self.ids) - run.start
        if known < 0:
            return Fit.GAP
        overlap = min(known, len(run.ids))
        if overlap and run.ids[:overlap] != self.ids[run.start : run.start + overlap]:
            return Fit.DIVERGED
        if known > len(run.ids) and run.finish:
            return Fit.DIVERGED
        if known >= len(run.ids) and not run.finish:
            return Fit.KNOWN
        self._extend(run, known)
        return Fit.TAKEN

    def _extend(self, run: Run, skip: int) -> None:
        room = skip + self._form.max_tokens - len(self.ids)
        self.ids.extend(run.ids[skip:room])
        if self._form.logprobs:
            self._logprobs.extend(run.logprobs[skip:room])
        if run.finish and len(run.ids) <= room:
            self.finish = LENGTH if run.finish == LENGTH else STOP
            if run.stop_token is not None:
                self._matched = self._tokenizer.token_text(run.stop_token)

    def advance(self) -> bool:
        """Turn ids into text. True when a stop string ended the choice: later ids are dropped."""
        stopped = self._advance_to_match() if self._matcher is not None else self._advance_all()
        if self.finish and not stopped and not self._flushed:
            self._flushed = True
            stopped = self._flush()
        return stopped

    def _advance_all(self) -> bool:
        if self._read < len(self.ids):
            self._text += self._detokenizer.push(self.ids[self._read :])
            self._read = len(self.ids)
        return False

    def _advance_to_match(self) -> bool:
        while self._read < len(self.ids):
            text = self._detokenizer.push((self.ids[self._read],))
            self._read += 1
            if self._match(text, early=self._read <= self._form.min_tokens):
                del self.ids[self._read :]
                del self._logprobs[self._read :]
                return True
        return False

    def _flush(self) -> bool:
        tail = self._detokenizer.finish()
        if self._match(tail):
            return True
        if self._matcher is not None:
            self._text += self._matcher.finish()
        return False

    def _match(self, text: str, early: bool = False) -> bool:
        """Text goes through the matcher; before `min_tokens` an end is not allowed, so it passes by."""
        if self._matcher is None or early:
            self._text += text
            return False
        out, matched = self._matcher.push(text)
        self._text += out
        if matched is None:
            return False
        self.finish, self._matched, self._flushed = STOP, matched, True
        return True

    def take(self, tokenizer: Tokenizer) -> inference_pb2.Delta | None:
        ends = bool(self.finish) and not self._told_finish
        ids = self.ids[self._taken :]
        told_ids = ids and (self._form.token_ids or self._form.logprobs)
        if not (ends or self._text or told_ids):
            return None
        delta = inference_pb2.Delta(choice=self.index, text=self._text)
        if self._form.token_ids:
            delta.token_ids.extend(ids)
        if self._form.logprobs:
            pairs = zip(ids, self._logprobs[self._taken :], strict=False)
            delta.logprobs.extend(public_logprob(tokenizer, token, entry) for token, entry in pairs)
        if ends:
            delta.finish_reason, delta.matched_stop = self.finish, self._matched
            self._told_finish = True
        self._move(ids)
        return delta

    def _move(self, ids: list[int]) -> None:
        self._taken += len(ids)
        self._taken_chars += len(self._text)
        self._text = ""
        self._digest.update(b"".join(map(_ID.pack, ids)))
        self.place = self._where()

    def _where(self) -> Place:
        digest = self._digest.digest()[:_DIGEST_BYTES]
        return Place(self._taken, self._taken_chars, self._told_finish, digest)


def _until(run: Run, place: Place) -> Run:
    """The part of a run before `place`; the end that it brings only if that was told."""
    if place.ended:
        return run
    count = max(0, place.tokens - run.start)
    return Run(run.choice, min(run.start, place.tokens), run.ids[:count], logprobs=run.logprobs[:count])


def public_logprob(tokenizer: Tokenizer, token: int, entry: common_pb2.TokenLogprob) -> inference_pb2.TokenLogprob:
    """A worker's log-probability entry for `token`, with the tokens' bytes."""
    top = zip(entry.top_ids, entry.top_logprobs, strict=False)
    return inference_pb2.TokenLogprob(
        chosen=_candidate(tokenizer, token, entry.chosen),
        top=[_candidate(tokenizer, id_, logprob) for id_, logprob in top],
    )


def _candidate(tokenizer: Tokenizer, token: int, logprob: float) -> inference_pb2.Candidate:
    return inference_pb2.Candidate(token_id=token, token=tokenizer.token_bytes(token), logprob=logprob)
