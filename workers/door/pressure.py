"""What is kept for a gateway that does not take it: bounded, by pausing its requests, then by ending them (rule 7).

Owns that bound. The one rule: `judge` each gateway at every tick, and a pressed one when it acknowledges; between two
ticks it may pass the bound by what the engine makes in that time.
"""

from __future__ import annotations

from shared.clock import Clock
from shared.errors import Reason
from workers.door import events
from workers.door.holdings import Holdings
from workers.door.outlets import Gateway


class Pressure:
    """See the module."""

    def __init__(self, holdings: Holdings, clock: Clock, *, retained_bytes: int, slow_reader_s: float) -> None:
        """`retained_bytes`: most that is kept for one gateway; `slow_reader_s`: how long a request may be paused."""
        self._holdings = holdings
        self._clock = clock
        self._retained_bytes = retained_bytes
        self._slow_reader_s = slow_reader_s

    def judge(self, gateway: Gateway) -> None:
        """Pauses, resumes or ends the gateway's requests."""
        retained = gateway.retained
        if retained > self._retained_bytes:
            gateway.pressed = True
            self._pause(gateway, True)
            self._end_slow_ones(gateway)
        elif gateway.pressed and retained < self._retained_bytes // 2:
            gateway.pressed = False
            self._pause(gateway, False)
        elif gateway.pressed:
            self._end_slow_ones(gateway)

    def _pause(self, gateway: Gateway, paused: bool) -> None:
        for delivery in gateway.deliveries:
            self._holdings.pause(delivery, paused)

    def _end_slow_ones(self, gateway: Gateway) -> None:
        before = self._clock.monotonic() - self._slow_reader_s
        for delivery in list(gateway.deliveries):
            execution = delivery.execution
            if execution.live and execution.paused_at is not None and execution.paused_at <= before:
                delivery.close()
                message = "the gateway did not take what was produced"
                event = events.failed(Reason.SLOW_READER, message, retryable=False, work_done=True)
                self._holdings.end(delivery, event, "failed")
