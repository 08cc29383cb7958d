"""How far one owner has got with one execution: what is sent, what is acknowledged, what must be kept.

Owns cursors, not tokens: nothing is copied to be retained, so nothing can be lost or doubled between copies. The one
rule: `acked ≤ sent ≤ produced` on every cursor; a new stream sets `sent` back, only an acknowledgement moves `acked`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2
from workers.door.execution import BulkResult, Choice, Execution

if TYPE_CHECKING:
    from workers.door.outlets import Outlet
    from workers.door.stream import Stream


class Cursor:
    """One choice's, or one bulk result's, place in an owner's transcript: in tokens, or in bytes."""

    __slots__ = ("acked", "finish_acked", "finish_sent", "sent", "source")

    def __init__(self, source: Choice | BulkResult, start: int, *, finished: bool = False) -> None:
        """`start`: what the owner has; `finished`: it knows that the choice has ended."""
        self.source = source
        self.acked = self.sent = start
        self.finish_acked = self.finish_sent = finished

    @property
    def drained(self) -> bool:
        """All there is has been sent."""
        return self.sent == self.source.produced and (self.finish_sent or not self.source.finish)

    @property
    def retained(self) -> int:
        """Bytes kept until they are acknowledged."""
        return self.source.retained(self.acked)

    def acknowledge(self, end: int) -> None:
        """The owner has everything before `end`."""
        if end > self.acked:
            self.acked = min(end, self.source.produced)  # a stop string may have cut what was under way
            self.source.forget(self.acked)

    def cut(self) -> None:
        """The choice was shortened, and has another finish."""
        produced = self.source.produced
        self.sent, self.acked = min(self.sent, produced), min(self.acked, produced)

    def rewind(self) -> None:
        """All that is not acknowledged goes again."""
        self.sent, self.finish_sent = self.acked, self.finish_acked

    def skip(self) -> None:
        """Nothing of it goes any more."""
        self.acked = self.sent = self.source.produced
        self.finish_acked = self.finish_sent = True


def _sole(execution: Execution) -> Choice | None:
    """Its choice, if it has one and no log-probabilities."""
    return execution.choices[0] if len(execution.choices) == 1 and execution.logprobs < 0 else None


class Delivery:
    """One (e, a)'s hold on an execution."""

    __slots__ = (
        "admit_ms",
        "cursors",
        "ending_sent",
        "execution",
        "handle",
        "news",
        "orphan_at",
        "outlet",
        "seen",
        "sole",
        "stamp",
        "stream",
    )

    def __init__(self, execution: Execution, cursors: Iterable[Cursor], outlet: Outlet, admit_ms: float) -> None:
        self.execution = execution
        self.stamp: Stamp = execution.stamp
        self.cursors = tuple(cursors)
        self.sole = _sole(execution)
        self.outlet = outlet
        self.admit_ms = admit_ms
        self.stream: Stream | None = None  # the one that carries it
        self.handle = 0  # its number there; 0: not said yet
        self.news: list[worker_pb2.RequestEvent] = []  # information, said once
        self.ending_sent = False
        self.seen = False  # its owner acknowledged something of it
        self.orphan_at: float | None = None  # when it is dropped for want of a stream

    @property
    def retained(self) -> int:
        """Bytes kept for it until its owner acknowledges them."""
        return sum(cursor.retained for cursor in self.cursors)

    def carry(self, stream: Stream) -> None:
        """A stream is there: all that is not acknowledged goes over it."""
        self.stream = stream
        self.handle = 0
        self.ending_sent = False
        self.orphan_at = None
        for cursor in self.cursors:
            cursor.rewind()

    def orphan(self, at: float) -> None:
        """No stream carries it; at `at` seconds it is dropped."""
        self.stream = None
        self.handle = 0
        self.orphan_at = at

    def close(self) -> None:
        """Nothing of its outputs goes any more; acknowledgements that still come mean nothing."""
        for cursor in self.cursors:
            cursor.skip()
