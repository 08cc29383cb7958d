"""What a request does when an attempt ends: try again, and where not, or give up with a reason.

Owns the retry rules; pure but for the shared budget. The one rule: every way to go round again is bounded, by attempts
without progress, by worker losses, or by the gateway's budget of moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.attempt import End, Kind
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.ids import Rng
from shared.wire import Stamp
from trunkline.worker.v1 import worker_pb2

_MAX_EXCLUDED = 32  # incarnations named to the router; the oldest are long gone


@dataclass(frozen=True)
class CourseLimits:
    """`fruitless`: attempts in a row without a new token. `losses`: worker losses while running (poison rule)."""

    fruitless: int = 8
    losses: int = 2
    backoff_s: float = 0.05
    backoff_max_s: float = 1.0


class MoveBudget:
    """What one gateway may move between workers: a herd of moves must not bury the rest. Moves off lost workers and
    off draining ones have a bucket each, so that a drain leaves the losses what they may need."""

    def __init__(self, clock: Clock, burst: int = 1024, per_s: float = 32.0) -> None:
        self._lost = _Bucket(clock, burst, per_s)
        self._drained = _Bucket(clock, burst, per_s)

    def take(self) -> bool:
        """Take one move off a lost worker; False when none is left."""
        return self._lost.take() == 0.0

    def await_turn(self) -> float:
        """Take one move off a draining worker, be it in advance; seconds until it is due."""
        return self._drained.take(in_advance=True)


class _Bucket:
    def __init__(self, clock: Clock, burst: int, per_s: float) -> None:
        self._clock = clock
        self._burst = burst
        self._per_s = per_s
        self._left = float(burst)
        self._at = clock.monotonic()

    def take(self, *, in_advance: bool = False) -> float:
        """Seconds until one may be had, 0 if now. It is taken now or `in_advance`."""
        now = self._clock.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        after = self._left - 1
        if after >= 0 or in_advance:
            self._left = after
        return max(0.0, -after / self._per_s)


@dataclass(frozen=True)
class Again:
    """Submit the next attempt `after_s`. `renew`: resolve the version, render and tokenise anew first."""

    after_s: float
    renew: bool = False


class Course:
    """The attempts of one request. `begin` names the next; `after` says what follows its end."""

    def __init__(self, limits: CourseLimits, budget: MoveBudget, rng: Rng, epoch: int = 1) -> None:
        self.migrations = 0
        self.refusers: set[str] = set()  # routers that had nowhere to put it, since it last ran
        self._epoch = epoch
        self._limits = limits
        self._budget = budget
        self._rng = rng
        self._attempt = 0
        self._gone: dict[int, None] = {}  # incarnations that will not come back
        self._doubtful: dict[int, None] = {}  # avoided while there is another
        self._losses = 0
        self._fruitless = 0
        self._tokens = 0
        self._renewed = False
        self._refusals = 0
        self._routers = 1
        self._last_loss = ""
        self._rules: dict[Kind, Callable[[End], Again]] = {
            Kind.REFUSED: self._refused,
            Kind.UNREACHED: lambda end: self._once_more(_no_router()),
            Kind.UNOPENED: self._unopened,
            Kind.LOST: self._lost,
            Kind.RELEASED: self._released,
            Kind.UNFIT: self._unfit,
            Kind.FAILED: self._failed,
        }

    def begin(self) -> Stamp:
        """The next (epoch, attempt)."""
        self._attempt += 1
        return self._epoch, self._attempt

    @property
    def excluded(self) -> list[int]:
        """Incarnations that must not get it."""
        return [*self._gone, *self._doubtful][-_MAX_EXCLUDED:]

    def after(self, end: End, *, tokens: int, routers: int) -> Again:
        """What follows `end`, with so many `tokens` in the transcript and so many `routers` to ask.

        Raises the TrunklineError the request ends with. DONE is not asked about.
        """
        if tokens > self._tokens:
            self._tokens, self._fruitless = tokens, 0
        self._fruitless += 1
        self._routers = routers
        return self._rules[end.kind](end)

    def _refused(self, end: End) -> Again:
        error = end.error or TrunklineError(Reason.INTERNAL, "refused without a reason")
        if error.reason in (Reason.OUTCOME_UNKNOWN, Reason.OWNER_MOVED):
            self._doubt(_incarnation_in(error))
            return self._once_more(error)
        if error.reason is Reason.VERSION_GONE and not self._tokens and not self._renewed:
            self._renewed = True
            return Again(0.0, renew=True)
        if error.reason is Reason.DRAINING:  # a word on that router alone
            return self._once_more(error)
        if error.reason is Reason.NO_REPLICA:
            return self._elsewhere(error)
        raise error

    def _elsewhere(self, error: TrunklineError) -> Again:
        """One router has nowhere to put it. Another may, and so may this one if nobody is avoided."""
        self._refusals += 1
        if self._doubtful:
            self._doubtful.clear()
        elif self._refusals >= self._routers:
            raise self._with_loss(error)
        return self._once_more(error)

    def _unopened(self, end: End) -> Again:
        self._doubt(end.incarnation)
        return self._once_more(_worker_lost())

    def _lost(self, end: End) -> Again:
        self._last_loss = end.message
        self._exclude(end.incarnation)
        if end.bound:
            self._count_loss()
        return self._move(end)

    def _released(self, end: End) -> Again:
        self._last_loss = end.message
        if end.why == worker_pb2.Released.WHY_GROUP_FAILED:
            self._count_loss()
        if end.why in (worker_pb2.Released.WHY_GROUP_FAILED, worker_pb2.Released.WHY_DRAINING):
            self._exclude(end.incarnation)
        else:
            self._doubt(end.incarnation)
        return self._move(end)

    def _unfit(self, end: End) -> Again:
        self._last_loss = end.message
        self._exclude(end.incarnation)
        return self._move(end)

    def _failed(self, end: End) -> Again:
        error = end.error or _worker_lost()
        if not end.retryable:
            raise error
        self._doubt(end.incarnation)
        return self._move(end)

    def _count_loss(self) -> None:
        self._losses += 1
        if self._losses >= self._limits.losses:
            raise TrunklineError(
                Reason.POISON_SUSPECTED, f"{self._losses} workers were lost while they ran this request"
            )

    def _move(self, end: End) -> Again:
        """Off a worker, to another. Off one that drains, since it was asked to, moves wait for the budget."""
        drains = end.kind is Kind.RELEASED and end.why == worker_pb2.Released.WHY_DRAINING
        due_s = self._budget.await_turn() if drains else 0.0
        if end.bound and not drains and not self._budget.take():
            raise TrunklineError(
                Reason.WORKER_LOST, "the worker was lost and this gateway's budget of moves is spent", retry_after_s=1.0
            )
        self.migrations += bool(end.bound and self._tokens)
        self._refusals = 0
        self.refusers.clear()
        again = self._once_more(end.error or _worker_lost())
        return Again(max(again.after_s, due_s))

    def _once_more(self, error: TrunklineError) -> Again:
        if self._fruitless >= self._limits.fruitless:
            raise self._with_loss(error)
        if self._fruitless == 1:
            return Again(0.0)
        ceiling = min(self._limits.backoff_max_s, self._limits.backoff_s * 2 ** (self._fruitless - 2))
        return Again(ceiling * self._rng.uniform(0.5, 1.0))

    def _with_loss(self, error: TrunklineError) -> TrunklineError:
        """A refusal after a loss names the loss too."""
        if not self._last_loss:
            return error
        message = f"{error.message}; the last worker was lost: {self._last_loss}"
        return TrunklineError(error.reason, message, metadata=error.metadata, retry_after_s=error.retry_after_s)

    def _exclude(self, incarnation: int) -> None:
        if incarnation:
            self._doubtful.pop(incarnation, None)
            self._gone[incarnation] = None

    def _doubt(self, incarnation: int) -> None:
        if incarnation and incarnation not in self._gone:
            self._doubtful[incarnation] = None


def _no_router() -> TrunklineError:
    return TrunklineError(Reason.NO_REPLICA, "no router can be reached", retry_after_s=1.0)


def _worker_lost() -> TrunklineError:
    return TrunklineError(Reason.WORKER_LOST, "the worker was lost", retry_after_s=1.0)


def _incarnation_in(error: TrunklineError) -> int:
    """The worker named by OUTCOME_UNKNOWN; 0 where it is not."""
    text = error.metadata.get("incarnation", "")
    try:
        return int(text, 16)
    except ValueError:
        return 0
