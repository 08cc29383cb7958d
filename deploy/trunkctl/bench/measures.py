"""What was measured, and the figures it comes to.

Pure. The one rule: a request's times count from when it was due, not from when a late client got round to sending it.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import msgspec


class Outcome(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times are seconds after the load's beginning."""

    number: int
    due: float
    sent: float
    ended: float = 0.0
    times: list[float] = []  # when each piece of the answer came
    counts: list[int] = []  # tokens in each piece
    told: int = 0  # tokens, as the server counted them; 0 where it did not say
    error: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.due

    def pauses(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    def gaps(self) -> list[float]:
        """Seconds between tokens: those of one piece share the pause before it evenly. The first piece has none."""
        pairs = zip(self.pauses(), self.counts[1:], strict=True)
        return [pause / count for pause, count in pairs for _ in range(count)]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How well the client itself kept up, in one process."""

    loop_lags: list[float]  # seconds by which its event loop was late, sampled
    cpu: float  # share of one CPU that it used


class Quantiles(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


class Slo(msgspec.Struct, frozen=True):
    """What a good request keeps: its first token, and the 99th percentile of its own pauses (ms)."""

    ttft_ms: float
    itl_ms: float

    def met(self, outcome: Outcome) -> bool:
        """Whether the request was good."""
        if outcome.error or not outcome.times or outcome.ttft * 1e3 > self.ttft_ms:
            return False
        pauses = outcome.pauses()
        return not pauses or quantile(pauses, 0.99) * 1e3 <= self.itl_ms


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """What the client adds: how late it sent requests, how late its loop ran, how much of a CPU the busiest of its
    processes used. `slow` says that the figures are the client's rather than the server's."""

    send_lag_ms: Quantiles | None
    loop_lag_ms: Quantiles | None
    cpu: float
    slow: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a load. Rates are over `window_s`, the time in which load was offered."""

    sent: int
    completed: int
    errors: dict[str, int]
    wall_s: float
    window_s: float
    requests_s: float
    output_tok_s: float
    output_tokens: int
    uncounted_tokens: int  # that the server counted and no piece showed
    ttft_ms: Quantiles | None
    itl_ms: Quantiles | None
    pause_ms: Quantiles | None
    tpot_ms: Quantiles | None
    e2e_ms: Quantiles | None
    goodput: float  # share of all requests sent that met the objectives
    slo: Slo
    client: Client


SLOW_CPU = 0.9
SLOW_LAG_MS = 10.0


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def quantiles(seconds: Sequence[float]) -> Quantiles | None:
    """In milliseconds; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p90, p99 = (round(1e3 * quantile(ordered, share), 3) for share in (0.5, 0.9, 0.99))
    return Quantiles(p50, p90, p99)


def measure(outcomes: Sequence[Outcome], healths: Sequence[Health], slo: Slo, offered_s: float | None) -> Report:
    """The figures. `offered_s`: for how long load was offered; None where a number of requests ended it."""
    done = [outcome for outcome in outcomes if not outcome.error]
    wall_s = max((outcome.ended for outcome in outcomes), default=0.0)
    window_s = offered_s or wall_s
    per_token = [(o.times[-1] - o.times[0]) / (o.tokens - o.counts[0]) for o in done if o.tokens > (o.counts or [0])[0]]
    return Report(
        sent=len(outcomes),
        completed=len(done),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        wall_s=round(wall_s, 3),
        window_s=round(window_s, 3),
        requests_s=_rate(sum(outcome.ended <= window_s for outcome in done), window_s),
        output_tok_s=_rate(sum(_tokens_until(outcome, window_s) for outcome in outcomes), window_s),
        output_tokens=sum(outcome.tokens for outcome in outcomes),
        uncounted_tokens=sum(max(0, outcome.told - outcome.tokens) for outcome in done),
        ttft_ms=quantiles([outcome.ttft for outcome in done if outcome.times]),
        itl_ms=quantiles([gap for outcome in done for gap in outcome.gaps()]),
        pause_ms=quantiles([pause for outcome in done for pause in outcome.pauses()]),
        tpot_ms=quantiles(per_token),
        e2e_ms=quantiles([outcome.ended - outcome.due for outcome in done]),
        goodput=round(sum(map(slo.met, outcomes)) / len(outcomes), 4) if outcomes else 0.0,
        slo=slo,
        client=_client(outcomes, healths),
    )


def _client(outcomes: Sequence[Outcome], healths: Sequence[Health]) -> Client:
    send = quantiles([outcome.sent - outcome.due for outcome in outcomes])
    loop = quantiles([lag for health in healths for lag in health.loop_lags])
    cpu = round(max((health.cpu for health in healths), default=0.0), 3)
    late = any(lag.p99 > SLOW_LAG_MS for lag in (send, loop) if lag)
    return Client(send_lag_ms=send, loop_lag_ms=loop, cpu=cpu, slow=late or cpu > SLOW_CPU)


def _tokens_until(outcome: Outcome, window_s: float) -> int:
    pairs = zip(outcome.times, outcome.counts, strict=True)
    return sum(count for time, count in pairs if time <= window_s)


def _rate(count: int, window_s: float) -> float:
    return round(count / window_s, 2) if window_s else 0.0
