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

    __slots__ = ("acked", "finish_acked", "finish_sent", "sent", "source", "unit_bytes")

    def __init__(self, source: Choice | BulkResult, start: int, *, finished: bool = False) -> None:
        """`start`: what the owner has; `finished`: it knows that the choice has ended."""
        self.source = source
        self.acked = self.sent = start
        self.finish_acked = self.finish_sent = finished
        self.unit_bytes = source.unit_bytes

    @property
    def produced(self) -> int:
        """Units there are."""
        return self.source.produced

    @property
    def drained(self) -> bool:
        """All there is has been sent."""
        return self.sent == self.produced and (self.finish_sent or not self.source.finish)

    def rewind(self) -> None:
        """All that is not acknowledged goes again."""
        self.sent, self.finish_sent = self.acked, self.finish_acked

    def skip(self) -> None:
        """Nothing of it goes any more."""
        self.acked = self.sent = self.produced
        self.finish_acked = self.finish_sent = True


class Delivery:
    """One (e, a)'s hold on an execution."""

    __slots__ = (
        "admit_ms",
        "closed",
        "cursors",
        "ending_sent",
        "execution",
        "handle",
        "news",
        "orphan_at",
        "outlet",
        "retained",
        "seen",
        "stamp",
        "stream",
    )

    def __init__(self, execution: Execution, cursors: Iterable[Cursor], outlet: Outlet, admit_ms: float) -> None:
        self.execution = execution
        self.stamp: Stamp = execution.stamp
        self.cursors = tuple(cursors)
        self.outlet = outlet
        self.admit_ms = admit_ms
        self.stream: Stream | None = None  # the one that carries it
        self.handle = 0  # its number there; 0: not said yet
        self.news: list[worker_pb2.RequestEvent] = []  # information, said once
        self.ending_sent = False
        self.seen = False  # its owner acknowledged something of it
        self.orphan_at: float | None = None  # when it is dropped for want of a stream
        self.closed = False
        self.retained = 0
        self.recount()

    @property
    def drained(self) -> bool:
        """All that was produced has been sent."""
        return all(cursor.drained for cursor in self.cursors)

    def keep(self, size: int) -> None:
        """So many more bytes are kept for it."""
        self.retained += size
        self.outlet.gateway.retained += size

    def recount(self) -> None:
        """Sets the kept bytes by the cursors, after they moved by more than production or acknowledgement."""
        self.keep(sum((each.produced - each.acked) * each.unit_bytes for each in self.cursors) - self.retained)

    def acknowledge(self, cursor: Cursor, end: int, *, finish: bool = False) -> None:
        """Its owner has everything before `end`, and the finish if so."""
        end = min(end, cursor.produced)  # a stop string may have cut what was under way
        cursor.finish_acked = cursor.finish_acked or finish
        if self.closed or end <= cursor.acked:
            return
        self.keep((cursor.acked - end) * cursor.unit_bytes)
        cursor.acked = end
        cursor.source.forget(end)

    def cut(self, cursor: Cursor) -> None:
        """The cursor's choice was shortened, and has another finish."""
        cursor.sent, cursor.acked = min(cursor.sent, cursor.produced), min(cursor.acked, cursor.produced)
        self.recount()

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

    def abandon_output(self) -> None:
        """Only its ending still goes."""
        for cursor in self.cursors:
            cursor.skip()
        self.recount()

    def close(self) -> None:
        """It ends: nothing is kept for it any more."""
        self.keep(-self.retained)
        self.closed = True
