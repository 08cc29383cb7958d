"""One process's share of a load: sends its requests when they are due, and notes what comes of them.

The one rule: in an open loop nothing waits for an answer. A request whose time has come is sent, however many are under
way; only beyond `MOST_UNDER_WAY` it is counted as an error instead.
"""

import asyncio
import itertools
import random
import resource
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from shared.clock import Clock
from trunkctl.bench.clients import Client, Failed
from trunkctl.bench.measures import Health, Outcome
from trunkctl.bench.workload import Mix, arrivals, request

MOST_UNDER_WAY = 20_000  # requests of one process
WARM_UP_NUMBER = 1 << 40  # prompts of the warm-up are none of the load's
SAMPLE_S = 0.02
MOST_SAMPLES = 100_000


@dataclass(frozen=True)
class Pace:
    """When requests are sent: `rate` a second at times of their own, or by `concurrency` clients one after the other;
    for `seconds`, or `count` requests in all, whichever ends first."""

    rate: float | None
    concurrency: int
    seconds: float | None
    count: int | None


@dataclass(frozen=True)
class Share:
    """This process is number `index` of `of`: it sends requests index, index + of, ..."""

    index: int = 0
    of: int = 1

    def part(self, whole: int) -> int:
        """Its part of so many."""
        return whole // self.of + (self.index < whole % self.of)


@dataclass(frozen=True)
class Result:
    """What one process measured."""

    outcomes: list[Outcome]
    health: Health


class Load:
    """Runs one share against one client."""

    def __init__(self, client: Client, mix: Mix, pace: Pace, share: Share, clock: Clock) -> None:
        self._client = client
        self._mix = mix
        self._pace = pace
        self._share = share
        self._clock = clock
        self._began = 0.0
        self._outcomes: list[Outcome] = []
        self._under_way = 0

    async def run(self, warm_up: int, begin: Callable[[], Awaitable[float]]) -> Result:
        """Warms up, waits for the common beginning (a reading of the clock), and runs to the last answer."""
        await self._warm_up(warm_up)
        self._began = await begin()
        await asyncio.sleep(max(0.0, self._began - self._clock.monotonic()))
        cpu, lags = _cpu_s(), _Lags(self._clock)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(lags.watch())
            await (self._closed_loop() if self._pace.rate is None else self._open_loop())
            watching.cancel()
        lasted = max(self._now(), 1e-9)
        return Result(self._outcomes, Health(loop_lags=lags.seen, cpu=(_cpu_s() - cpu) / lasted))

    async def _warm_up(self, count: int) -> None:
        """So many requests one after the other, whose outcomes are not kept."""
        first = WARM_UP_NUMBER + self._share.index
        for number in range(first, first + count * self._share.of, self._share.of):
            await self._one(number, 0.0)
        self._outcomes.clear()

    async def _open_loop(self) -> None:
        assert self._pace.rate is not None
        times = arrivals(self._mix.seed, self._pace.rate, seconds=self._pace.seconds, count=self._pace.count)
        async with asyncio.TaskGroup() as group:
            for number, due in itertools.islice(enumerate(times), self._share.index, None, self._share.of):
                await asyncio.sleep(max(0.0, due - self._now()))
                if self._under_way < MOST_UNDER_WAY:
                    group.create_task(self._one(number, due))
                else:
                    now = self._now()
                    self._outcomes.append(Outcome(number=number, due=due, sent=now, ended=now, error="client full"))

    async def _closed_loop(self) -> None:
        pace, share = self._pace, self._share
        numbers = itertools.islice(itertools.count(), share.index, pace.count, share.of)
        async with asyncio.TaskGroup() as group:
            for _ in range(share.part(pace.concurrency)):
                group.create_task(self._one_after_another(numbers))

    async def _one_after_another(self, numbers: Iterator[int]) -> None:
        """One client of a closed loop. What fails at once is not repeated at once."""
        for number in numbers:
            if self._pace.seconds is not None and self._now() >= self._pace.seconds:
                return
            failed = await self._one(number, None)
            if failed:
                await asyncio.sleep(0.1)

    async def _one(self, number: int, due: float | None) -> bool:
        """One request; whether it failed."""
        asked = request(self._mix, number)
        now = self._now()
        outcome = Outcome(number=number, due=now if due is None else due, sent=now, times=[], counts=[])

        def arrived(tokens: int) -> None:
            outcome.times.append(self._now())
            outcome.counts.append(tokens)

        self._under_way += 1
        try:
            outcome.told = await self._client.stream(asked, arrived)
        except Failed as failed:
            outcome.error = str(failed)
        finally:
            self._under_way -= 1
        outcome.ended = self._now()
        if not (outcome.error or outcome.times):
            outcome.error = "no tokens"
        self._outcomes.append(outcome)
        return bool(outcome.error)

    def _now(self) -> float:
        return self._clock.monotonic() - self._began


class _Lags:
    """How late the event loop runs: a sample of at most MOST_SAMPLES, whatever the load's length."""

    def __init__(self, clock: Clock) -> None:
        self.seen: list[float] = []
        self._clock = clock
        self._rng = random.Random(0)

    async def watch(self) -> None:
        """Until cancelled."""
        for number in itertools.count():
            due = self._clock.monotonic() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            lag = max(0.0, self._clock.monotonic() - due)
            if number < MOST_SAMPLES:
                self.seen.append(lag)
            elif (place := self._rng.randrange(number + 1)) < MOST_SAMPLES:
                self.seen[place] = lag


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
