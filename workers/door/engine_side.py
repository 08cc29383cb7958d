"""The side of the door that faces the engine: its life, what it produces, whether it still moves.

Owns the reading of engine messages. The one rule: what cannot be raises EngineBroken, and the engine is then ended; the
door never repairs what an engine says.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.wire import HEARTBEAT_S, engine_stalled
from trunkline.worker.v1 import worker_pb2
from workers.door import events
from workers.door.delivery import Delivery
from workers.door.execution import EngineBroken, Execution
from workers.door.holdings import Holdings, Observer, Send
from workers.door.intake import Served
from workers.door.ledger import Capacity
from workers.door.load import NOTHING, Loads
from workers.door.stream import Pulse
from workers.engine import messages as m


class EngineSide:
    """See the module."""

    def __init__(self, holdings: Holdings, loads: Loads, observer: Observer, clock: Clock) -> None:
        self._holdings = holdings
        self._loads = loads
        self._observer = observer
        self._clock = clock
        self._heard_at = self._moved_at = self._looked_at = self._step_began = clock.monotonic()
        self._longest_ms = 0.0  # step of this engine's life: what was a step once is no stall now

    def up(self, served: Served, capacity: Capacity, send: Send) -> None:
        """An engine is ready and empty."""
        self._holdings.engine_up(served, capacity, send)
        self._loads.served, self._loads.engine = served, _unused(served)
        self._loads.changed()
        self._heard_at = self._moved_at = self._looked_at = self._clock.monotonic()
        self._longest_ms = 0.0

    def down(self, message: str) -> None:
        """The engine is gone: what it had is released, and every stream ends after saying so."""
        self._holdings.engine_down(message)
        self._holdings.outlets.clear(
            TrunklineError(Reason.WORKER_LOST, "the engine has ended; the next one is a new incarnation")
        )
        self._loads.engine = NOTHING
        self._loads.changed()

    def says(self, said: m.StepOut | m.Tick) -> None:
        """Takes what the engine produced. Raises EngineBroken."""
        self._heard_at = self._clock.monotonic()
        self._loads.engine = said.load
        self._longest_ms = max(self._longest_ms, said.load.max_step_ms)
        self._holdings.step = said.step
        if isinstance(said, m.StepOut):
            self._moved_at = self._heard_at
            self._step(said)
        self._loads.changed()

    def stalled(self, loop_lag_s: float) -> bool:
        """Work waits and the engine makes no step (rule 12). Ask often: time counts from when work was first seen
        waiting, and a lag of our own restarts it."""
        now = self._looked_at = self._clock.monotonic()
        if loop_lag_s > HEARTBEAT_S:
            self._heard_at = now
        if loop_lag_s > HEARTBEAT_S or not self._work_waits:
            self._moved_at = now
        return engine_stalled(tick_age_s=now - self._moved_at, max_step_s=self._longest_ms / 1e3, work_waits=True)

    @property
    def pulse(self) -> Pulse:
        """Its progress, for heartbeats. Its age is counted up to the last look: a door that has just woken has not."""
        return Pulse(max(0, int((self._looked_at - self._heard_at) * 1e3)), self._holdings.step)

    @property
    def _work_waits(self) -> bool:
        return any(delivery.execution.paused_at is None for delivery in self._holdings.by_key.values())

    def _step(self, step: m.StepOut) -> None:
        self._observer.stepped(step)
        self._step_began = self._heard_at - step.duration_ms / 1e3
        self._runs(step.runs)
        for event in step.events:
            delivery = self._by_key(event.key)
            if delivery.execution.live:
                self._event(delivery, event)
            elif isinstance(event, m.Freed):
                self._holdings.freed(delivery)
            # What else is said of a cancelled request was said before the engine knew.

    def _by_key(self, key: int) -> Delivery:
        delivery = self._holdings.by_key.get(key)
        if delivery is None:
            raise EngineBroken(f"the engine speaks of key {key}, which it does not have")
        return delivery

    def _runs(self, runs: Iterable[m.Run]) -> None:
        """Every token passes here."""
        by_key = self._holdings.by_key
        for run in runs:
            delivery = by_key.get(run.key) or self._by_key(run.key)
            execution, number = delivery.execution, run.choice
            if not execution.live:
                continue
            if not 0 <= number < len(execution.choices):
                raise EngineBroken(f"a run of choice {number}, of {len(execution.choices)}")
            first = execution.choices[number].extend(run)
            if first:
                self._first(execution)
            stream = delivery.stream
            if stream is not None:
                stream.mark(delivery, first)

    def _first(self, execution: Execution) -> None:
        if execution.times.first_token is None:
            execution.times.first_token = self._clock.monotonic()
            self._observer.first_token(execution)

    def _event(self, delivery: Delivery, event: m.Event) -> None:
        match event:
            case m.Scheduled():
                self._scheduled(delivery, event)
            case m.Encoded():
                self._encoded(delivery, event)
            case m.Finished():
                self._finished(delivery, event)
            case m.Failed():
                self._holdings.ended(delivery, _failed(event), "failed")
            case m.Freed():
                raise EngineBroken(f"the engine freed key {event.key}, which was not cancelled")

    def _scheduled(self, delivery: Delivery, event: m.Scheduled) -> None:
        execution = delivery.execution
        # The engine counts from when it took the request in, which a step under way delays; the door, from Admitted.
        waited_ms = max(event.queue_ms, (self._step_began - execution.times.admitted) * 1e3)
        event = msgspec.structs.replace(event, queue_ms=waited_ms)
        execution.scheduled = event
        execution.times.scheduled = execution.times.admitted + waited_ms / 1e3
        self._observer.scheduled(execution)
        delivery.news.append(events.scheduled(event))
        if delivery.stream is not None:
            delivery.stream.mark(delivery)

    def _encoded(self, delivery: Delivery, event: m.Encoded) -> None:
        execution = delivery.execution
        if execution.bulk is None:
            raise EngineBroken(f"an embedding of key {event.key}, which generates")
        execution.bulk.put(event.index, event.data)
        self._first(execution)
        if delivery.stream is not None:
            delivery.stream.mark(delivery, True)
        if event.last:
            self._finished(delivery, self._encode_times(execution))

    def _finished(self, delivery: Delivery, event: m.Finished) -> None:
        execution = delivery.execution
        whole = execution.bulk is None or execution.bulk.produced == execution.bulk.total
        if not (whole and all(choice.finish for choice in execution.choices)):
            raise EngineBroken(f"key {event.key} finished with something missing")
        if execution.scheduled is not None:
            event = msgspec.structs.replace(event, queue_ms=execution.scheduled.queue_ms)
        self._holdings.ended(delivery, events.finished(event), "finished")

    def _encode_times(self, execution: Execution) -> m.Finished:
        """The engine gives no times for encode work: these are the door's."""
        began = execution.times.scheduled
        return m.Finished(
            key=execution.key,
            queue_ms=execution.scheduled.queue_ms if execution.scheduled else 0.0,
            prefill_ms=(self._clock.monotonic() - began) * 1e3 if began is not None else 0.0,
            decode_ms=0.0,
            steps=0,
            cached_tokens=execution.scheduled.cached_tokens if execution.scheduled else 0,
            preemptions=0,
        )


def _unused(served: Served) -> m.Load:
    """The load of an engine that has said nothing yet."""
    return msgspec.structs.replace(NOTHING, kv_blocks_free=served.kv_tokens // served.block_size)


def _failed(event: m.Failed) -> worker_pb2.RequestEvent:
    reason = Reason(event.reason) if event.reason in Reason.__members__ else Reason.ENGINE_FAULT
    return events.failed(reason, event.message, retryable=event.retryable, work_done=event.work_done)
