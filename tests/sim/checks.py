"""INV-1 to INV-12, as far as one can see them from above: at quiescent points, and when everything has settled.

The one rule: nothing here changes what it looks at. Transcripts (INV-2, INV-10) are judged by the clients, the engine's
own invariants (INV-4, INV-5, INV-12) inside it, and INV-6 by comparing histories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from gateway import custody
from router.policy import Candidate
from shared.records import terminal
from shared.state import MAX_BEHIND
from trunkline.common.v1 import common_pb2

if TYPE_CHECKING:
    from tests.sim.world import GatewayParts, RouterParts, WorkerParts, World

EVERY_S: Final = 0.25
PATIENCE_S: Final = 2.0  # for a submission that a worker could take


class Checks:
    """Of one world. `look` at quiescent points, `leaks` once nothing is asked any more."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next = 0.0
        self._placeable: dict[tuple[int, bytes], float] = {}
        self.ended: Counter[str] = Counter()

    def watch_gateway(self, gateway: GatewayParts) -> None:
        """INV-1: each request that it accepts ends there once."""
        table: Any = gateway.core.table
        end, seen = table.end, set()

        def once(request: Any, **how: Any) -> None:
            assert request.id not in seen, f"INV-1: {request.id} ended twice"
            seen.add(request.id)
            assert terminal(request.state) or how, "INV-1: it ended in a state that is none"
            self.ended[common_pb2.RequestState.Name(request.state)] += 1
            end(request, **how)
            assert table.accepted == len(seen) + len(table), "INV-1: accepted is not ended and in flight"

        table.end = once

    def watch_router(self, router: RouterParts) -> None:
        """INV-7: nothing is placed by an old report."""
        fleet: Any = router.core.fleet
        place = fleet.place

        def checked(worker: Any, need: Any) -> None:
            assert worker.report_age_s <= fleet.max_report_age_s, f"INV-7: a report of {worker.report_age_s:.1f} s"
            place(worker, need)

        fleet.place = checked

    def look(self) -> None:
        """At a quiescent point; not at every one."""
        now = self._world.loop.now
        if now < self._next:
            return
        self._next = now + EVERY_S
        for node in self._world.nodes.values():
            if node.process.runs and node.parts is not None:
                getattr(self, f"_{node.role}")(node.parts)

    def _gateway(self, gateway: GatewayParts) -> None:
        core = gateway.core
        assert len(core.links.attempts) <= len(core.table), "an attempt without a request"
        assert len(gateway.store._behind) <= MAX_BEHIND, "INV-9: the queue of writes"

    def _router(self, router: RouterParts) -> None:
        dispatcher: Any = router.core.dispatcher
        metrics = router.core.metrics
        ended = sum(child._value.get() for child in metrics.ended._metrics.values())
        pending = dispatcher._open + ended
        assert metrics.submitted._value.get() == pending, "INV-1: submitted is not ended and pending"
        assert len(dispatcher) <= dispatcher._config.capacity, "INV-9: the queue"
        self._check_due(id(router), dispatcher)

    def _check_due(self, router: int, dispatcher: Any) -> None:
        """INV-8: what waits and could be placed is placed soon."""
        now = self._world.loop.now
        placeable = {}
        for lane in dispatcher._queue.lanes():
            candidates: list[Candidate] = list(dispatcher._fleet.candidates(lane))
            for item in dispatcher._queue.in_order(lane):
                chosen = dispatcher._policy.choose(candidates, item.need)
                if chosen is not None and not chosen.busy:
                    since = self._placeable.get((router, item.id), now)
                    placeable[router, item.id] = since
                    assert now - since < PATIENCE_S, f"INV-8: {item.id.hex()} waits while a worker has room"
                break  # those behind it may wait for its worker
        self._placeable = {key: at for key, at in self._placeable.items() if key[0] != router} | placeable

    def _worker(self, worker: WorkerParts) -> None:
        holdings: Any = worker.door._holdings
        live = {delivery.execution.key for delivery in holdings.live}
        assert holdings.ledger.requests == len(live), "a reservation without a request"
        engine = worker.supervisor.engine
        if engine is not None and engine.process.runs:
            idle = engine.sleeping and engine.scheduler.runnable
            assert not idle, "INV-8: the engine sleeps while work waits"

    # After everything.

    def leaks(self) -> list[str]:
        """What is left though nobody wants anything; empty when the world has settled."""
        found = []
        for node in self._world.nodes.values():
            if node.process.runs and node.parts is not None:
                found += [f"{node.name}: {what}" for what in getattr(self, f"_left_at_{node.role}")(node.parts)]
        return found

    def _left_at_gateway(self, gateway: GatewayParts) -> Iterator[str]:
        core: Any = gateway.core
        if len(core.table):
            yield f"{len(core.table)} requests in flight"
        if core.links.attempts:
            yield f"{len(core.links.attempts)} attempts"
        for link in core.links._links.values():
            for name in ("_members", "_promised", "_leaving"):
                if getattr(link, name):
                    yield f"{len(getattr(link, name))} in {name} of {link.address}"
        if len(core.journals):
            yield f"{len(core.journals)} journals"
        if gateway.store._behind:
            yield f"{len(gateway.store._behind)} writes behind"

    def _left_at_router(self, router: RouterParts) -> Iterator[str]:
        dispatcher: Any = router.core.dispatcher
        if len(dispatcher) or dispatcher._open or dispatcher._pending or dispatcher._cancels:
            yield f"{len(dispatcher)} queued, {dispatcher._open} open, {dispatcher._cancels} cancels"
        nodes = self._world.nodes
        for worker in router.core.fleet.workers():
            node = nodes[worker.address.partition(":")[0]]
            if node.process.runs and node.parts is not None and worker.incarnation == node.parts.door.incarnation != 0:
                estimate = worker.estimate(self._world.artefact)
                holds = node.parts.door.loads.current()
                if (estimate.requests, estimate.kv_reserved) != (holds.requests, holds.kv_tokens_reserved):
                    yield f"INV-3: {estimate.requests} estimated at {worker.address}, {holds.requests} are there"

    def _left_at_worker(self, worker: WorkerParts) -> Iterator[str]:
        holdings: Any = worker.door._holdings
        if holdings.held or holdings.by_key or holdings.ledger.requests or holdings.ledger.kv_tokens:
            yield f"{len(holdings.held)} held, {len(holdings.by_key)} keys, {holdings.ledger.requests} reservations"
        if worker.door.retained_bytes:
            yield f"{worker.door.retained_bytes} bytes kept"
        engine = worker.supervisor.engine
        if engine is not None and (engine.scheduler.requests or engine.scheduler.pool.counts.used):
            yield f"{len(engine.scheduler.requests)} in the engine, {engine.scheduler.pool.counts.used} blocks"

    def limits_left(self) -> list[str]:
        """Leases of limits that nobody gave back."""
        found = []
        for key in self._world.redis.keys("tl:lim:"):
            fields = self._world.redis._data[key]
            found += [f"{key} {name}" for name in sorted(fields) if name.startswith("l:")]
        return found

    def outputs_agree(self) -> None:
        """What was kept of a request is one transcript, whoever wrote it."""
        for key in self._world.redis.keys("tl:out:"):
            said: dict[tuple[int, int], int] = {}
            for _, (name, value) in self._world.redis._data[key]:
                for run in custody._unframed(value) if name == "r" else ():
                    for place, token in enumerate(run.ids, run.start):
                        known = said.setdefault((run.choice, place), token)
                        assert known == token, f"{key}: choice {run.choice} has {known} and {token} at {place}"

    def open_records(self) -> list[str]:
        """Records that say of a request that it goes on."""
        found = []
        for key in self._world.redis.keys("tl:req:"):
            fields = self._world.redis._data[key]
            if int(fields.get("rank", "3")) < 3:
                found.append(f"{key} {fields.get('state')} of {fields.get('gateway')}")
        return found
