"""The races of the wire, each by name: what is done to a small mesh at which moment, and what must come of it.

Owns the moments. The one rule: a scenario holds for every label it is played with, ends settled (nothing left
anywhere), and fails when the rule it replays is broken (`mutations`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from shared.errors import Reason
from shared.wire import FEATURES
from tests.sim.clients import BROKEN, FINISHED, Ask, Client
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


def _scenario(plan: Plan, **labels: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Any]:
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


def _each(values: Any) -> dict[str, Any]:
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


def _is(passing: Passing, method: str, kind: str, way: str = "") -> bool:
    return passing.method.endswith(f"/{method}") and passing.kind == kind and passing.source.startswith(way)


def _finished(*clients: Client) -> None:
    for client in clients:
        assert client.outcome == FINISHED, f"c{client.number} ended {client.outcome}: {client.message}"


def _ask(world: World, **values: Any) -> Client:
    values.setdefault("prompt", LONG)
    values.setdefault("max_tokens", 60)
    return world.ask(Ask(**values))


async def _until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + within_s
    while not condition():
        assert loop.time() < ends, "it never happens"
        await asyncio.sleep(0.005)


async def _end(*clients: Client) -> None:
    await _until(lambda: all(client.ended for client in clients), 120.0)


async def _meet(world: World) -> None:
    """Every worker has a stream of every gateway."""
    count = 4 * world.plan.workers
    clients = [
        _ask(world, seed=seed, gateway=node.name, max_tokens=4)
        for node in world.of("gateway") for seed in range(count)
    ]  # fmt: skip
    await _end(*clients)
    for parts in world.living("gateway"):
        assert parts.core.links.open_streams == world.plan.workers, "not every worker was needed"


async def _cancelled_by(world: World, client: Client) -> None:
    """Somebody cancels what `client` asks for, through the gateway it names."""
    client.process = Process(world.loop, f"c{client.number}")
    await client.process.spawn(client._cancel())


def _holders(world: World) -> list[str]:
    return [
        node.name
        for node in world.of("worker")
        if node.process.alive and node.parts is not None and node.parts.door._holdings.live
    ]


def _retries(world: World) -> int:
    return sum(parts.core.parts.upstream.retries for parts in world.living("gateway"))


def _tokens(client: Client) -> int:
    return sum(map(len, client.said.ids.values()))


# Routers: the outcome of a batch.


@_scenario(SMALL)
async def a_request_runs_to_its_end(world: World) -> None:
    tap = Tap(world)
    clients = [_ask(world, choices=choices, seed=choices) for choices in (1, 2, 3)]
    await _end(*clients)
    _finished(*clients)
    assert tap.dispatched_once
    assert _retries(world) == 0


@_scenario(Plan(gateways=1, routers=2, workers=1))
async def router_killed_between_admitted_and_answered(world: World) -> None:
    def fate(passing: Passing, number: int) -> Fate:
        if _is(passing, "Submit", "message", "r") and number == 1:
            world.loop.later(0.0, world.kill, passing.source)
            return Fate(reset_before=True)
        return ARRIVES

    tap = Tap(world, fate)
    client = _ask(world)
    await _end(client)
    _finished(client)
    assert tap.dispatched_once or all(result.admitted.adopted for _, result in tap.answers[1:])


@_scenario(Plan(gateways=1, routers=1, workers=1))
async def an_unopened_batch_of_a_dead_router_is_adopted_by_the_next_attempt(world: World) -> None:
    """The router dies and the outputs are away: attempt 2 finds the worker at work, and takes it over."""

    def fate(passing: Passing, number: int) -> Fate:
        if _is(passing, "SubmitBatch", "message", "w") and number == 1:
            world.loop.later(0.0, world.kill, "r1")
            return Fate(reset_before=True)
        if _is(passing, "Outputs", "call", "g") and len(tap.batches) < 2:
            return Fate(reset_before=True)
        return ARRIVES

    tap = Tap(world, fate)
    client = _ask(world)
    await _end(client)
    _finished(client)
    assert tap.answers[-1][1].admitted.adopted, "it was begun anew"
    assert not any(result.admitted.adopted for _, result in tap.answers[:-1])


@_scenario(SMALL)
async def the_answer_of_a_batch_is_lost(world: World) -> None:
    """The router cannot know: it says so, and only the gateway tries again, with a higher attempt."""

    def fate(passing: Passing, number: int) -> Fate:
        if _is(passing, "SubmitBatch", "message", "w") and number == 1:
            return Fate(reset_before=True)
        return ARRIVES

    tap = Tap(world, fate)
    client = _ask(world)
    await _end(client)
    _finished(client)
    assert tap.dispatched_once, "an attempt was dispatched twice"


@_scenario(SMALL, to_the_same=0.0, to_the_other=1.0, to_the_other_first=2.0)
async def a_batch_is_duplicated(world: World, how: float) -> None:
    copied: list[str] = []

    def fate(passing: Passing, number: int) -> Fate:
        if _is(passing, "SubmitBatch", "call", "r") and number == 1:
            other = "w2:1" if passing.target == "w1" else "w1:1"
            copied.append(other)
            address = passing.pipe.address if how == 0.0 else other
            return Fate(copies=((address, 0.2 if how == 1.0 else 0.0),), late_s=0.2 if how == 2.0 else 0.0)
        return ARRIVES

    await _meet(world)
    Tap(world, fate)
    client = _ask(world, choices=2)
    await _until(lambda: _tokens(client) > 60)
    assert len(_holders(world)) == 1, "two workers run one request"
    await _end(client)
    _finished(client)
    assert copied


@_scenario(Plan(gateways=1, routers=1, workers=2, other_tokens=True))
async def a_batch_is_duplicated_to_two_workers_that_draw_other_tokens(world: World) -> None:
    def fate(passing: Passing, number: int) -> Fate:
        if _is(passing, "SubmitBatch", "call", "r") and number == 1:
            return Fate(copies=(("w2:1" if passing.target == "w1" else "w1:1", 0.1),))
        return ARRIVES

    await _meet(world)
    Tap(world, fate)
    client = _ask(world)
    await _end(client)
    _finished(client)
    assert _retries(world) == 0


@_scenario(ONE, cancel=False, finish=True)
async def a_batch_is_delayed_past(world: World, finish: bool) -> None:
    """A copy of the batch comes when its attempt was cancelled, or has finished: it is fenced."""

    def fate(passing: Passing, number: int) -> Fate:
        if _is(passing, "SubmitBatch", "call", "r") and number == 1:
            return Fate(copies=(("w1:1", 3.0),))
        return ARRIVES

    tap = Tap(world, fate)
    client = _ask(world, leaves_s=None if finish else 0.3)
    await _end(client)
    await asyncio.sleep(1.5)
    assert not _holders(world)
    for _ in range(100):
        await asyncio.sleep(0.02)
    assert world.admissions == 1, "what had ended began anew"
    assert len(tap.batches) == 1


@_scenario(ONE)
async def a_cancel_overtakes_its_batch(world: World) -> None:
    """The client leaves while the batch is under way: its late admission is cancelled when the answer comes."""

    def fate(passing: Passing, number: int) -> Fate:
        return Fate(late_s=0.8) if _is(passing, "SubmitBatch", "call", "r") and number == 1 else ARRIVES

    Tap(world, fate)
    client = _ask(world, leaves_s=0.2, max_tokens=400, prompt=(MARK, 290, 1))
    await _end(client)
    await asyncio.sleep(1.0)
    assert not _holders(world), "the router forgot to cancel it"


@_scenario(Plan(gateways=1, routers=1, workers=1, max_requests=1))
async def a_client_leaves_while_its_request_is_queued(world: World) -> None:
    first = _ask(world, max_tokens=300, prompt=(MARK, 290, 1))
    await _until(lambda: _tokens(first) > 2)
    second = _ask(world, leaves_s=0.5)
    await _end(second)
    await asyncio.sleep(0.1)
    (router,) = world.living("router")
    assert len(router.core.dispatcher) == 0, "nobody wants it and it is queued"
    await _end(first)
    _finished(first)


# Outputs.


@_scenario(ONE, **_each(range(1, 26)))
async def outputs_are_reset_at_a_message(world: World, number: int) -> None:
    def fate(passing: Passing, seen: int) -> Fate:
        if _is(passing, "Outputs", "message", "w") and seen == number:
            return Fate(reset_before=True) if number % 2 else Fate(reset_after=True)
        return ARRIVES

    Tap(world, fate)
    client = _ask(world, choices=2, max_tokens=20)
    await _end(client)
    _finished(client)
    assert _retries(world) == 0, "a broken stream is not a lost worker"


@_scenario(ONE, **_each(range(1, 9)))
async def outputs_are_reset_at_a_message_up(world: World, number: int) -> None:
    def fate(passing: Passing, seen: int) -> Fate:
        if _is(passing, "Outputs", "message", "g") and seen == number:
            return Fate(reset_before=True) if number % 2 else Fate(reset_after=True)
        return ARRIVES

    Tap(world, fate)
    client = _ask(world, choices=2, stops=("e",), prompt=(9, 9, 8), seed=3)
    await _end(client)
    _finished(client)
    assert _retries(world) == 0, "a broken stream is not a lost worker"


@_scenario(ONE, hello_first=0.5, batch_first=0.0)
async def hello_races_the_batch(world: World, batch_late_s: float) -> None:
    """The first use of a worker: its stream opens while the batch is under way, or after it has arrived."""

    def fate(passing: Passing, number: int) -> Fate:
        if _is(passing, "SubmitBatch", "call", "r") and number == 2:
            return Fate(late_s=batch_late_s)
        if _is(passing, "Outputs", "message", "w") and 3 <= number <= 3:
            return Fate(reset_before=True)
        return ARRIVES

    Tap(world, fate)
    first = _ask(world, max_tokens=20)
    await asyncio.sleep(0.05)
    second = _ask(world, seed=9, max_tokens=20)
    await _end(first, second)
    _finished(first, second)


@_scenario(Plan(gateways=1, routers=1, workers=1))
async def first_tokens_and_ends_are_told_at_once(world: World) -> None:
    await _meet(world)
    client = _ask(world, max_tokens=5)
    await _until(lambda: _tokens(client) > 0)
    assert world.loop.now - client.began < 0.12, "the first token was held back"
    await _end(client)
    assert client.ended - client.began < 0.3, "the end was held back"


@_scenario(Plan(gateways=1, routers=1, workers=1, shape=Shape(step_s=0.002)))
async def a_stop_string_ends_a_choice_at_its_worker(world: World) -> None:
    client = _ask(world, stops=("e",), prompt=(MARK, 290, 290, 8), seed=3, max_tokens=400, choices=2)
    await _end(client)
    _finished(client)
    await asyncio.sleep(0.3)
    assert not _holders(world), "the worker goes on after the stop"
    longest = max(map(len, client.said.ids.values()))
    steps = world.nodes["w1"].parts.supervisor.engine.engine.steps
    assert steps < longest + 30 < 250, f"{steps} steps for {longest} tokens: the worker was not told of the stop"


@_scenario(ONE, queued=0.05, running=0.8)
async def a_deadline_passes(world: World, deadline_s: float) -> None:
    client = _ask(world, max_tokens=400, prompt=(MARK, 290, 1), deadline_s=deadline_s)
    await _end(client)
    assert client.outcome in (Reason.RUN_EXPIRED.value, Reason.QUEUE_EXPIRED.value)
    assert client.ended - client.began < deadline_s + 0.3
    await asyncio.sleep(0.3)
    assert not _holders(world)


# Losses.


@_scenario(Plan(gateways=1, routers=1, workers=2), **_each((1, 2, 3, 4, 6, 9, 15, 19, 20, 21, 30, 45, 59, 60)))
async def a_worker_is_killed_at_a_step(world: World, step: int) -> None:
    """Three choices of 2, 20 and 60 tokens; a choice that has ended is not run again."""
    tap = Tap(world)
    client = _ask(world, choices=3, prompt=(MARK, 2, 20, 60, 1), max_tokens=100)
    await _until(lambda: _holders(world))
    (name,) = _holders(world)
    engine = world.nodes[name].parts.supervisor.engine
    await _until(lambda: engine.engine.steps >= step or client.ended)
    world.kill(name if step % 2 else f"{name}.e")
    await _end(client)
    _finished(client)
    assert {choice: len(ids) for choice, ids in client.said.ids.items()} == {0: 2, 1: 20, 2: 60}
    again = [item.generate.choices for _, item in tap.batches if item.attempt > 1]
    for choices in again if step >= 6 else ():
        assert choices[0].finish, "a choice that has ended is run again"


@_scenario(Plan(gateways=1, routers=1, workers=2, other_tokens=True), **_each((3, 20, 40)))
async def a_worker_is_killed_and_the_next_draws_other_tokens(world: World, step: int) -> None:
    client = _ask(world, choices=2)
    await _until(lambda: _tokens(client) >= step)
    (name,) = _holders(world)
    world.kill(name)
    await _end(client)
    _finished(client)


@_scenario(Plan(gateways=1, routers=1, workers=1, shape=Shape(load_s=0.2)))
async def an_engine_dies_behind_a_living_door(world: World) -> None:
    client = _ask(world)
    await _until(lambda: _tokens(client) > 10)
    world.kill("w1.e")
    await _end(client)
    _finished(client)


@_scenario(Plan(gateways=1, routers=1, workers=3))
async def a_request_that_ends_its_workers_is_given_up(world: World) -> None:
    client = _ask(world, max_tokens=300, prompt=(MARK, 290, 1))
    losses = 0
    while not client.ended and losses < 5:
        await _until(lambda: client.ended or _holders(world))
        before = _tokens(client)
        await _until(lambda before=before: client.ended or _tokens(client) > before + 2)  # type: ignore[misc]
        for name in _holders(world):
            losses += 1
            world.kill(name)
    await _end(client)
    assert client.outcome == Reason.POISON_SUSPECTED.value, f"it ended {client.outcome} after {losses} losses"
    assert losses == 2


@_scenario(SMALL, silently=True, with_a_word=False)
async def a_machine_goes(world: World, silently: bool) -> None:
    """Nobody hears of its end: its silence must be enough."""
    client = _ask(world)
    await _until(lambda: _tokens(client) > 10)
    (name,) = _holders(world)
    world.kill(name, silently=silently, again_s=None)
    began = world.loop.now
    await _end(client)
    _finished(client)
    assert world.loop.now - began < 9.0, "its silence was not noticed"


@_scenario(SMALL)
async def a_worker_drains(world: World) -> None:
    client = _ask(world, max_tokens=100, prompt=(MARK, 100, 1))
    await _until(lambda: _tokens(client) > 10)
    (name,) = _holders(world)
    parts = world.nodes[name].parts
    world.did(f"drain {name} with release")
    world.nodes[name].up = False
    world.nodes[name].process.soon(parts.drain.ask, worker_pb2.DrainRequest(release=True))
    await _end(client)
    _finished(client)


# Silence.


@_scenario(BOTH, **{
    f"{name.replace('.', '_')}_for_{str(for_s).replace('.', '_')}": (name, for_s)
    for name in ("g1", "r1", "w", "w.e") for for_s in (0.4, 2.0, 12.0)
})  # fmt: skip
async def a_process_is_stopped(world: World, what: tuple[str, float]) -> None:
    name, for_s = what
    clients = [
        _ask(world, max_tokens=200, prompt=(MARK, 200, 200, 1), choices=2, gateway=each) for each in ("g1", "g2")
    ]
    await _until(lambda: all(_tokens(client) > 10 for client in clients))
    if name.startswith("w"):
        name = name.replace("w", _holders(world)[0])
    began = world.loop.now
    world.stop(name, for_s)
    late = _ask(world, gateway="g2", seed=5)
    await _end(*clients, late)
    _finished(*clients, late)
    if name in ("g1", "r1") or for_s < 1:
        assert _retries(world) == 0, "a process that woke blamed its peers"
    elif for_s > 10:
        assert max(client.ended for client in clients) < began + 12, "a worker that stands still was waited for"


@_scenario(SMALL, **_each((6.0, 12.0)))
async def a_machine_sleeps_and_nobody_blames_anybody(world: World, for_s: float) -> None:
    """Every process is stopped at once: when they wake nothing is in any buffer, and the silence was everybody's."""
    client = _ask(world, max_tokens=400, prompt=(MARK, 290, 290, 1), choices=2)
    await _until(lambda: _tokens(client) > 10)
    for name in ("g1", "r1", "w1", "w2", "w1.e", "w2.e"):
        world.stop(name, for_s)
    await _end(client)
    _finished(client)
    (gateway,) = world.living("gateway")
    assert gateway.core.links.lost_attempts == 0


