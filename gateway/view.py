"""One client's view of a resumable generation: text made from its log, from a cursor on.

The one rule: a view tells only what the log shows, and makes the text itself, so that every view of a request tells the
same, whichever gateway it is at and whenever it began.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from google.rpc import status_pb2  # type: ignore[import-untyped]

from gateway.cursor import Cursor
from gateway.delivery import Delivery, Manners
from gateway.journal import Log
from gateway.ledger import Headroom
from gateway.pacer import Pacer
from gateway.tokens import Tokenizer
from gateway.transcript import Form, Transcript
from shared import rpc
from shared.clock import Clock
from shared.errors import Reason, TrunklineError, from_status
from shared.state import StateAway
from trunkline.inference.v1 import inference_pb2


@dataclass(frozen=True)
class Head:
    """What a view needs to know of its request."""

    started: inference_pb2.Started
    form: Form
    tokenizer: Tokenizer
    operation: str


class View:
    """See the module. `seek` before `events`; `on_stuck` is called once if the client takes nothing for too long."""

    resumable = True

    def __init__(self, head: Head, log: Log, pacer: Pacer, clock: Clock, manners: Manners) -> None:
        self.on_stuck: Callable[[], object] = lambda: None
        self.headroom: Headroom | None = None
        self.whole = False  # its client gets all of it at once, at the end
        self.head = head
        self.log = log
        self.opened: dict[int, int] = {}  # choices that the client has begun to see: characters
        self.delivery = Delivery(self, pacer, clock, manners)
        self.delivery.on_slow = lambda: self.on_stuck()
        self._transcript = Transcript(head.form, head.tokenizer, clock)
        self._seen = 0
        self._breaks = log.breaks
        self._error: TrunklineError | None = None
        self._cursor = ""
        log.join(self.delivery.ring, self._movable)
        self.delivery.ring()

    @property
    def id(self) -> str:
        """32 hexadecimal digits."""
        return self.head.started.request_id

    @property
    def operation(self) -> Literal["chat", "text_completion"]:
        """What it began as."""
        return "chat" if self.head.operation == "chat" else "text_completion"

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.head.started.trace_id

    def seek(self, cursor: Cursor, text: str) -> None:
        """Go on after `cursor` (whose string is `text`). Raises RESUME_DIVERGED with the choice to read from 0,
        and StateAway where the log does not reach so far yet: what a client was told elsewhere may be known here a
        moment later, and what a store lost is generated again."""
        runs = self.log.runs[:]
        diverged = self._transcript.skip(cursor.places, runs)
        if diverged is not None:
            if self.log.ending is None and self._transcript.short_of(cursor.places):
                raise StateAway
            raise TrunklineError(
                Reason.RESUME_DIVERGED,
                f"the text up to the cursor is not that of this generation: read choice {diverged} from its beginning",
                metadata={"choice": str(diverged), "request_id": self.id},
            )
        self._seen, self._cursor = len(runs), text
        self.opened = {choice: place.chars for choice, place in enumerate(cursor.places) if not place.at_start}

    def move(self, log: Log) -> None:
        """Go on from another log of the same request, which holds what this one holds and more."""
        self.log.leave(self.delivery.ring)
        self.log, self._breaks = log, log.breaks
        log.join(self.delivery.ring, self._movable)
        self.delivery.ring()

    def fail(self, error: TrunklineError) -> None:
        """End with an error."""
        self._error = error
        self.delivery.ring()

    def close(self) -> None:
        """Nobody reads any more."""
        self.log.leave(self.delivery.ring)

    def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """As `Delivery.events`; while the state store is away it ends with MOVED and the cursor to go on from."""
        return self.delivery.events()

    # As a source.

    @property
    def over(self) -> bool:
        """The log has ended, or this view of it has."""
        return self._error is not None or self._interrupted or self.log.ending is not None

    @property
    def _interrupted(self) -> bool:
        return self.log.breaks != self._breaks and self.log.ending is None

    def _movable(self) -> bool:
        """Its client has been told whose cursor this is."""
        return bool(self._cursor) and not self.whole

    @property
    def failed_unbegun(self) -> bool:
        """It ends with an error, and nothing was ever told."""
        ending = self.log.ending
        failed = self._error is not None or self._interrupted or bool(ending and ending.status)
        return failed and not self._cursor

    def take(self) -> Iterable[inference_pb2.Delta]:
        """What is new in the log, as text."""
        for run in self.log.runs[self._seen :]:
            self._transcript.append(run)
        self._seen = len(self.log.runs)
        deltas = list(self._transcript.take())
        if deltas:
            self._cursor = deltas[-1].cursor
        return deltas

    def started(self) -> inference_pb2.Started:
        """The first event."""
        return self.head.started

    def finished(self) -> inference_pb2.Finished:
        """The last event. Raises what it ended with."""
        ending = self.log.ending
        error = self._error
        if error is None and ending is None:
            error = moved_on(self.id, self._cursor)
        if error is None and ending is not None and ending.status:
            error = from_status(status_pb2.Status.FromString(ending.status))
        if error is not None:
            if self._cursor:
                rpc.mark_work_done()
            raise error
        assert ending is not None
        return inference_pb2.Finished.FromString(ending.finished)


def moved_on(request_id: str, cursor: str) -> TrunklineError:
    """The client is to resume from its cursor, here or elsewhere."""
    return TrunklineError(
        Reason.MOVED,
        "the generation goes on elsewhere: resume it from the cursor",
        metadata={"request_id": request_id, "cursor": cursor},
        retry_after_s=0.5,
    )
