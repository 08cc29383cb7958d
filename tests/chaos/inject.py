"""Strikes a running mesh, heals what it struck, waits until the mesh is whole, and writes down when.

The one rule: one strike at a time; the next begins after every process takes work again.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tests.chaos.faults import Fault, Strike
from tests.chaos.mesh import ChaosMesh

RECOVERY_S = 60.0
SETTLE_S = 0.3  # until a death is known to whoever answers for the dead
PAUSE_S = (0.5, 2.0)
TAKEN_OVER_S = 12.0  # after a gateway was struck: until nothing of its requests is in the store alone


@dataclass
class Blow:
    """A strike that fell. Times are seconds of the run."""

    strike: Strike
    began: float
    healed: float = 0.0
    recovered: float = 0.0
    whole: bool = True  # the mesh recovered


class Injector:
    """Run `run` as a task beside the load; cancel it when the load has ended."""

    def __init__(self, mesh: ChaosMesh, strikes: Iterator[Strike], rng: random.Random, origin: float) -> None:
        self.blows: list[Blow] = []
        self._mesh, self._strikes, self._rng, self._origin = mesh, strikes, rng, origin
        self.ending = False

    async def run(self) -> None:
        """Until `ending`; whole at the end."""
        while not self.ending:
            await asyncio.sleep(self._rng.uniform(*PAUSE_S))
            await self._strike(next(self._strikes))

    async def _strike(self, strike: Strike) -> None:
        await self._wait_for_take_overs(strike)
        blow = Blow(strike, self._now())
        self.blows.append(blow)
        async with asyncio.TaskGroup() as group:
            for fault in strike.faults:
                group.create_task(self._lasting(fault))
                await asyncio.sleep(strike.apart_s)
        blow.healed = self._now()
        await asyncio.sleep(SETTLE_S)
        blow.whole = await self._mesh.recovered(RECOVERY_S)
        blow.recovered = self._now()

    async def _wait_for_take_overs(self, strike: Strike) -> None:
        if any(fault.what == "empty" for fault in strike.faults):
            struck = [blow.healed for blow in self.blows if any("gateway" in each.role for each in blow.strike.faults)]
            await asyncio.sleep(max(0.0, max(struck, default=0.0) + TAKEN_OVER_S - self._now()))

    async def _lasting(self, fault: Fault) -> None:
        async with self._struck(fault):
            await asyncio.sleep(fault.for_s)

    @asynccontextmanager
    async def _struck(self, fault: Fault) -> AsyncIterator[None]:
        match fault.what:
            case "kill":
                self._mesh.strike(fault.target, signal.SIGKILL)
                yield
            case "empty":
                await self._mesh.empty_store()
                yield
            case "stop":
                stopped = self._mesh.strike(fault.target, signal.SIGSTOP)
                yield
                if stopped is not None:
                    self._mesh.go_on(stopped)
            case "drop":
                self._mesh.links[fault.target].drop(0.5, self._rng)
                yield
            case mode:
                link = self._mesh.links[fault.target]
                await link.turn(mode)
                yield
                await link.turn("whole")

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._origin