# Who asks for what.


@_scenario(BOTH)
async def two_tenants_use_one_client_id(world: World) -> None:
    clients = [
        _ask(world, tenant=tenant, gateway=gateway, client_id="same", max_tokens=300, prompt=(MARK, 290, 1), seed=seed)
        for tenant, gateway, seed in (("a", "g1", 1), ("b", "g2", 2))
    ]
    await _until(lambda: all(_tokens(client) > 5 for client in clients))
    other = _ask(world, tenant="b", gateway="g1", client_id="other", cancels_s=0.1, cancels_at="g1")
    await asyncio.sleep(0.5)
    assert not any(client.ended for client in clients)
    first, second = (
        Client(world, replace(client.ask, cancels_s=0.0, cancels_at=gateway), number)
        for client, gateway, number in zip(clients, ("g2", "g1"), (98, 99), strict=True)
    )
    await _cancelled_by(world, first)
    await asyncio.sleep(0.3)
    assert clients[0].outcome == Reason.CLIENT_CANCEL.value
    assert not clients[1].ended
    await _cancelled_by(world, second)
    await _end(*clients, other)
    assert clients[1].outcome == Reason.CLIENT_CANCEL.value
    assert (first.confirmed, second.confirmed) == (True, True)


@_scenario(Plan(gateways=1, routers=1, workers=2, features={"w1": FEATURES - {"logprobs"}}))
async def an_older_worker_is_given_a_feature_it_does_not_have(world: World) -> None:
    tap = Tap(world)
    clients = [_ask(world, seed=seed, max_tokens=10, logprobs=True) for seed in range(6)]
    await _end(*clients)
    _finished(*clients)
    assert any(result.HasField("mismatch") for _, result in tap.answers), "the older worker was never asked"
    assert all(source == "w2" for source, result in tap.answers if result.HasField("admitted"))


