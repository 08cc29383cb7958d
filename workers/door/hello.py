"""What a gateway's Hello means for the deliveries of its outlet: first connect, late open and reconnect alike.

Pure. The one rule: what the Hello leaves out is dropped only if its owner is known to have seen it. A Hello may have
been written before a submission that overtook it; such a one is opened, and an owner that does not want it says Cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2
from workers.door import events
from workers.door.delivery import Delivery

NOT_HELD = "the worker does not hold it"


@dataclass(slots=True)
class Reconciled:
    """What to do."""

    open: list[Delivery] = field(default_factory=list)
    drop: list[Delivery] = field(default_factory=list)
    stop: list[tuple[Delivery, int, int]] = field(default_factory=list)  # choice, at index
    say: list[tuple[bytes, worker_pb2.RequestEvent]] = field(default_factory=list)  # of ids that are not here


def reconcile(
    hello: worker_pb2.Hello, deliveries: Iterable[Delivery], current: Callable[[bytes], Stamp | None]
) -> Reconciled:
    """`deliveries` are the outlet's; `current(id)` is the stamp under which the door holds an id, for any gateway.

    A delivery listed as pending at a higher stamp stays as it is, unopened, to be adopted or to lapse.
    """
    held = {each.request_id: each for each in hello.held}
    pending = {each.request_id: (each.epoch, each.attempt) for each in hello.pending}
    done = Reconciled()
    for delivery in deliveries:
        request_id = delivery.execution.request_id
        listed = held.get(request_id)
        if listed is not None and _stamp(listed) == delivery.stamp:
            del held[request_id]
            _resume(delivery, listed.next, done)
        elif pending.get(request_id, delivery.stamp) > delivery.stamp:
            continue
        elif request_id in pending or not delivery.seen:
            done.open.append(delivery)
        else:
            done.drop.append(delivery)
    for request_id, listed in held.items():
        done.say.extend((request_id, event) for event in _gone(_stamp(listed), current(request_id)))
    return done


def _resume(delivery: Delivery, places: Iterable[worker_pb2.NextIndex], done: Reconciled) -> None:
    """The delivery goes on where its owner is; one that is where nothing was produced cannot be served from here.

    A place before what was acknowledged means that a stop string has cut the transcript there.
    """
    delivery.seen = True
    for place in places:
        cursor = delivery.cursors[place.choice] if place.choice < len(delivery.cursors) else None
        if cursor is None or place.index > cursor.source.produced:
            done.drop.append(delivery)
            done.say.append((delivery.execution.request_id, _not_held()))
            return
        if place.index < cursor.acked:
            done.stop.append((delivery, place.choice, place.index))
        cursor.acknowledge(place.index)
    done.open.append(delivery)


def _gone(listed: Stamp, current: Stamp | None) -> Iterable[worker_pb2.RequestEvent]:
    """What to say of a request that its owner lists and this outlet does not have."""
    if current is None or current < listed:
        yield _not_held()
    elif current > listed:
        yield events.fenced_out(current)
    # Equal: it is here, on the gateway's other lane.


def _not_held() -> worker_pb2.RequestEvent:
    return events.released(worker_pb2.Released.WHY_UNSPECIFIED, NOT_HELD)


def _stamp(listed: worker_pb2.Held) -> Stamp:
    return (listed.epoch, listed.attempt)
