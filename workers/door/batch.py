"""Makes one OutputBatch: columns filled run by run, within the size limit.

Owns the layout and the marks that an acknowledgement will settle. The one rule: `add` what belongs to one delivery in
the order opened, runs, events; `full` says when to stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2
from workers.door.delivery import Cursor, Delivery
from workers.door.execution import Choice
from workers.engine import messages as m

MAX_BYTES = 256 * 1024
# Upper bounds of what the parts take as protobuf: five bytes for any u32, lengths and tags included.
RUN_MOST = 32
OPENED_MOST = 64
EVENT_MOST = 2560  # a sentence of 500 characters, four bytes each, and room


Run = tuple[int, int, int, int, int, int, Cursor]
"""Handle, choice, index, count, finish, stop token + 1, and the cursor it moves. Plain tuples: there are many."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message under way: what its acknowledgement settles."""

    seq: int
    size: int
    opened: Sequence[Delivery] = ()
    runs: Sequence[Run] = ()
    endings: Sequence[Delivery] = ()

    def acknowledge(self) -> None:
        """It has arrived."""
        for delivery in self.opened:
            delivery.seen = True
        for _, _, index, count, finish, _, cursor in self.runs:
            cursor.acknowledge(index + count, finish=finish != 0)


class Batch:
    """One batch in the making. `room`: bytes left of it for runs; above 0 there is room for events too."""

    def __init__(self, limit: int) -> None:
        """`limit`: most bytes."""
        self.room = self._most = limit - EVENT_MOST
        self._opened: list[Delivery] = []
        self._runs: list[Run] = []
        self._ids: list[int] = []
        self._logprobs: list[worker_pb2.RunLogprobs] = []
        self._events: list[worker_pb2.RequestEvent] = []
        self._endings: list[Delivery] = []

    @property
    def empty(self) -> bool:
        """Nothing was added."""
        return not (self._opened or self._runs or self._events)

    def open(self, delivery: Delivery) -> None:
        """Its admission, before any of its runs."""
        self._opened.append(delivery)
        self.room -= OPENED_MOST

    def choices(self, delivery: Delivery) -> bool:
        """What its choices have that was not sent; False if not all of it found room.

        The hot path of a worker: a run costs about a microsecond, half of it here.
        """
        execution = delivery.execution
        for number, cursor in enumerate(delivery.cursors):
            choice = execution.choices[number]
            start, finish = cursor.sent, choice.finish
            count = len(choice.tokens) - start
            if not count and (cursor.finish_sent or not finish):
                continue
            size = RUN_MOST + execution.wire_bytes * count
            if size > self.room:
                return self._part(delivery, number, cursor, choice)
            self._runs.append((delivery.handle, number, start, count, finish, choice.stop_token + 1, cursor))
            self._ids += choice.tokens[start:]
            if execution.logprobs >= 0:
                self._with_logprobs(choice, start, count)
            self.room -= size
            cursor.sent = start + count
            cursor.finish_sent = finish != 0
        return True

    def event(self, event: worker_pb2.RequestEvent) -> None:
        """After all runs."""
        self._events.append(event)
        self.room -= event.ByteSize() + 8

    def end(self, delivery: Delivery, event: worker_pb2.RequestEvent) -> None:
        """Its terminal event, after all of its runs."""
        self.event(event)
        self._endings.append(delivery)

    def sent(self, seq: int) -> Sent:
        """What to remember of it."""
        return Sent(seq, self._most - self.room, self._opened, self._runs, self._endings)

    def message(self, seq: int) -> worker_pb2.OutputBatch:
        """The finished batch."""
        columns = tuple(zip(*self._runs, strict=True)) or ((),) * 7
        handles, choices, indices, counts, finishes, stops, _ = columns
        return worker_pb2.OutputBatch(
            seq=seq,
            opened=[_opened(each) for each in self._opened],
            handle=handles,
            choice=choices,
            index=indices,
            count=counts,
            finish=finishes,
            token_ids=self._ids,
            stop_token=stops if any(stops) else (),
            logprobs=self._logprobs,
            events=self._events,
        )

    def _part(self, delivery: Delivery, number: int, cursor: Cursor, choice: Choice) -> bool:
        """As many tokens as there is room for; the rest goes in the next batch, the finish with it."""
        unit, start = delivery.execution.wire_bytes, cursor.sent
        count = (self.room - RUN_MOST) // unit
        if count > 0:
            self._runs.append((delivery.handle, number, start, count, 0, 0, cursor))
            self._ids += choice.tokens[start : start + count]
            if delivery.execution.logprobs >= 0:
                self._with_logprobs(choice, start, count)
            cursor.sent = start + count
        self.room = 0
        return False

    def _with_logprobs(self, choice: Choice, start: int, count: int) -> None:
        """Of the run that was just added."""
        first = start - choice.logprobs_from
        entries = _logprobs(choice.logprobs[first : first + count])
        self._logprobs.append(worker_pb2.RunLogprobs(run=len(self._runs) - 1, tokens=entries))


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
