"""What this router knows of every worker: liveness, versions, and an estimate of what it holds.

Owns the workers' last absolute reports and the router's own dispatches that those reports do not count yet (INV-3). The
one rule: load counts at the decision. Whoever sends work says `place` for each item, `sealed` when the batch goes out,
and then exactly one of `answered`, `unwritten`, `unknown`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from router.policy import Candidate, Lane, Need, Policy
from router.scorers import Estimate
from shared.clock import Clock
from shared.wire import Liveness, PeerState, engine_stalled
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2

MAX_UNSEEN = 1024  # batches a worker may leave out of its reports before it gets no more
FORGET_UNKNOWN_S = 1.0  # a batch of unknown outcome is counted by any report that comes this long after the failure
FIRST_PAUSE_S, LAST_PAUSE_S = 0.01, 0.5  # after a batch of which everything was refused; doubles with each in a row
PATIENCE_S = 0.05  # for a batch's answer: so long a request rather waits for the best worker than takes another
READY = frozenset({"", "busy", "unanswered", "refused", "unseen"})  # states in which a worker counts as a ready replica
SERVING = READY | {"suspect", "stale"}  # states worth waiting for
STATES = ("ready", "suspect", "stale", "draining", "stalled", "lost", "starting")  # as they are counted
NO_LOAD = common_pb2.Load()


@dataclass(slots=True)
class _Dispatch:
    """One batch of own work that the last report may not count."""

    seq: int
    needs: list[Need]
    failed_at: float | None = None  # when its outcome became unknown


class Worker:
    """One worker, by its address. Pure: told what happened, asked what follows."""

    def __init__(self, clock: Clock, address: str, max_report_age_s: float) -> None:
        self.address = address
        self.worker_id = address
        self.incarnation = 0
        self.versions: dict[Lane, common_pb2.ModelVersion] = {}
        self.state = "starting"  # as `Fleet` judged it last; empty if work may be sent, else why not
        self.liveness = Liveness(clock)
        self._clock = clock
        self._max_report_age_s = max_report_age_s
        self._report: worker_pb2.WatchResponse | None = None
        self._loads: dict[str, common_pb2.Load] = {}
        self._reported_at = clock.monotonic()
        self._draining = False
        self._refused_seq: int | None = None
        self._refusals = 0  # batches in a row of which it took nothing
        self._refused_at = 0.0
        self._sent_at: float | None = None  # of the batch that has not been answered
        self._open = False
        self._seq = 0
        self._unseen: deque[_Dispatch] = deque()

    def reported(self, report: worker_pb2.WatchResponse) -> bool:
        """Takes an absolute report; True if who it is or what it serves has changed."""
        self.liveness.heard(report.heartbeat_ms / 1000 or None)
        self._reported_at = self._clock.monotonic()
        reborn = report.incarnation != self.incarnation
        if reborn:
            self._unseen.clear()
            self._open = False
            self._refused_seq = None
            self._refusals = 0
        self.incarnation, self._report, self._draining = report.incarnation, report, report.draining
        self._loads = {load.artefact_hash: load for load in report.loads}
        if self._refused_seq is not None and report.echo_batch_seq >= self._refused_seq:
            self._refused_seq = None
        self._drop_counted(report.echo_batch_seq)
        return self._take_description(report) or reborn

    def place(self, need: Need) -> None:
        """A request goes into the batch that is being put together."""
        if not self._open:
            self._open = True
            self._seq += 1
            self._unseen.append(_Dispatch(self._seq, []))
        self._unseen[-1].needs.append(need)

    def sealed(self) -> int:
        """The batch goes out now; answers its number."""
        self._open = False
        self._sent_at = self._clock.monotonic()
        return self._seq

    def answered(self, seq: int, held: Sequence[Need], *, refused: bool, draining: bool) -> None:
        """The batch's answer came: `held` is what the worker has of it; it `refused` some for want of capacity."""
        self._sent_at = None
        self._refusals = self._refusals + 1 if refused and not held else 0
        self._draining = self._draining or draining
        if refused:
            self._refused_seq = seq
            self._refused_at = self._clock.monotonic()
        for dispatch in self._unseen:
            if dispatch.seq == seq:
                dispatch.needs = list(held)

    def unwritten(self, seq: int) -> None:
        """The batch was certainly never written."""
        self._sent_at = None
        self._unseen = deque(d for d in self._unseen if d.seq != seq)

    def unknown(self, seq: int) -> None:
        """Nobody knows whether the worker has the batch: it counts until a report must have counted it."""
        self._sent_at = None
        for dispatch in self._unseen:
            if dispatch.seq == seq:
                dispatch.failed_at = self._clock.monotonic()

    def estimate(self, artefact: str) -> Estimate:
        """Last absolute report plus own dispatches above the echoed number."""
        load = self._loads.get(artefact, NO_LOAD)
        own = [need for dispatch in self._unseen for need in dispatch.needs if need.artefact == artefact]
        prefill = load.queued_prefill_tokens + sum(need.prefill_tokens for need in own)
        return Estimate(
            requests=load.requests + len(own),
            max_requests=load.max_requests,
            choices=load.running + load.waiting + sum(need.choices for need in own),
            prefill_tokens=prefill,
            kv_available=load.kv_tokens_free + load.kv_tokens_cached - prefill,
            kv_reserved=load.kv_tokens_reserved + sum(need.kv_tokens for need in own),
            kv_total=load.kv_tokens_total,
        )

    @property
    def report_age_s(self) -> float:
        """Age of everything known of the worker (INV-7)."""
        return self._clock.monotonic() - self._reported_at

    @property
    def probing(self) -> bool:
        """It refused all it was sent last: it gets one request at a time until it takes one."""
        return self._refusals > 0

    @property
    def _pause_s(self) -> float:
        """How long a worker that refused is left alone, newer report or not: it may report as fast as it is asked."""
        return min(FIRST_PAUSE_S * 2 ** (self._refusals - 1), LAST_PAUSE_S) if self._refusals else 0.0

    def judge(self, loop_lag_s: float) -> str:
        """What its state is now: empty if work may be sent, else why not. The gravest reason first."""
        peer = self.liveness.judge(loop_lag_s)
        if self._report is None or not self.incarnation:
            return "starting"
        if peer is PeerState.LOST:
            return "lost"
        if self._stalled(self._report):
            return "stalled"
        if self._draining:
            return "draining"
        if peer is PeerState.SUSPECT:
            return "suspect"
        return self._hindrance()

    def _hindrance(self) -> str:
        """Why a worker that is well takes nothing at the moment; empty if it does."""
        if self.report_age_s > self._max_report_age_s:
            return "stale"
        if self._refused_seq is not None or self._clock.monotonic() - self._refused_at < self._pause_s:
            return "refused"
        if len(self._unseen) >= MAX_UNSEEN:
            return "unseen"
        if self._sent_at is None:
            return ""
        return "busy" if self._clock.monotonic() - self._sent_at <= PATIENCE_S else "unanswered"

    def _stalled(self, report: worker_pb2.WatchResponse) -> bool:
        return engine_stalled(
            tick_age_s=report.engine_tick_age_ms / 1000,
            max_step_s=report.max_step_ms / 1000,
            work_waits=report.oldest_waiting_ms > 0 or any(load.running + load.waiting for load in report.loads),
        )

    def _drop_counted(self, echo: int) -> None:
        failed_before = self._reported_at - FORGET_UNKNOWN_S
        self._unseen = deque(
            d for d in self._unseen if d.seq > echo and (d.failed_at is None or d.failed_at > failed_before)
        )

    def _take_description(self, report: worker_pb2.WatchResponse) -> bool:
        before = (self.worker_id, self.versions)
        self.worker_id = report.worker_id or self.address
        if report.versions:
            self.versions = {(v.artefact_hash, v.tokenizer_hash): v for v in report.versions}
        return before != (self.worker_id, self.versions)


