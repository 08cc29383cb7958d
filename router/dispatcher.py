"""Queue to workers: takes submissions in, places them, and answers each one once.

Owns every pending submission. The one rule: an attempt goes out once; it returns to the queue only after a definite
refusal or a batch that was certainly never written, and what nobody can know ends as OUTCOME_UNKNOWN.

`run` is the only place where decisions are made. It wakes when something has changed (a submission, a report, an
answer) and otherwise every `TICK_S`; it makes progress or sleeps: a worker that refused gets nothing before a newer
report, and one that could not be reached gets nothing before it is heard again (INV-8 without a busy loop).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Final

from opentelemetry import trace

from router import refusals
from router.batcher import Batcher, OutcomeUnknown, Unwritten
from router.config import QueueConfig
from router.fleet import Fleet, Worker
from router.metrics import Metrics
from router.outbox import Outbox, Parcel
from router.policy import Candidate, Policy, Verdict
from router.queue import Queue
from router.submission import Submission, check, need_of
from shared.clock import Clock
from shared.errors import TrunklineError
from shared.ids import Rng
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

_log = logging.getLogger(__name__)

TICK_S: Final = 0.25
DECISIONS_A_TURN: Final = 256  # then other tasks get their turn
MAX_CANCELS: Final = 4096  # told to workers at once; beyond it the gateway's own stream is what cancels
RETRY_S: Final = (0.1, 30.0)  # bounds of the advice of when to try again


class Dispatcher:
    """The router's heart. `tasks` is the group in which its calls to workers run, and `run` beside them."""

    def __init__(
        self,
        *,
        clock: Clock,
        rng: Rng,
        tasks: asyncio.TaskGroup,
        fleet: Fleet,
        policy: Policy,
        batcher: Batcher,
        outbox: Outbox,
        metrics: Metrics,
        tracer: trace.Tracer,
        config: QueueConfig,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._tasks = tasks
        self._fleet = fleet
        self._policy = policy
        self._batcher = batcher
        self._outbox = outbox
        self._metrics = metrics
        self._tracer = tracer
        self._config = config
        self._queue: Queue[Submission] = Queue(
            clock,
            config.capacity,
            max(1, int(config.capacity * config.per_tenant_share)),
            config.capacity_mb << 20,
        )
        self._pending: dict[bytes, Submission] = {}  # the highest (e, a) of each id
        self._open = 0
        self._cancels = 0
        self._draining = False
        self._leaves: Callable[[Submission], bool] = lambda _: False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._check_stranded_at = clock.monotonic()
        fleet.observe(self._fleet_changed)

    # --- in -----------------------------------------------------------------------------------------------------------

    async def submit(self, request: router_pb2.SubmitRequest, *, hands_back: bool = True) -> router_pb2.SubmitResponse:
        """The answer, once there is one. Raises TrunklineError. A call that is cancelled takes its submission along.

        `hands_back`: whoever asks goes to another router if this one drains.
        """
        item = self._joined(request) or self._accepted(request, hands_back)
        item.waiters += 1
        try:
            return await asyncio.shield(item.answer)
        except asyncio.CancelledError:
            item.waiters -= 1
            if not item.waiters:
                self._left(item)
            raise

    def ahead(self, request_id: bytes) -> int | None:
        """Requests that go before this one; None if it is not queued here."""
        item = self._pending.get(request_id)
        return self._queue.ahead(item) if item is not None and item.queued else None

    def explain(self, request: router_pb2.SubmitRequest) -> tuple[list[Verdict], str]:
        """Every worker's part in placing this request now, and the id of the one that would get it."""
        need, sub = need_of(request), request.submission
        lane = (sub.artefact_hash, sub.tokenizer_hash)
        self._fleet.judge()
        serving = {candidate.incarnation for candidate in self._fleet.candidates(lane)}
        verdicts = [
            self._policy.explain(candidate, need)
            if candidate.incarnation in serving
            else Verdict(candidate, filtered_by="version")
            for candidate in self._fleet.everyone(sub.artefact_hash)
        ]
        chosen = self._policy.choose(self._fleet.candidates(lane), need)
        return verdicts, chosen.worker_id if chosen else ""

    def __len__(self) -> int:
        """Requests queued."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """Requests given to a worker that has not answered yet."""
        return self._open - len(self._queue)

    def drain(self, *, hand_back: bool = False) -> None:
        """Refuse what comes. What waits is placed as before, or `hand_back`: refused, so that another router has it."""
        self._draining = True
        if hand_back:
            self._hand_back(lambda item: item.hands_back)

    async def drained(self, grace_s: float) -> None:
        """Returns when nothing is pending. What still waits when the grace is over is refused."""
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            self._hand_back(lambda _: True)
        await self._idle.wait()  # for workers' answers, which have their own time limit

    def _hand_back(self, leaves: Callable[[Submission], bool]) -> None:
        """From now on whoever `leaves` does not wait here."""
        self._leaves = leaves
        for item in [item for item in self._waiting() if leaves(item)]:
            self._fail(item, refusals.draining())

    def _joined(self, request: router_pb2.SubmitRequest) -> Submission | None:
        """The pending submission that is the same (id, e, a). A lower one is fenced, whichever of the two it is."""
        sub = request.submission
        item = self._pending.get(sub.request_id)
        if item is None:
            return None
        stamp = (sub.epoch, sub.attempt)
        if stamp == item.stamp:
            self._metrics.joined.inc()
            return item
        if stamp < item.stamp:
            raise refusals.fenced(item.stamp)
        item.waiters = 0
        if item.queued:
            self._fail(item, refusals.fenced(stamp))
        else:  # it ends when the worker has answered
            item.fail(refusals.fenced(stamp))
        return None

    def _accepted(self, request: router_pb2.SubmitRequest, hands_back: bool) -> Submission:
        check(request)
        item = Submission(
            request,
            self._tracer,
            now=self._clock.monotonic(),
            ttl_s=self._config.ttl_ms / 1000,
            output_weight=self._config.output_weight,
            hands_back=hands_back,
        )
        self._metrics.submitted.inc()
        if (refusal := self._refusal(item)) is not None:
            item.fail(refusal)
            self._metrics.ended.labels(refusal.reason.value).inc()
            raise refusal
        self._open += 1
        self._idle.clear()
        self._pending[item.id] = item
        self._queue.put(item)
        if (error := self._hopeless(item)) is not None:
            self._fail(item, error)
            raise error
        item.timer = asyncio.get_running_loop().call_later(item.expires - item.arrived, self._time_passed, item)
        self._wake.set()
        return item

    def _refusal(self, item: Submission) -> TrunklineError | None:
        """Why it does not come into the queue."""
        if self._draining:
            return refusals.draining()
        return None if self._queue.has_room(item) else refusals.queue_full(item.tenant, self._retry_s())

    def _hopeless(self, item: Submission) -> TrunklineError | None:
        """Why a new submission need not wait in the queue."""
        wait_s = self._queue.wait_s(item)
        if wait_s is not None and wait_s > self._config.would_miss_margin * (item.ends - item.arrived):
            return refusals.would_miss(wait_s)
        return self._stranded(item)

    def _retry_s(self) -> float:
        """When half of the queue will have drained, spread so that those refused do not return together."""
        rate = self._queue.drain.rate()
        expected = len(self._queue) / 2 / rate if rate else refusals.RETRY_S
        return min(max(expected, RETRY_S[0]), RETRY_S[1]) * self._rng.uniform(0.75, 1.25)

    # --- decisions ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Places what waits, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass  # time that passes is a change too
            self._wake.clear()
            self._fleet.judge()
            if self._check_stranded_at <= self._clock.monotonic():
                self._check_stranded_at = self._clock.monotonic() + TICK_S
                self._refuse_stranded()
            self._place_some()
            await asyncio.sleep(0)

    def _place_some(self) -> None:
        placed = 0
        for item, candidate in itertools.islice(self._placements(), DECISIONS_A_TURN):
            placed += 1
            self._place(item, candidate)
        for worker in self._outbox.workers():
            self._post(worker)
        if placed == DECISIONS_A_TURN:
            self._wake.set()

    def _placements(self) -> Iterator[tuple[Submission, Candidate]]:
        """Pairs, each to be placed before the next is asked for. Nobody overtakes on a worker that one waits for."""
        for lane in self._queue.lanes():
            candidates, serving = self._fleet.candidates(lane), self._fleet.serving(lane)
            taken: set[int] = set()
            for item in self._queue.in_order(lane):
                chosen = self._policy.choose(candidates, item.need, taken)
                if chosen is not None and chosen.busy:
                    break  # a round trip's wait for the best worker is cheaper than a place at another
                if chosen is not None:
                    yield item, chosen
                    continue
                taken |= serving - item.need.excluded
                if all(candidate.blocked or candidate.incarnation in taken for candidate in candidates):
                    break

    def _place(self, item: Submission, candidate: Candidate) -> None:
        worker = self._fleet.holder(candidate)
        if worker.report_age_s > self._fleet.max_report_age_s:  # INV-7, though the process was stopped since `judge`
            self._wake.set()
            return
        self._queue.take(item)
        item.dispatched(candidate, self._clock.monotonic())
        self._fleet.place(worker, item.need)
        if self._outbox.add(worker, item):
            self._post(worker)

    def _post(self, worker: Worker) -> None:
        parcel = self._outbox.take(worker)
        seq = self._fleet.sealed(worker)
        self._metrics.batch_items.observe(len(parcel.items))
        self._tasks.create_task(self._send(parcel, worker.incarnation, seq))

    # --- out ----------------------------------------------------------------------------------------------------------

    async def _send(self, parcel: Parcel, incarnation: int, seq: int) -> None:
        worker, items = parcel.worker, parcel.items
        try:
            answer = await self._batcher.send(worker.address, seq, [item.message for item in items])
        except Unwritten:
            self._fleet.unwritten(worker, seq)
            for item in items:
                self._put_back(item, "unwritten")
        except OutcomeUnknown:
            self._fleet.unknown(worker, seq)
            for item in items:
                self._unknown(item, worker, incarnation)
        else:
            self._settle(parcel, seq, answer)

    def _settle(self, parcel: Parcel, seq: int, answer: worker_pb2.SubmitBatchResponse) -> None:
        """Gives each item its answer. An item without one is of unknown outcome, and may be held."""
        nothing = worker_pb2.ItemResult()
        results = list(itertools.islice(itertools.chain(answer.results, itertools.repeat(nothing)), len(parcel.items)))
        refused = [result.rejected for result in results if result.HasField("rejected")]
        held = [
            item.need
            for item, result in zip(parcel.items, results, strict=True)
            if result.WhichOneof("result") in ("admitted", None)
        ]
        draining = any(rejected.draining for rejected in refused)
        self._fleet.answered(parcel.worker, seq, held, refused=bool(refused), draining=draining)
        for item, result in zip(parcel.items, results, strict=True):
            self._take_result(item, result, parcel.worker, answer.incarnation)

    def _take_result(self, item: Submission, result: worker_pb2.ItemResult, worker: Worker, incarnation: int) -> None:
        match result.WhichOneof("result"):
            case "admitted":
                self._admitted(item, worker, incarnation)
            case "rejected":
                self._put_back(item, "rejected")
            case "mismatch" if result.mismatch.what == worker_pb2.Mismatch.WHAT_MALFORMED:
                _log.error("worker %s calls a submission malformed: %s", worker.worker_id, result.mismatch.message)
                self._fail(item, refusals.malformed())
            case "mismatch":
                item.mismatched(incarnation, result.mismatch.what)
                self._put_back(item, "mismatch")
            case "fenced":
                self._fail(item, refusals.fenced((result.fenced.epoch, result.fenced.attempt)))
            case _:
                self._unknown(item, worker, incarnation)

    def _admitted(self, item: Submission, worker: Worker, incarnation: int) -> None:
        item.holder = worker.address
        if not item.waiters:
            self._cancel(item)
            self._abandon(item)
            return
        queued_s, took_s = item.decided - item.arrived, self._clock.monotonic() - item.decided
        self._metrics.queue_s.observe(queued_s)
        self._metrics.dispatch_s.observe(took_s)
        item.succeed(
            router_pb2.SubmitResponse(
                incarnation=incarnation,
                worker_id=worker.worker_id,
                address=worker.address,
                queue_ms=queued_s * 1000,
                dispatch_ms=took_s * 1000,
            )
        )
        self._ended(item, "admitted")

    def _unknown(self, item: Submission, worker: Worker, incarnation: int) -> None:
        if not item.waiters:
            item.holder = worker.address
            self._cancel(item)
        self._fail(item, refusals.outcome_unknown(incarnation))

    def _put_back(self, item: Submission, outcome: str) -> None:
        """Definitely not held: to where it stood in the queue, unless nobody waits or it need not wait there."""
        self._metrics.returned.labels(outcome).inc()
        self._queue.put_back(item)
        item.returned(outcome)
        if not item.waiters:
            self._abandon(item)
        elif self._clock.monotonic() >= item.expires:
            self._fail(item, refusals.expired())
        elif self._leaves(item):
            self._fail(item, refusals.draining())
        elif (error := self._stranded(item)) is not None:
            self._fail(item, error)
        self._wake.set()

    def _stranded(self, item: Submission) -> TrunklineError | None:
        """What to tell a submission that no worker can be had for, once waiting for one makes no sense."""
        serving = self._fleet.serving(item.lane)
        if not serving <= item.need.excluded:
            item.stranded_since = None
            return None
        if item.mismatches:
            return refusals.mismatch(item.mismatches.values())
        gone = self._fleet.has_other_version(item.model, item.lane)
        if gone and not self._fleet.candidates(item.lane):
            return refusals.version_gone()
        now = self._clock.monotonic()
        item.stranded_since = item.stranded_since if item.stranded_since is not None else now
        if now - item.stranded_since < self._config.no_replica_wait_ms / 1000:
            return None
        return refusals.version_gone() if gone else refusals.no_replica()

    def _refuse_stranded(self) -> None:
        for item in list(self._waiting()):
            if (error := self._stranded(item)) is not None:
                self._fail(item, error)

    def _waiting(self) -> Iterator[Submission]:
        for lane in self._queue.lanes():
            yield from self._queue.in_order(lane)

    def _time_passed(self, item: Submission) -> None:
        if item.queued and not item.answer.done():
            self._fail(item, refusals.expired())

    def _left(self, item: Submission) -> None:
        """Nobody waits for it any more. One that is with a worker is cancelled when the batch's answer arrives."""
        if item.answer.done():
            self._cancel(item)
        elif item.queued:
            self._abandon(item)

    def _cancel(self, item: Submission) -> None:
        if not item.holder:
            return
        if self._cancels >= MAX_CANCELS:
            self._metrics.cancels.labels("dropped").inc()
            return
        self._cancels += 1
        self._tasks.create_task(self._tell_cancel(item))

    async def _tell_cancel(self, item: Submission) -> None:
        try:
            told = await self._batcher.cancel(item.holder, item.id, item.stamp)
            self._metrics.cancels.labels("told" if told else "failed").inc()
        finally:
            self._cancels -= 1

    def _fail(self, item: Submission, error: TrunklineError) -> None:
        item.fail(error)
        self._ended(item, error.reason.value)

    def _abandon(self, item: Submission) -> None:
        item.abandon()
        self._ended(item, "abandoned")

    def _ended(self, item: Submission, outcome: str) -> None:
        self._metrics.ended.labels(outcome).inc()
        if item.queued:
            self._queue.discard(item)
        else:
            self._queue.settled(item, served=bool(item.holder))
        if item.timer is not None:
            item.timer.cancel()
        if self._pending.get(item.id) is item:
            del self._pending[item.id]
        self._open -= 1
        if not self._open:
            self._idle.set()

    def _fleet_changed(self, topology: bool) -> None:
        if topology:
            self._check_stranded_at = self._clock.monotonic()
        self._wake.set()