# The store.


@_scenario(BOTH, away=False, empty=True)
async def the_store_goes_and_comes_back(world: World, empty: bool) -> None:
    clients = [_ask(world, max_tokens=200, prompt=(MARK, 200, 1), gateway=gateway) for gateway in ("g1", "g2")]
    await _until(lambda: all(_tokens(client) > 5 for client in clients))
    world.store_away(3.0, empty=empty)
    late = _ask(world, seed=4)
    await _end(*clients, late)
    _finished(*clients, late)
    await asyncio.sleep(4.0)
    assert not world.checks.open_records(), world.checks.open_records()


@_scenario(BOTH)
async def a_resumable_request_outlives_a_store_that_comes_back_empty(world: World) -> None:
    client = _ask(world, max_tokens=200, prompt=(MARK, 200, 1), window_s=30.0, others=("g1", "g2"))
    await _until(lambda: _tokens(client) > 5)
    world.store_away(1.5, empty=True)
    await _end(client)
    _finished(client)


SLOW_STEPS: Final = Plan(gateways=2, routers=1, workers=2, other_tokens=True, shape=Shape(step_s=0.1))
HALF_A_MINUTE: Final[dict[str, Any]] = {"max_tokens": 400, "prompt": (MARK, 290, 1)}  # with slow steps