class Fleet:
    """All workers known. Observers are told of each change, and whether it changes who can serve what (topology)."""

    def __init__(
        self,
        clock: Clock,
        policy: Policy,
        lag_s: Callable[[], float],
        *,
        max_report_age_s: float,
        judge_every_s: float = 0.1,
    ) -> None:
        self._clock = clock
        self._policy = policy
        self._lag_s = lag_s
        self.max_report_age_s = max_report_age_s
        self._judge_every_s = judge_every_s
        self._judged_at = clock.monotonic()
        self._workers: dict[str, Worker] = {}
        self._by_incarnation: dict[int, Worker] = {}
        self._candidates: dict[Lane, dict[int, Candidate]] = {}
        self._serving: dict[Lane, frozenset[int]] = {}
        self._observers: list[Callable[[bool], None]] = []

    def observe(self, on_change: Callable[[bool], None]) -> None:
        """Calls `on_change(topology)` after every change, from the loop that made it; it must not block."""
        self._observers.append(on_change)

    def workers(self) -> Iterable[Worker]:
        return self._workers.values()

    def states(self) -> Mapping[str, int]:
        """How many workers are in which state; those that may be sent work are "ready"."""
        return Counter("ready" if worker.state in READY else worker.state for worker in self._workers.values())

    def add(self, address: str) -> Worker:
        """A worker is known to be at this address; it takes part after its first report."""
        worker = self._workers[address] = Worker(self._clock, address, self.max_report_age_s)
        return worker

    def remove(self, worker: Worker) -> None:
        """Forgets a worker."""
        del self._workers[worker.address]
        self._changed(topology=True)

    def reported(self, worker: Worker, report: worker_pb2.WatchResponse) -> None:
        """A report came on the worker's stream."""
        described = worker.reported(report)
        self._judge(worker, topology=described)

    def broke(self, worker: Worker, *, refused: bool = False) -> None:
        """The worker's stream broke, or could not be opened; `refused`: nothing listens at its address any more."""
        if refused:
            worker.liveness.refused()
        else:
            worker.liveness.broke()
        self._judge(worker)

    def place(self, worker: Worker, need: Need) -> None:
        """See `Worker.place`."""
        worker.place(need)
        self._update(worker)

    def sealed(self, worker: Worker) -> int:
        """See `Worker.sealed`."""
        seq = worker.sealed()
        worker.state = worker.judge(self._lag_s())
        self._update(worker)
        return seq

    def answered(self, worker: Worker, seq: int, held: Sequence[Need], *, refused: bool, draining: bool) -> None:
        """See `Worker.answered`."""
        worker.answered(seq, held, refused=refused, draining=draining)
        self._judge(worker)

    def unwritten(self, worker: Worker, seq: int) -> None:
        """See `Worker.unwritten`. What could not be reached is a broken stream too."""
        worker.unwritten(seq)
        worker.liveness.broke()
        self._judge(worker)

    def unknown(self, worker: Worker, seq: int) -> None:
        """See `Worker.unknown`."""
        worker.unknown(seq)
        self._judge(worker)

    def judge(self) -> None:
        """Judges every worker, unless that was done a moment ago. To be called before decisions and now and then."""
        if self._clock.monotonic() - self._judged_at < self._judge_every_s:
            return
        self._judged_at = self._clock.monotonic()
        lag = self._lag_s()
        for worker in list(self._workers.values()):
            if worker.judge(lag) != worker.state:
                self._judge(worker)

    def candidates(self, lane: Lane) -> Collection[Candidate]:
        """Every worker that serves the lane, fit or not, as it is now. Kept up to date in place between decisions."""
        found = self._candidates.get(lane)
        if found is None:
            holders = {w.incarnation: w for w in self.distinct() if w.incarnation and lane in w.versions}
            found = self._candidates[lane] = {i: self._candidate(w, lane[0]) for i, w in holders.items()}
            self._serving[lane] = frozenset(i for i, worker in holders.items() if worker.state in SERVING)
            self._by_incarnation.update(holders)
        return found.values()

    def serving(self, lane: Lane) -> frozenset[int]:
        """Incarnations that serve the lane and are worth waiting for."""
        self.candidates(lane)
        return self._serving[lane]

    def distinct(self) -> Iterator[Worker]:
        """Workers, one per incarnation though two addresses may lead to it: better the one that serves."""
        seen = set()
        for worker in sorted(self._workers.values(), key=lambda w: w.state not in SERVING):
            if worker.incarnation not in seen:
                seen.add(worker.incarnation or id(worker))
                yield worker

    def everyone(self, artefact: str) -> Iterator[Candidate]:
        """Every worker, whatever it serves."""
        return (self._candidate(worker, artefact) for worker in self.distinct())

    def holder(self, candidate: Candidate) -> Worker:
        """The worker behind a candidate of `candidates`."""
        return self._by_incarnation[candidate.incarnation]

    def has_other_version(self, model: str, lane: Lane) -> bool:
        """Whether a worker that can be had serves the model, but not in this lane."""
        return any(
            version.model == model and other != lane
            for worker in self._workers.values()
            if worker.state in SERVING
            for other, version in worker.versions.items()
        )

    def _judge(self, worker: Worker, *, topology: bool = False) -> None:
        before, worker.state = worker.state, worker.judge(self._lag_s())
        topology = topology or (before in READY, before in SERVING) != (worker.state in READY, worker.state in SERVING)
        if not topology:
            self._update(worker)
        self._changed(topology)

    def _changed(self, topology: bool) -> None:
        if topology:
            self._candidates.clear()
            self._serving.clear()
            self._by_incarnation.clear()
        for observer in self._observers:
            observer(topology)

    def _update(self, worker: Worker) -> None:
        """Replaces the worker's candidates, unless another address stands for its incarnation."""
        if self._by_incarnation.get(worker.incarnation) is not worker:
            return
        for lane in worker.versions:
            if lane in self._candidates:
                self._candidates[lane][worker.incarnation] = self._candidate(worker, lane[0])

    def _candidate(self, worker: Worker, artefact: str) -> Candidate:
        estimate = worker.estimate(artefact)
        return Candidate(
            worker_id=worker.worker_id,
            incarnation=worker.incarnation,
            estimate=estimate,
            blocked="" if worker.state == "busy" else worker.state,
            busy=worker.state == "busy",
            score=self._policy.base_score(estimate),
        )
