"""Makes one OutputBatch: columns filled run by run, within the size limit.

Owns the layout and the marks that an acknowledgement will settle. The one rule: `add` what belongs to one delivery in
the order opened, runs, events; `full` says when to stop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2
from workers.door.delivery import Cursor, Delivery
from workers.door.execution import Choice
from workers.engine import messages as m

MAX_BYTES = 256 * 1024
# Upper bounds of what the parts take as protobuf: five bytes for any u32, lengths and tags included.
TOKEN_MOST = 5
RUN_MOST = 32
OPENED_MOST = 64
EVENT_MOST = 2560  # a sentence of 500 characters, four bytes each, and room
LOGPROB_MOST = 16
TOP_LOGPROB_MOST = 9


@dataclass(frozen=True, slots=True)
class Sent:
    """A message under way: what its acknowledgement settles."""

    seq: int
    size: int
    marks: list[tuple[Delivery, Cursor, int, bool]]  # tokens or bytes before the number, and whether the finish
    endings: list[Delivery]
    opened: list[Delivery]


class Batch:
    """One batch in the making."""

    def __init__(self, limit: int) -> None:
        """`limit`: most bytes."""
        self.size = 0
        self.marks: list[tuple[Delivery, Cursor, int, bool]] = []
        self.endings: list[Delivery] = []
        self.opened: list[Delivery] = []
        self._limit = limit
        self._handles: list[int] = []
        self._choices: list[int] = []
        self._indices: list[int] = []
        self._counts: list[int] = []
        self._finishes: list[int] = []
        self._stops: list[int] = []
        self._ids: list[int] = []
        self._logprobs: list[worker_pb2.RunLogprobs] = []
        self._events: list[worker_pb2.RequestEvent] = []

    @property
    def empty(self) -> bool:
        """Nothing was added."""
        return not (self.opened or self._handles or self._events)

    @property
    def full(self) -> bool:
        """Too little room for whatever may come next."""
        return self.size > self._limit - EVENT_MOST

    def open(self, delivery: Delivery) -> None:
        """Its admission, before any of its runs."""
        self.opened.append(delivery)
        self.size += OPENED_MOST

    def runs(self, delivery: Delivery) -> bool:
        """What its choices have that was not sent; False if not all of it found room."""
        for number, cursor in enumerate(delivery.cursors):
            if not cursor.drained and not self._run(delivery, number, cursor):
                return False
        return True

    def event(self, event: worker_pb2.RequestEvent) -> None:
        """After all runs."""
        self._events.append(event)
        self.size += event.ByteSize() + 8

    def end(self, delivery: Delivery, event: worker_pb2.RequestEvent) -> None:
        """Its terminal event, after all of its runs."""
        self.event(event)
        self.endings.append(delivery)

    def sent(self, seq: int) -> Sent:
        """What to remember of it."""
        return Sent(seq, self.size, self.marks, self.endings, self.opened)

    def message(self, seq: int) -> worker_pb2.OutputBatch:
        """The finished batch."""
        return worker_pb2.OutputBatch(
            seq=seq,
            opened=[_opened(each) for each in self.opened],
            handle=self._handles,
            choice=self._choices,
            index=self._indices,
            count=self._counts,
            finish=self._finishes,
            token_ids=self._ids,
            stop_token=self._stops if any(self._stops) else (),
            logprobs=self._logprobs,
            events=self._events,
        )

    def _run(self, delivery: Delivery, number: int, cursor: Cursor) -> bool:
        choice = cursor.source
        assert isinstance(choice, Choice), "bulk results go in pieces"
        start, end = cursor.sent, len(choice.tokens)
        tops = delivery.execution.logprobs
        token_most = TOKEN_MOST + (LOGPROB_MOST + TOP_LOGPROB_MOST * tops if tops >= 0 else 0)
        end = min(end, start + max(0, self._limit - EVENT_MOST - RUN_MOST - self.size) // token_most)
        whole = end == len(choice.tokens)
        finish = choice.finish if whole else m.Finish.NONE
        if end == start and not finish:
            return False
        if tops >= 0 and end > start:
            entries = choice.logprobs[start - choice.logprobs_from : end - choice.logprobs_from]
            self._logprobs.append(worker_pb2.RunLogprobs(run=len(self._handles), tokens=_logprobs(entries)))
        self._handles.append(delivery.handle)
        self._choices.append(number)
        self._indices.append(start)
        self._counts.append(end - start)
        self._finishes.append(finish)
        self._stops.append(choice.stop_token + 1 if finish else 0)
        self._ids.extend(choice.tokens[start:end])
        self.size += RUN_MOST + token_most * (end - start)
        cursor.sent, cursor.finish_sent = end, bool(finish)
        self.marks.append((delivery, cursor, end, bool(finish)))
        return whole


def _opened(delivery: Delivery) -> worker_pb2.Opened:
    epoch, attempt = delivery.stamp
    return worker_pb2.Opened(
        request_id=delivery.execution.request_id,
        epoch=epoch,
        attempt=attempt,
        handle=delivery.handle,
        admit_ms=delivery.admit_ms,
    )


def _logprobs(entries: Iterable[m.Logprob]) -> list[common_pb2.TokenLogprob]:
    return [
        common_pb2.TokenLogprob(chosen=each.chosen, top_ids=each.top_ids, top_logprobs=each.top) for each in entries
    ]
