"""What the door holds: the current delivery of each request id, and of each engine key.

Owns beginnings and endings. The one rule: whatever ends a request goes through `end`, `drop` or `retire`, so that its
reservation, its mark against late submissions and its outlet are settled together.

    admit ─▶ held ─┬─ ended, end ─▶ ended, kept until acknowledged ─ retire ─▶ gone
                   └─ drop ─▶ dropped
    What the door itself ends (end, drop) stays known by key until the engine says Freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from shared.clock import Clock
from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2
from workers.door import events
from workers.door.delivery import Delivery
from workers.door.execution import Execution
from workers.door.fencing import Fences
from workers.door.intake import Served
from workers.door.ledger import Capacity, Ledger
from workers.door.outlets import Outlets
from workers.engine import messages as m

Send = Callable[[m.ToEngine], None]


class Observer(Protocol):
    """Who wants to know, for metrics and spans. Nothing here may raise or wait."""

    def answered(self, kind: str) -> None:
        """A submission was answered: admitted, rejected, mismatch or fenced."""
        ...

    def admitted(self, execution: Execution, *, adopted: bool) -> None:
        """An execution began, or got another owner."""
        ...

    def scheduled(self, execution: Execution) -> None:
        """The engine took it into its first step."""
        ...

    def first_token(self, execution: Execution) -> None:
        """Its first output came."""
        ...

    def ended(self, execution: Execution, outcome: str) -> None:
        """finished, failed, released, or dropped (cancelled, fenced, orphaned)."""
        ...

    def stepped(self, step: m.StepOut) -> None:
        """The engine ran a step."""
        ...


class Holdings:
    """See the module."""

    def __init__(self, fences: Fences, outlets: Outlets, observer: Observer, clock: Clock) -> None:
        self._clock = clock
        self.fences = fences
        self.outlets = outlets
        self.ledger = Ledger(Capacity(0, 0, 0))
        self.held: dict[bytes, Delivery] = {}
        self.by_key: dict[int, Delivery] = {}  # those the engine has
        self.served: Served | None = None  # None while no engine is ready
        self.step = 0  # the engine's last
        self._observer = observer
        self._send: Send | None = None
        self._keys = 0

    def engine_up(self, served: Served, capacity: Capacity, send: Send) -> None:
        """An engine is there, empty."""
        assert not self.by_key, "an engine's requests outlived it"
        self.ledger = Ledger(capacity)
        self.served = served
        self._send = send
        self._keys = self.step = 0

    def engine_down(self, message: str) -> None:
        """The engine is gone, and with it what it had: that is released, what had ended goes on to its owner."""
        self._send = self.served = None
        self.by_key.clear()
        self.ledger.clear()
        for delivery in list(self.held.values()):
            if delivery.execution.live:
                self.ended(delivery, events.released(worker_pb2.Released.WHY_GROUP_FAILED, message), "released")
            self._forget(delivery)

    @property
    def incarnation(self) -> int:
        """The worker's: its engine's life; 0 while no engine is ready."""
        return self.served.incarnation if self.served is not None else 0

    @property
    def live(self) -> list[Delivery]:
        """Those that the engine works on or will."""
        return [delivery for delivery in self.held.values() if delivery.execution.live]

    def tell(self, message: m.ToEngine) -> None:
        """To the engine, if there is one."""
        if self._send is not None:
            self._send(message)

    def next_key(self) -> int:
        """A key for the engine, never used before in its life."""
        self._keys += 1
        return self._keys

    def admit(self, delivery: Delivery, work: m.Admit | m.Encode | None) -> None:
        """A new request; `work` is what the engine has to do, None if nothing is left to do."""
        execution = delivery.execution
        self.held[execution.request_id] = delivery
        if work is not None:
            self.by_key[execution.key] = delivery
            self.ledger.take(execution.key, execution.need)
            self.tell(work)
        self.outlets.attach(delivery)
        self._observer.admitted(execution, adopted=False)
        if work is None:
            self._observer.ended(execution, "finished")

    def replace(self, old: Delivery, new: Delivery) -> None:
        """A higher stamp takes an execution over, with its tokens."""
        execution = new.execution
        self.outlets.detach(old, events.fenced_out(new.stamp))
        self.held[execution.request_id] = new
        if execution.key in self.by_key:
            self.by_key[execution.key] = new
        self.outlets.attach(new)
        self.pause(new, False)
        self._observer.admitted(execution, adopted=True)

    def pause(self, delivery: Delivery, paused: bool) -> None:
        """Its owner is slow to take what there is: nothing more is made for it meanwhile."""
        execution = delivery.execution
        if execution.live and (execution.paused_at is not None) != paused:
            execution.paused_at = self._clock.monotonic() if paused else None
            self.tell(m.Pause(execution.key, paused))

    def ended(self, delivery: Delivery, event: worker_pb2.RequestEvent, outcome: str) -> None:
        """The engine is done with it; `event` is kept until its owner acknowledges it."""
        execution = delivery.execution
        self.by_key.pop(execution.key, None)
        self.ledger.give(execution.key)
        execution.live, execution.ending = False, event
        self._observer.ended(execution, outcome)
        if delivery.stream is not None:
            delivery.stream.mark(delivery)

    def end(self, delivery: Delivery, event: worker_pb2.RequestEvent, outcome: str) -> None:
        """The door ends it; the engine says Freed later."""
        self.ended(delivery, event, outcome)
        self._cancel(delivery)

    def drop(self, delivery: Delivery, last_word: worker_pb2.RequestEvent | None = None) -> None:
        """Nobody wants it any more: what the engine does for it is cancelled, what is kept of it goes."""
        execution = delivery.execution
        live = execution.live
        self._forget(delivery)
        self.outlets.detach(delivery, last_word)
        if live:
            execution.live = False
            self._observer.ended(execution, "dropped")
            self._cancel(delivery)
        elif execution.key not in self.by_key:
            delivery.outlet.say(delivery, events.freed(self.step))

    def retire(self, delivery: Delivery) -> None:
        """Its owner has all of it."""
        if self.held.get(delivery.execution.request_id) is delivery:
            self._forget(delivery)
            self.outlets.detach(delivery)

    def cancel(self, request_id: bytes, stamp: Stamp) -> bool:
        """Ends what is held at ≤ `stamp`; False if there is nothing. Later submissions at ≤ `stamp` are refused."""
        delivery = self.held.get(request_id)
        self.fences.ended(request_id, stamp)
        if delivery is None or delivery.stamp > stamp:
            return False
        self.drop(delivery)
        return True

    def stop(self, delivery: Delivery, number: int, at_index: int) -> None:
        """Ends a choice where its owner saw a stop string. A finish that was sent is the owner's to overrule."""
        if number >= len(delivery.execution.choices):
            return  # bulk results have none
        cursor, choice = delivery.cursors[number], delivery.execution.choices[number]
        if cursor.finish_sent:
            return
        if not choice.finish:
            self.tell(m.StopChoice(delivery.execution.key, number))
        choice.cut(at_index)
        cursor.cut()
        if delivery.stream is not None:
            delivery.stream.mark(delivery)

    def freed(self, delivery: Delivery) -> None:
        """The engine holds nothing for a cancelled request any more."""
        del self.by_key[delivery.execution.key]
        delivery.outlet.say(delivery, events.freed(self.step))

    def highest(self, request_id: bytes, stamp: Stamp) -> Stamp | None:
        """The highest stamp seen if it forbids `stamp`."""
        delivery = self.held.get(request_id)
        if delivery is not None and delivery.stamp > stamp:
            return delivery.stamp
        return self.fences.refuses(request_id, stamp)

    def _cancel(self, delivery: Delivery) -> None:
        """Its reservation ends now: the engine reads its messages in order, the next admission after this."""
        key = delivery.execution.key
        self.ledger.give(key)
        self.by_key[key] = delivery
        self.tell(m.Cancel(key))

    def _forget(self, delivery: Delivery) -> None:
        del self.held[delivery.execution.request_id]
        self.fences.ended(delivery.execution.request_id, delivery.stamp)
