"""What scenes are made of: a small mesh, a story, ways to look at it, and a tap on its messages.

Owns the register of scenarios. The one rule: a scenario holds for every label it is played with, ends settled (nothing
left anywhere), and fails when the rule it replays is broken (`mutations`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tests.sim.clients import FINISHED, Ask, Client
from tests.sim.engine import MARK, Shape
from tests.sim.loop import Process
from tests.sim.net import ARRIVES, Fate, Passing
from tests.sim.world import Plan, World, run
from trunkline.worker.v1 import worker_pb2

Story = Callable[[World], Coroutine[Any, Any, None]]
SEED: Final = 7
LONG: Final = (MARK, 60, 60, 60, 5, 6, 7)  # each choice has 60 tokens
SMALL: Final = Plan(gateways=1, routers=1, workers=2)
ONE: Final = Plan(gateways=1, routers=1, workers=1)
BOTH: Final = Plan(gateways=2, routers=1, workers=2)
SLOW_STEPS: Final = Plan(gateways=2, routers=1, workers=2, other_tokens=True, shape=Shape(step_s=0.1))
HALF_A_MINUTE: Final[dict[str, Any]] = {"max_tokens": 400, "prompt": (MARK, 290, 1)}  # with slow steps


@dataclass(frozen=True)
class Scene:
    """One way of playing a scenario."""

    plan: Plan
    story: Story


SCENARIOS: dict[str, dict[str, Scene]] = {}


def play(scene: Scene, seed: int = SEED, *, keep_log: bool = False) -> World:
    """Raises what went wrong."""

    async def story(world: World) -> None:
        await world.ready()
        await asyncio.sleep(0.5)
        await scene.story(world)
        await world.answered()
        world.net.tap = lambda _passing: ARRIVES
        await world.settled()
        world.checks.outputs_agree()

    return run(seed, replace(scene.plan, keep_log=keep_log), story)


def scenario(plan: Plan, **labels: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Any]:
    """Registers a story under its name; of `labels` each gives the story one more argument."""

    def register(story: Callable[..., Coroutine[Any, Any, None]]) -> Any:
        def bound(value: Any) -> Story:
            return lambda world: story(world, value)

        SCENARIOS[story.__name__] = (
            {label: Scene(plan, bound(value)) for label, value in labels.items()}
            if labels
            else {"": Scene(plan, story)}
        )
        return story

    return register


def each(values: Any) -> dict[str, Any]:
    return {f"at_{value}".replace(".", "_"): value for value in values}


# Helpers.


@dataclass
class Tap:
    """Does something to messages. `counts` are those seen, by method and kind."""

    world: World
    fate: Callable[[Passing, int], Fate] = lambda _passing, _number: ARRIVES
    counts: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    batches: list[tuple[str, worker_pb2.Submission]] = field(default_factory=list)  # worker, item
    answers: list[tuple[str, worker_pb2.ItemResult]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world.net.tap = self

    def __call__(self, passing: Passing) -> Fate:
        method = passing.method.rpartition("/")[2]
        key = (method, passing.kind, passing.source[0])
        self.counts[key] += 1
        if method == "SubmitBatch" and passing.kind == "call":
            items = worker_pb2.SubmitBatchRequest.FromString(passing.data).items
            self.batches += [(passing.target, item) for item in items]
        if method == "SubmitBatch" and passing.kind == "message":
            results = worker_pb2.SubmitBatchResponse.FromString(passing.data).results
            self.answers += [(passing.source, result) for result in results]
        return self.fate(passing, self.counts[key])

    @property
    def dispatched_once(self) -> bool:
        """No (id, e, a) went out twice."""
        seen = [(item.request_id, item.epoch, item.attempt) for _, item in self.batches]
        return len(seen) == len(set(seen))


def passes(passing: Passing, method: str, kind: str, way: str = "") -> bool:
    return passing.method.endswith(f"/{method}") and passing.kind == kind and passing.source.startswith(way)


def finished(*clients: Client) -> None:
    for client in clients:
        assert client.outcome == FINISHED, f"c{client.number} ended {client.outcome}: {client.message}"


def ask(world: World, **values: Any) -> Client:
    values.setdefault("prompt", LONG)
    values.setdefault("max_tokens", 60)
    return world.ask(Ask(**values))


async def until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + within_s
    while not condition():
        assert loop.time() < ends, "it never happens"
        await asyncio.sleep(0.005)


async def end(*clients: Client) -> None:
    await until(lambda: all(client.ended for client in clients), 120.0)


async def meet(world: World) -> None:
    """Every worker has a stream of every gateway."""
    count = 4 * world.plan.workers
    clients = [
        ask(world, seed=seed, gateway=node.name, max_tokens=4)
        for node in world.of("gateway") for seed in range(count)
    ]  # fmt: skip
    await end(*clients)
    for parts in world.living("gateway"):
        assert parts.core.links.open_streams == world.plan.workers, "not every worker was needed"


async def cancelled_by(world: World, client: Client) -> None:
    """Somebody cancels what `client` asks for, through the gateway it names."""
    client.process = Process(world.loop, f"c{client.number}")
    await client.process.spawn(client._cancel())


def holders(world: World) -> list[str]:
    return [
        node.name
        for node in world.of("worker")
        if node.process.alive and node.parts is not None and node.parts.door._holdings.live
    ]


def retries(world: World) -> int:
    return sum(parts.core.parts.upstream.retries for parts in world.living("gateway"))


def told(client: Client) -> int:
    return sum(map(len, client.said.ids.values()))