@_scenario(SLOW_STEPS)
async def keys_outlive_a_store_that_comes_back_empty(world: World) -> None:
    """No key is taken before owners have told the store again; then one in use leads to its request, and new ones are
    taken."""
    first = _ask(world, key="k", others=("g1", "g2"), **HALF_A_MINUTE)
    await _until(lambda: _tokens(first) > 5)
    world.store_away(0.5, empty=True)
    await asyncio.sleep(0.6)
    early = _ask(world, key="k", gateway="g2", others=("g2",), **HALF_A_MINUTE)
    new = _ask(world, key="new", gateway="g2", others=("g2",), seed=9, max_tokens=5)
    await asyncio.sleep(17.0)
    late = _ask(world, key="k", gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await _end(first, early, new, late)
    _finished(first, early, new, late)
    assert len({client.request_id for client in (first, early, late)}) == 1, "INV-11: one key, two requests"
    assert early.refusals > 3, "a key was taken that may have been in use"
    assert new.ended - new.began < 25.0, "new keys are refused for too long"


@_scenario(SLOW_STEPS, **_each((0.0, 0.2, 0.4, 0.6, 0.8)))
async def a_gateway_starts_when_the_store_has_just_lost_everything(world: World, after_s: float) -> None:
    """It never saw the store as it was, and knows all the same that owners are still to say what they have."""
    first = _ask(world, key="k", window_s=60.0, others=("g1",), **HALF_A_MINUTE)
    await _until(lambda: _tokens(first) > 5)
    world.kill("g2", again_s=1.1 + after_s)  # the others have looked by then
    owner = world.nodes["g1"].link
    assert owner is not None
    owner.slow_s = 0.1
    world.store_away(0.5, empty=True)
    await _until(lambda: world.nodes["g2"].up)
    back = _ask(world, resumes=first.request_id, window_s=60.0, gateway="g2", others=("g2",), **HALF_A_MINUTE)
    second = _ask(world, key="k", window_s=60.0, gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await _end(first, back, second)
    _finished(first, back, second)
    assert second.request_id == first.request_id, "INV-11: one key, two requests"


@_scenario(SLOW_STEPS)
async def a_key_was_taken_while_its_owner_was_cut_off_from_a_store_that_forgot_it(world: World) -> None:
    """The key decides: its first request, which nobody could know, is given up when its owner comes back."""
    first = _ask(world, key="k", others=("g1",), **HALF_A_MINUTE)
    await _until(lambda: _tokens(first) > 5)
    world.cut("g1", "store", 20.0)
    world.store_away(0.5, empty=True)
    await asyncio.sleep(17.0)
    second = _ask(world, key="k", gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await _end(first, second)
    _finished(second)
    assert first.outcome in (Reason.REQUEST_UNKNOWN.value, Reason.OWNER_MOVED.value), f"it ended {first.outcome}"
    kept = world.redis.keys("tl:out:")
    assert kept == [f"tl:out:{{{second.request_id}}}"], f"INV-11: one key, and outputs of {kept}"


# Take-over.


@_scenario(BOTH, **_each((1, 10, 40)))
async def a_gateway_dies_and_another_takes_over(world: World, tokens: int) -> None:
    client = _ask(world, window_s=30.0, others=("g1", "g2"))
    await _until(lambda: _tokens(client) >= tokens)
    world.kill("g1", again_s=None)
    await _end(client)
    _finished(client)
    assert client.returns


@_scenario(Plan(gateways=2, routers=1, workers=2, other_tokens=True), **_each((1, 10, 40)))
async def gateway_and_worker_die_together_and_the_next_draws_other_tokens(world: World, tokens: int) -> None:
    """What the client has is what the store has: nothing else may be told."""
    client = _ask(world, window_s=30.0, others=("g1", "g2"))
    await _until(lambda: _tokens(client) >= tokens)
    (name,) = _holders(world)
    world.kill("g1", again_s=None)
    await asyncio.sleep(0.03)
    world.kill(name)
    await _end(client)
    _finished(client)


@_scenario(Plan(gateways=2, routers=1, workers=2, other_tokens=True), store_slow=0.15, store_quick=0.0)
async def deltas_are_told_only_when_they_are_kept(world: World, slow_s: float) -> None:
    """The store answers late: gateway and worker die while appends are under way."""
    client = _ask(world, window_s=30.0, others=("g1", "g2"))
    link = world.nodes["g1"].link
    assert link is not None
    link.slow_s = slow_s
    await _until(lambda: _tokens(client) >= 10)
    (name,) = _holders(world)
    link.cut = True
    await asyncio.sleep(0.2)
    world.kill("g1", again_s=None)
    world.kill(name)
    await _end(client)
    _finished(client)


@_scenario(
    Plan(gateways=2, routers=1, workers=2, other_tokens=True, shape=Shape(step_s=0.06)),
    from_all=True,
    from_the_store=False,
)
async def one_of_two_gateways_is_partitioned(world: World, everything: bool) -> None:
    """It goes on and may not say so: the other one owns the request once the lease has lapsed."""
    client = _ask(world, max_tokens=400, prompt=(MARK, 290, 1), window_s=30.0, others=("g1", "g2"))
    await _until(lambda: _tokens(client) > 10)
    world.cut("g1", "store", 9.0)
    if everything:
        for other in ("r1", "w1", "w2", "g2"):
            world.cut("g1", other, 9.0)
        world.cut("g1", "c1", 9.0)
    world.reset("g1", "c1")
    await _end(client)
    _finished(client)


@_scenario(SLOW_STEPS)
async def a_store_that_comes_back_empty_hears_nothing_of_former_owners(world: World) -> None:
    """It was taken over, and ended there: for the gateway that was robbed it must be over too."""
    client = _ask(world, window_s=30.0, others=("g2",), **HALF_A_MINUTE)
    await _until(lambda: _tokens(client) > 5)
    world.cut("g1", "store", 8.0)
    await _end(client)
    _finished(client)
    assert client.returns, "it was not taken over"
    world.store_away(0.5, empty=True)
    await asyncio.sleep(4.0)
    assert not world.checks.open_records(), world.checks.open_records()


@_scenario(BOTH)
async def a_live_owner_is_followed_and_not_robbed(world: World) -> None:
    client = _ask(world, max_tokens=400, prompt=(MARK, 290, 1), window_s=30.0, others=("g1", "g2"), breaks_s=0.3)
    await _until(lambda: client.returns)
    await asyncio.sleep(1.0)
    assert not client.ended
    assert not any(len(parts.core.table) for parts in world.living("gateway")[1:]), "the owner was robbed"
    await _end(client)
    _finished(client)


@_scenario(Plan(gateways=2, routers=1, workers=2, other_tokens=True), **_each((0.02, 0.3, 0.8)))
async def a_key_is_used_again_while_its_gateway_dies(world: World, after_s: float) -> None:
    first = _ask(world, key="k", others=("g1", "g2"))
    await asyncio.sleep(after_s)
    world.kill("g1")
    second = _ask(world, key="k", gateway="g2", others=("g2", "g1"))
    await _end(first, second)
    assert first.outcome in (FINISHED, BROKEN)
    _finished(second)
    if first.outcome == FINISHED:
        assert first.said.ids == second.said.ids, "INV-11: one key, two transcripts"


def scenes() -> Iterator[tuple[str, str, Scene]]:
    """All of them: name, label, scene."""
    for name, labels in SCENARIOS.items():
        for label, scene in labels.items():
            yield name, label, scene
