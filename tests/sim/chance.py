"""Random worlds: a seed becomes a mesh, requests, and what befalls them.

Owns the weights. The one rule: a mild world is one in which every request must finish (no second worker loss, no death
of a client's own gateway, somebody always left to go on); in a wild one a request may fail, but only for a reason that
its history gives.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from shared.errors import Reason
from tests.sim.clients import BROKEN, FINISHED, LEFT, Ask
from tests.sim.engine import MARK, Shape
from tests.sim.net import ARRIVES, Fate, Passing
from tests.sim.world import Plan, World, run

BUSY_S: Final = 3.0  # in which requests come and faults happen
WILD_REASONS: Final = frozenset({
    *(FINISHED, LEFT, BROKEN),
    *(reason.value for reason in (
        Reason.POISON_SUSPECTED, Reason.WORKER_LOST, Reason.NO_REPLICA, Reason.DRAINING, Reason.OUTCOME_UNKNOWN,
        Reason.QUEUE_EXPIRED, Reason.RUN_EXPIRED, Reason.MOVED, Reason.STATE_AWAY, Reason.OWNER_LOST,
        Reason.OWNER_MOVED, Reason.CLIENT_CANCEL,
    )),
})  # fmt: skip


class Chance:
    """One seed's draws."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rng = rng = random.Random(f"plan {seed}")
        self.wild = rng.random() < 0.5
        self.plan = Plan(
            gateways=rng.choice((1, 2, 2)),
            routers=rng.choice((1, 2, 2)),
            workers=rng.choice((2, 2, 3)) if not self.wild else rng.choice((1, 2, 2, 3)),
            shape=Shape(
                blocks=rng.choice((24, 48, 96)),
                max_seqs=rng.choice((2, 4, 8)),
                max_batch_tokens=rng.choice((16, 64)),
                step_s=rng.choice((0.01, 0.02, 0.05)),
                load_s=rng.choice((0.1, 0.5, 2.0)),
                overlap=seed % 2 == 1,
            ),
            max_requests=rng.choice((4, 16)),
            other_tokens=rng.random() < 0.2,
        )
        self.stall_p = rng.choice((0.0, 0.0, 0.01, 0.03))
        self.copy_p = rng.choice((0.0, 0.0, 0.1))
        self.reset_p = rng.choice((0.0, 0.0, 0.0, 0.01))
        self._fatal = 0  # workers lost so far
        self._prefixes = [[rng.randrange(256) for _ in range(rng.choice((4, 20, 40)))] for _ in range(3)]

    async def story(self, world: World) -> None:
        """Everything that happens, and the judgement."""
        await world.ready()
        world.net.stall_p = self.stall_p
        for weather in world.net._weather.values():
            weather.stall_p = self.stall_p
        world.net.tap = self._tap
        rng = self._rng
        asks = [(rng.uniform(0, BUSY_S), self._ask(number)) for number in range(rng.randint(3, 12))]
        asks += [(rng.uniform(0, BUSY_S), self._ask_to_embed()) for _ in range(rng.choice((0, 0, 1, 2)))]
        faults = [(rng.uniform(0.1, BUSY_S + 0.5), self._fault()) for _ in range(rng.choice((0, 1, 2, 3, 5)))]
        doings: list[tuple[float, Callable[[], Any]]] = [(at, lambda ask=ask: world.ask(ask)) for at, ask in asks]
        doings += [(at, lambda fault=fault: fault(world)) for at, fault in faults]
        started = world.loop.now
        for at, do in sorted(doings, key=lambda doing: doing[0]):
            await asyncio.sleep(max(0.0, started + at - world.loop.now))
            do()
        await world.answered()
        world.net.tap = lambda _passing: ARRIVES
        self._judge(world)
        await world.settled()
        world.checks.outputs_agree()
        self._judge_store(world)

    # What is asked.

    def _ask(self, number: int) -> Ask:
        rng = self._rng
        choices = rng.choice((1, 1, 1, 2, 3))
        prompt = [*rng.choice(self._prefixes), *(rng.randrange(256) for _ in range(rng.randint(1, 8)))]
        if rng.random() < 0.2:
            prompt = [MARK, *(rng.choice((1, 2, 20, 60)) for _ in range(choices)), *prompt]
        leaves = rng.random() < 0.12
        cancels = not leaves and rng.random() < 0.12
        return Ask(
            gateway=f"g{rng.randint(1, self.plan.gateways)}",
            tenant=rng.choice("ab"),
            prompt=tuple(prompt),
            max_tokens=rng.choice((1, 2, 20, 40, 80)),
            choices=choices,
            seed=rng.getrandbits(63),
            stops=(rng.choice(("e", "STOP", " the")),) if rng.random() < 0.3 and not self.plan.other_tokens else (),
            client_id=f"id{number}" if cancels or rng.random() < 0.3 else "",
            leaves_s=rng.uniform(0.0, 1.5) if leaves else None,
            cancels_s=rng.uniform(0.0, 1.5) if cancels else None,
            cancels_at=f"g{rng.randint(1, self.plan.gateways)}",
            pauses_s=rng.choice((0.0, 0.0, 0.0, 0.1)),
            window_s=rng.choice((0.0, 20.0)),
            key=f"key{number}" if rng.random() < 0.2 else "",
            breaks_s=rng.uniform(0.0, 1.0) if rng.random() < 0.2 else None,
            others=tuple(f"g{each}" for each in range(1, self.plan.gateways + 1)),
        )

    def _ask_to_embed(self) -> Ask:
        rng = self._rng
        lengths = [rng.choice((1, 10, 60)) for _ in range(rng.choice((1, 4, 12)))]
        return Ask(
            gateway=f"g{rng.randint(1, self.plan.gateways)}",
            tenant=rng.choice("ab"),
            embeds=tuple(tuple(rng.randrange(256) for _ in range(length)) for length in lengths),
            leaves_s=rng.uniform(0.0, 0.5) if rng.random() < 0.2 else None,
            others=tuple(f"g{each}" for each in range(1, self.plan.gateways + 1)),
        )

    # What befalls the mesh.

    def _tap(self, passing: Passing) -> Fate:
        """Copies of what routers send, and resets."""
        if passing.source[0] == "c" or passing.target[0] == "c":
            return ARRIVES
        rng = self._rng
        copied = passing.kind == "call" and passing.method.endswith(("/SubmitBatch", "/Cancel", "/Submit"))
        if copied and self.copy_p and rng.random() < self.copy_p:
            other = rng.randint(1, self.plan.workers)
            address = f"w{other}:1" if passing.method.endswith("/SubmitBatch") else passing.pipe.address
            return Fate(copies=((address, rng.uniform(0.0, 2.0)),))
        if self.reset_p and rng.random() < self.reset_p:
            return Fate(reset_before=True) if rng.random() < 0.5 else Fate(reset_after=True)
        return ARRIVES

    def _fault(self) -> Callable[[World], None]:
        return self._wild_fault() if self.wild else self._mild_fault()

    def _mild_fault(self) -> Callable[[World], None]:
        rng = self._rng
        kind = rng.choice(("lose a worker", "router", "reset", "stop", "store", "store", "slow", "cut"))
        if kind == "lose a worker" and self._fatal == 0:
            self._fatal += 1
            name = f"w{rng.randint(1, self.plan.workers)}{rng.choice(('', '.e'))}"
            return lambda world: world.kill(name)
        if kind == "router" and self.plan.routers > 1 and self._fatal < 10:
            self._fatal += 10  # once: the other one must be there meanwhile
            name = f"r{rng.randint(1, self.plan.routers)}"
            return lambda world: world.kill(name)
        if kind == "stop":
            name, for_s = self._any(engines=True), rng.choice((0.05, 0.4))
            return lambda world: world.stop(name, for_s)
        if kind == "store":
            for_s, empty = rng.choice((0.3, 2.0, 8.0)), rng.random() < 0.5
            return lambda world: world.store_away(for_s, empty=empty)
        if kind == "slow":
            name, times = f"w{rng.randint(1, self.plan.workers)}", rng.choice((2.0, 5.0))
            return lambda world: _slow(world, name, times)
        one, other = self._pair()
        if kind == "cut":
            for_s = rng.choice((0.1, 0.3, 0.7))
            return lambda world: world.cut(one, other, for_s)
        return lambda world: world.reset(one, other)

    def _wild_fault(self) -> Callable[[World], None]:
        rng = self._rng
        kind = rng.choice(("kill", "kill", "kill", "stop", "stop", "cut", "cut", "reset", "store", "drain", "slow"))
        if kind == "kill":
            name, again = self._any(engines=True), rng.choice((0.2, 0.5, 3.0, 8.0))
            silently = rng.random() < 0.2
            return lambda world: world.kill(name, again_s=again, silently=silently)
        if kind == "stop":
            name, for_s = self._any(engines=True), rng.choice((0.4, 2.0, 6.0, 12.0))
            return lambda world: world.stop(name, for_s)
        if kind == "cut":
            one, other = self._pair() if rng.random() < 0.8 else (self._any(), "store")
            for_s = rng.choice((0.5, 2.0, 7.0, 12.0))
            return lambda world: world.cut(one, other, for_s)
        if kind == "store":
            for_s, empty = rng.choice((0.3, 2.0, 8.0)), rng.random() < 0.5
            return lambda world: world.store_away(for_s, empty=empty)
        if kind == "drain":
            name = self._any()
            return lambda world: world.drain(name)
        if kind == "slow":
            name, times = f"w{rng.randint(1, self.plan.workers)}", rng.choice((5.0, 50.0))
            return lambda world: _slow(world, name, times)
        one, other = self._pair()
        return lambda world: world.reset(one, other)

    def _any(self, *, engines: bool = False) -> str:
        rng, plan = self._rng, self.plan
        role = rng.choice("grwwe" if engines else "grww")
        count = {"g": plan.gateways, "r": plan.routers}.get(role, plan.workers)
        number = rng.randint(1, count)
        return f"w{number}.e" if role == "e" else f"{role}{number}"

    def _pair(self) -> tuple[str, str]:
        """Two that talk to each other."""
        rng, plan = self._rng, self.plan
        one, other = rng.choice((("g", "r"), ("g", "w"), ("g", "w"), ("r", "w")))
        count = {"g": plan.gateways, "r": plan.routers, "w": plan.workers}
        return f"{one}{rng.randint(1, count[one])}", f"{other}{rng.randint(1, count[other])}"

    # Judgement.

    def _judge(self, world: World) -> None:
        for client in world.clients:
            allowed = WILD_REASONS if self.wild else {FINISHED}
            if client.ask.leaves_s is not None:
                allowed = allowed | {LEFT}
            if client.ask.breaks_s is not None and not client.ask.key:
                allowed = allowed | {BROKEN}
            emptied = any("then empty" in event for event in world.events)
            if emptied and client.returns:
                allowed = allowed | {Reason.REQUEST_UNKNOWN.value}  # it had ended, and the store forgot its outputs
            if emptied and client.returns and any(" kill g" in event for event in world.events):
                allowed = allowed | {Reason.FEATURE_OFF.value}  # its owner died between telling its record and its plan
            if client.ask.cancels_s is not None:
                allowed = allowed | {Reason.CLIENT_CANCEL.value}
            where = f"c{client.number} ended {client.outcome}: {client.message}"
            assert client.outcome in allowed, where
            quiet = not world.events and not self.copy_p and not self.reset_p
            assert not quiet or client.outcome in {FINISHED, LEFT, BROKEN, Reason.CLIENT_CANCEL.value}, where

    def _judge_store(self, world: World) -> None:
        """Where the store and every gateway lived, nothing of a request goes on in it."""
        if any(" store" in event or " g" in event for event in world.events):
            return
        assert not world.checks.limits_left(), f"leases left: {world.checks.limits_left()}"
        assert not world.checks.open_records(), f"records left: {world.checks.open_records()}"


def _slow(world: World, name: str, times: float) -> None:
    world.did(f"{name} is {times:.0f} times slower")
    parts = world.nodes[name].parts
    if parts is not None and parts.supervisor.engine is not None:
        parts.supervisor.engine.slow = times


last: World | None = None  # for a look at one that failed


def random_world(seed: int, *, keep_log: bool = False) -> World:
    """Live through a seed. Raises what went wrong."""
    chance = Chance(seed)

    async def story(world: World) -> None:
        global last
        last = world
        await chance.story(world)

    return run(seed, replace(chance.plan, keep_log=keep_log), story)


def lived(seed: int) -> tuple[int, str, str]:
    """(seed, digest of its history, what went wrong: empty if nothing)."""
    try:
        return seed, random_world(seed).digest, ""
    except Exception as error:
        return seed, "", f"{type(error).__name__}: {error}"
