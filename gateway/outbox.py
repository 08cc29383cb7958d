"""What one Outputs stream has to say to its worker: cancels and stops at once, acknowledgements batched, heartbeats.

Pure but for its event. The one rule: everything here can be lost with the stream, since the next Hello says it all
again; so a full outbox breaks the stream instead of growing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from shared.clock import Clock
from shared.wire import HEARTBEAT_S, IDLE_HEARTBEAT_S, Stamp
from trunkline.worker.v1 import worker_pb2

_ACK_EVERY: Final = 16  # batches
_ACK_WITHIN_S: Final = 0.05
_CAPACITY: Final = 16_384  # a cancel and 16 stops of a thousand requests


class Outbox:
    """Messages to write, in order: cancels and stops, then an acknowledgement that is due, then a heartbeat."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._urgent: deque[worker_pb2.OutputsRequest] = deque()
        self._news = asyncio.Event()
        self._seq = 0
        self._acked = 0
        self._weight = 0  # of what is not acknowledged
        self._unacked_since = 0.0
        self._wrote_at = clock.monotonic()

    @property
    def full(self) -> bool:
        """There is no room for another cancel or stop."""
        return len(self._urgent) >= _CAPACITY

    def cancel(self, request_id: bytes, stamp: Stamp) -> None:
        """End a request at ≤ `stamp`."""
        order = worker_pb2.CancelOutput(request_id=request_id, epoch=stamp[0], attempt=stamp[1])
        self._put(worker_pb2.OutputsRequest(cancel=order))

    def stop(self, request_id: bytes, stamp: Stamp, choice: int, at_index: int) -> None:
        """End a choice that keeps `at_index` tokens."""
        order = worker_pb2.StopOutput(
            request_id=request_id, epoch=stamp[0], attempt=stamp[1], choice=choice, at_index=at_index
        )
        self._put(worker_pb2.OutputsRequest(stop=order))

    def took(self, seq: int, weight: int = 1) -> None:
        """Everything up to `seq` is in the transcripts. A message of more `weight` is acknowledged sooner."""
        if self._seq == self._acked:
            self._unacked_since = self._clock.monotonic()
            self._news.set()
        self._seq = seq
        self._weight += weight
        if self._weight >= _ACK_EVERY:
            self._news.set()

    def next(self, idle: bool) -> worker_pb2.OutputsRequest | None:
        """The next message that is due; None while none is."""
        now = self._clock.monotonic()
        message = self._due(now, idle)
        if message is not None:
            self._wrote_at = now
        return message

    async def wait(self, idle: bool) -> None:
        """Return when something may be due."""
        self._news.clear()
        if self._urgent:
            return
        now = self._clock.monotonic()
        due = self._wrote_at + _period(idle)
        if self._seq != self._acked:
            due = min(due, self._unacked_since + _ACK_WITHIN_S)
        try:
            async with asyncio.timeout(max(0.0, due - now)):
                await self._news.wait()
        except TimeoutError:
            return  # what is due is due by time

    def _put(self, message: worker_pb2.OutputsRequest) -> None:
        if not self.full:
            self._urgent.append(message)
            self._news.set()

    def _due(self, now: float, idle: bool) -> worker_pb2.OutputsRequest | None:
        if self._urgent:
            return self._urgent.popleft()
        late = self._seq != self._acked and now - self._unacked_since >= _ACK_WITHIN_S
        if self._weight >= _ACK_EVERY or late:
            self._acked, self._weight = self._seq, 0
            return worker_pb2.OutputsRequest(ack=worker_pb2.Ack(seq=self._seq))
        if now - self._wrote_at >= _period(idle):
            return worker_pb2.OutputsRequest(heartbeat=worker_pb2.Heartbeat())
        return None


def _period(idle: bool) -> float:
    return IDLE_HEARTBEAT_S if idle else HEARTBEAT_S
