"""Telling one client what there is, at its own pace.

Owns pace, proof of life and the judgement that a client takes nothing. The one rule: the consumer of `events` takes
whatever has accumulated; what is not taken waits at the source, which is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway.pacer import Pacer
from shared.clock import Clock
from trunkline.inference.v1 import inference_pb2


class Source(Protocol):
    """Where deltas come from."""

    @property
    def over(self) -> bool:
        """Nothing follows what `take` gives now."""
        ...

    @property
    def failed_unbegun(self) -> bool:
        """It ended with an error before there was anything to tell."""
        ...

    def take(self) -> Iterable[inference_pb2.Delta]:
        """What is new."""
        ...

    def started(self) -> inference_pb2.Started:
        """The first event."""
        ...

    def finished(self) -> inference_pb2.Finished:
        """The last event. Raises the TrunklineError it ended with instead."""
        ...


@dataclass(frozen=True)
class Manners:
    """How clients are treated: silence after which a heartbeat is sent, and after which one is given up (s)."""

    heartbeat_s: float = 10.0
    slow_reader_s: float = 30.0


class Delivery:
    """The events of one source. `ring` when there is more; `on_slow` is called once if the client takes nothing."""

    def __init__(self, source: Source, pacer: Pacer, clock: Clock, manners: Manners) -> None:
        self.client_wait_s = 0.0
        self.on_slow: Callable[[], object] = lambda: None
        self._source = source
        self._pacer = pacer
        self._clock = clock
        self._manners = manners
        self.rung = False  # there is more, or it is over
        self._bell: asyncio.Future[None] | None = None  # while it is waited for
        self._news_at = 0.0
        self._offered_at: float | None = None  # since when an event waits for the client
        self._taken_at = 0.0

    def ring(self) -> None:
        """There is more, or it is over."""
        if not self.rung:
            self.rung = True
            self._news_at = self._clock.monotonic()
            self._strike()

    async def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Started with the first token, the end or a heartbeat that is due; deltas and heartbeats; Finished. Or raises
        the TrunklineError the request ends with."""
        source, started = self._source, False
        while True:
            idle = not await self._wait()
            over = source.over
            deltas = source.take()
            if over and source.failed_unbegun and not started:
                break
            if not started:
                started = True
                yield self._offer(inference_pb2.GenerateResponse(started=source.started()))
            for delta in deltas:
                yield self._offer(inference_pb2.GenerateResponse(delta=delta))
            if over:
                break
            if idle:
                yield self._offer(inference_pb2.GenerateResponse(heartbeat=inference_pb2.Heartbeat()))
            self._took()
        self._took()
        yield self._offer(inference_pb2.GenerateResponse(finished=source.finished()))
        self._offered_at = None

    async def _wait(self) -> bool:
        """Wait for news or the end; False if a heartbeat is due instead."""
        hold_s = self._taken_at + self._pacer.hold_s - self._clock.monotonic()
        if hold_s > 0 and not self._source.over:
            await asyncio.sleep(hold_s)
        if not self.rung:
            await self._rest()
        if not self.rung:
            return False
        self.rung = False
        now = self._clock.monotonic()
        if hold_s <= 0:
            self._pacer.waited(now - self._news_at, now)
        self._taken_at = now
        return True

    async def _rest(self) -> None:
        """Return when there is more or a heartbeat is due. Each token of a client that keeps up is waited for here: an
        Event inside a timeout would take three times as long."""
        loop = asyncio.get_running_loop()
        self._bell = loop.create_future()
        timer = loop.call_later(self._manners.heartbeat_s, self._strike)
        try:
            await self._bell
        finally:
            timer.cancel()
            self._bell = None

    def _strike(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def _offer(self, event: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
        """From here until the next `_took` or `_offer` the client is waited for."""
        self._took()
        self._offered_at = self._clock.monotonic()
        return event

    def _took(self) -> None:
        if self._offered_at is not None:
            self.client_wait_s += self._clock.monotonic() - self._offered_at
            self._offered_at = None

    def check_reader(self) -> None:
        """Give the client up if it has taken nothing for too long."""
        if self._offered_at is None:
            return
        if self._clock.monotonic() - self._offered_at > self._manners.slow_reader_s:
            self._offered_at = None
            self.on_slow()
