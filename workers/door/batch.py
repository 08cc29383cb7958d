"""Makes one OutputBatch: columns filled run by run, within the size limit.

Owns the layout and the marks that an acknowledgement will settle. The one rule: `add` what belongs to one delivery in
the order opened, runs, events; `full` says when to stop.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2
from workers.door.delivery import Cursor, Delivery
from workers.door.execution import TOKEN_WIRE_BYTES, Choice
from workers.engine import messages as m

MAX_BYTES = 256 * 1024
# Upper bounds of what the parts take as protobuf: five bytes for any u32, lengths and tags included.
RUN_MOST = 32
OPENED_MOST = 64
TOKEN_MOST = RUN_MOST + TOKEN_WIRE_BYTES
EVENT_MOST = 2560  # a sentence of 500 characters, four bytes each, and room


Run = tuple[int, int, int, int, int, int, Cursor]
"""Handle, choice, index, count, finish, stop token + 1, and the cursor it moves. Plain tuples: there are many."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message under way: what its acknowledgement settles. `reached`: how far it takes each cursor in it."""

    seq: int
    size: int
    reached: Mapping[Cursor, int] = field(default_factory=dict)
    finished: Sequence[Cursor] = ()
    opened: Sequence[Delivery] = ()
    endings: Sequence[Delivery] = ()


def acknowledge(arrived: Iterable[Sent]) -> None:
    """These have arrived, in this order. Only the last of what they say of a cursor counts."""
    reached: dict[Cursor, int] = {}
    for sent in arrived:
        reached.update(sent.reached)
        for cursor in sent.finished:
            cursor.finish_acked = True
        for delivery in sent.opened:
            delivery.seen = True
    for cursor, end in reached.items():
        cursor.acknowledge(end)


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

    def token(self, delivery: Delivery) -> bool:
        """Adds one more token of its only choice, if that is all that is new of it; False if it is not.

        The hot path of a worker: nearly always it is so, and all of a worker's tokens pass here.
        """
        handle, choice = delivery.handle, delivery.sole
        if choice is None or not handle or choice.finish or delivery.news or delivery.execution.ending:
            return False
        cursor, tokens = delivery.cursors[0], choice.tokens
        start = cursor.sent
        if len(tokens) - start != 1 or self.room < TOKEN_MOST:
            return False
        self._runs.append((handle, 0, start, 1, 0, 0, cursor))
        self._ids.append(tokens[start])
        self.room -= TOKEN_MOST
        cursor.sent = start + 1
        return True

    def choices(self, delivery: Delivery) -> bool:
        """What its choices have that was not sent; False if not all of it found room."""
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

    def finish(self, seq: int) -> tuple[worker_pb2.OutputsResponse, Sent]:
        """The message, and what to remember of it."""
        columns = tuple(zip(*self._runs, strict=True)) or ((),) * 7
        handles, choices, indices, counts, finishes, stops, cursors = columns
        message = worker_pb2.OutputsResponse()
        batch = message.batch  # filled in place: a message that is put into another is copied
        batch.seq = seq
        batch.opened.extend(map(_opened, self._opened))
        batch.handle.extend(handles)
        batch.choice.extend(choices)
        batch.index.extend(indices)
        batch.count.extend(counts)
        batch.finish.extend(finishes)
        batch.token_ids.extend(self._ids)
        batch.stop_token.extend(stops if any(stops) else ())
        batch.logprobs.extend(self._logprobs)
        batch.events.extend(self._events)
        reached = dict(zip(cursors, map(operator.add, indices, counts), strict=True))
        finished = tuple(compress(cursors, finishes))
        return message, Sent(seq, self._most - self.room, reached, finished, self._opened, self._endings)

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
