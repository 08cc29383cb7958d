"""The races of the wire, each by name: what is done to a small mesh at which moment, and what must come of it.

Owns the moments. The one rule: a race is played at the moments that matter and told by what clients and doors see.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from gateway.journal import KEEP_S
from shared.errors import Reason
from shared.wire import FEATURES
from tests.sim.clients import BROKEN, FINISHED, Client
from tests.sim.engine import MARK, Shape
from tests.sim.net import ARRIVES, Fate, Passing
from tests.sim.scene import (
    BOTH,
    HALF_A_MINUTE,
    ONE,
    SLOW_STEPS,
    SMALL,
    Tap,
    ask,
    cancelled_by,
    each,
    end,
    finished,
    holders,
    meet,
    passes,
    retries,
    scenario,
    told,
    until,
)
from tests.sim.world import Plan, World
from trunkline.worker.v1 import worker_pb2

# Routers: the outcome of a batch.


@scenario(SMALL)
async def a_request_runs_to_its_end(world: World) -> None:
    tap = Tap(world)
    clients = [ask(world, choices=choices, seed=choices) for choices in (1, 2, 3)]
    await end(*clients)
    finished(*clients)
    assert tap.dispatched_once
    assert retries(world) == 0


@scenario(Plan(gateways=1, routers=2, workers=1))
async def router_killed_between_admitted_and_answered(world: World) -> None:
    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "Submit", "message", "r") and number == 1:
            world.loop.later(0.0, world.kill, passing.source)
            return Fate(reset_before=True)
        return ARRIVES

    tap = Tap(world, fate)
    client = ask(world)
    await end(client)
    finished(client)
    assert tap.dispatched_once or all(result.admitted.adopted for _, result in tap.answers[1:])


@scenario(Plan(gateways=1, routers=1, workers=1))
async def an_unopened_batch_of_a_dead_router_is_adopted_by_the_next_attempt(world: World) -> None:
    """The router dies and the outputs are away: attempt 2 finds the worker at work, and takes it over."""

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "message", "w") and number == 1:
            world.loop.later(0.0, world.kill, "r1")
            return Fate(reset_before=True)
        if passes(passing, "Outputs", "call", "g") and len(tap.batches) < 2:
            return Fate(reset_before=True)
        return ARRIVES

    tap = Tap(world, fate)
    client = ask(world)
    await end(client)
    finished(client)
    assert tap.answers[-1][1].admitted.adopted, "it was begun anew"
    assert not any(result.admitted.adopted for _, result in tap.answers[:-1])


@scenario(SMALL)
async def the_answer_of_a_batch_is_lost(world: World) -> None:
    """The router cannot know: it says so, and only the gateway tries again, with a higher attempt."""

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "message", "w") and number == 1:
            return Fate(reset_before=True)
        return ARRIVES

    tap = Tap(world, fate)
    client = ask(world)
    await end(client)
    finished(client)
    assert tap.dispatched_once, "an attempt was dispatched twice"


@scenario(SMALL, to_the_same=0.0, to_the_other=1.0, to_the_other_first=2.0)
async def a_batch_is_duplicated(world: World, how: float) -> None:
    copied: list[str] = []

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "call", "r") and number == 1:
            other = "w2:1" if passing.target == "w1" else "w1:1"
            copied.append(other)
            address = passing.pipe.address if how == 0.0 else other
            return Fate(copies=((address, 0.2 if how == 1.0 else 0.0),), late_s=0.2 if how == 2.0 else 0.0)
        return ARRIVES

    await meet(world)
    Tap(world, fate)
    client = ask(world, choices=2)
    await until(lambda: told(client) > 60)
    assert len(holders(world)) == 1, "two workers run one request"
    await end(client)
    finished(client)
    assert copied


@scenario(Plan(gateways=1, routers=1, workers=2, other_tokens=True))
async def a_batch_is_duplicated_to_two_workers_that_draw_other_tokens(world: World) -> None:
    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "call", "r") and number == 1:
            return Fate(copies=(("w2:1" if passing.target == "w1" else "w1:1", 0.1),))
        return ARRIVES

    await meet(world)
    Tap(world, fate)
    client = ask(world)
    await end(client)
    finished(client)
    assert retries(world) == 0


@scenario(ONE, cancel=False, finish=True)
async def a_batch_is_delayed_past(world: World, finish: bool) -> None:
    """A copy of the batch comes when its attempt was cancelled, or has finished: it is fenced."""

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "call", "r") and number == 1:
            return Fate(copies=(("w1:1", 3.0),))
        return ARRIVES

    tap = Tap(world, fate)
    client = ask(world, leaves_s=None if finish else 0.3)
    await end(client)
    await asyncio.sleep(1.5)
    assert not holders(world)
    for _ in range(100):
        await asyncio.sleep(0.02)
    assert world.admissions == 1, "what had ended began anew"
    assert len(tap.batches) == 1


@scenario(ONE)
async def a_cancel_overtakes_its_batch(world: World) -> None:
    """The client leaves while the batch is under way: its late admission is cancelled when the answer comes."""

    def fate(passing: Passing, number: int) -> Fate:
        return Fate(late_s=0.8) if passes(passing, "SubmitBatch", "call", "r") and number == 1 else ARRIVES

    Tap(world, fate)
    client = ask(world, leaves_s=0.2, max_tokens=400, prompt=(MARK, 290, 1))
    await end(client)
    await asyncio.sleep(1.0)
    assert not holders(world), "the router forgot to cancel it"


@scenario(Plan(gateways=1, routers=1, workers=1, max_requests=1))
async def a_client_leaves_while_its_request_is_queued(world: World) -> None:
    first = ask(world, max_tokens=300, prompt=(MARK, 290, 1))
    await until(lambda: told(first) > 2)
    second = ask(world, leaves_s=0.5)
    await end(second)
    await asyncio.sleep(0.1)
    (router,) = world.living("router")
    assert len(router.core.dispatcher) == 0, "nobody wants it and it is queued"
    await end(first)
    finished(first)


# Outputs.


@scenario(ONE, **each(range(1, 26)))
async def outputs_are_reset_at_a_message(world: World, number: int) -> None:
    def fate(passing: Passing, seen: int) -> Fate:
        if passes(passing, "Outputs", "message", "w") and seen == number:
            return Fate(reset_before=True) if number % 2 else Fate(reset_after=True)
        return ARRIVES

    Tap(world, fate)
    client = ask(world, choices=2, max_tokens=20)
    await end(client)
    finished(client)
    assert retries(world) == 0, "a broken stream is not a lost worker"


@scenario(ONE, **each(range(1, 9)))
async def outputs_are_reset_at_a_message_up(world: World, number: int) -> None:
    def fate(passing: Passing, seen: int) -> Fate:
        if passes(passing, "Outputs", "message", "g") and seen == number:
            return Fate(reset_before=True) if number % 2 else Fate(reset_after=True)
        return ARRIVES

    Tap(world, fate)
    client = ask(world, choices=2, stops=("e",), prompt=(9, 9, 8), seed=3)
    await end(client)
    finished(client)
    assert retries(world) == 0, "a broken stream is not a lost worker"


@scenario(ONE, hello_first=0.5, batch_first=0.0)
async def hello_races_the_batch(world: World, batch_late_s: float) -> None:
    """The first use of a worker: its stream opens while the batch is under way, or after it has arrived."""

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "call", "r") and number == 2:
            return Fate(late_s=batch_late_s)
        if passes(passing, "Outputs", "message", "w") and 3 <= number <= 3:
            return Fate(reset_before=True)
        return ARRIVES

    Tap(world, fate)
    first = ask(world, max_tokens=20)
    await asyncio.sleep(0.05)
    second = ask(world, seed=9, max_tokens=20)
    await end(first, second)
    finished(first, second)


@scenario(Plan(gateways=1, routers=1, workers=1))
async def first_tokens_and_ends_are_told_at_once(world: World) -> None:
    await meet(world)
    client = ask(world, max_tokens=5)
    await until(lambda: told(client) > 0)
    assert world.loop.now - client.began < 0.12, "the first token was held back"
    await end(client)
    assert client.ended - client.began < 0.3, "the end was held back"


@scenario(Plan(gateways=1, routers=1, workers=1, shape=Shape(step_s=0.002)))
async def a_stop_string_ends_a_choice_at_its_worker(world: World) -> None:
    client = ask(world, stops=("e",), prompt=(MARK, 290, 290, 8), seed=3, max_tokens=400, choices=2)
    await end(client)
    finished(client)
    await asyncio.sleep(0.3)
    assert not holders(world), "the worker goes on after the stop"
    longest = max(map(len, client.said.ids.values()))
    steps = world.nodes["w1"].parts.supervisor.engine.engine.steps
    assert steps < longest + 30 < 250, f"{steps} steps for {longest} tokens: the worker was not told of the stop"


@scenario(ONE, queued=0.05, running=0.8)
async def a_deadline_passes(world: World, deadline_s: float) -> None:
    client = ask(world, max_tokens=400, prompt=(MARK, 290, 1), deadline_s=deadline_s)
    await end(client)
    assert client.outcome in (Reason.RUN_EXPIRED.value, Reason.QUEUE_EXPIRED.value)
    assert client.ended - client.began < deadline_s + 0.3
    await asyncio.sleep(0.3)
    assert not holders(world)


# Losses.


@scenario(Plan(gateways=1, routers=1, workers=2), **each(range(1, 61)))
async def a_worker_is_killed_at_a_step(world: World, step: int) -> None:
    """Three choices of 2, 20 and 60 tokens; a choice that has ended is not run again."""
    tap = Tap(world)
    client = ask(world, choices=3, prompt=(MARK, 2, 20, 60, 1), max_tokens=100)
    await until(lambda: holders(world))
    (name,) = holders(world)
    engine = world.nodes[name].parts.supervisor.engine
    await until(lambda: engine.engine.steps >= step or client.ended)
    world.kill(name if step % 2 else f"{name}.e")
    await end(client)
    finished(client)
    assert {choice: len(ids) for choice, ids in client.said.ids.items()} == {0: 2, 1: 20, 2: 60}
    again = [item.generate.choices for _, item in tap.batches if item.attempt > 1]
    for choices in again if step >= 6 else ():
        assert choices[0].finish, "a choice that has ended is run again"


@scenario(Plan(gateways=1, routers=1, workers=2, other_tokens=True), **each((3, 20, 40)))
async def a_worker_is_killed_and_the_next_draws_other_tokens(world: World, step: int) -> None:
    client = ask(world, choices=2)
    await until(lambda: told(client) >= step)
    (name,) = holders(world)
    world.kill(name)
    await end(client)
    finished(client)


@scenario(Plan(gateways=1, routers=1, workers=1, shape=Shape(load_s=0.2)))
async def an_engine_dies_behind_a_living_door(world: World) -> None:
    client = ask(world)
    await until(lambda: told(client) > 10)
    world.kill("w1.e")
    await end(client)
    finished(client)


@scenario(Plan(gateways=1, routers=1, workers=3))
async def a_request_that_ends_its_workers_is_given_up(world: World) -> None:
    client = ask(world, max_tokens=300, prompt=(MARK, 290, 1))
    losses = 0
    while not client.ended and losses < 5:
        await until(lambda: client.ended or holders(world))
        before = told(client)
        await until(lambda before=before: client.ended or told(client) > before + 2)  # type: ignore[misc]
        for name in holders(world):
            losses += 1
            world.kill(name)
    await end(client)
    assert client.outcome == Reason.POISON_SUSPECTED.value, f"it ended {client.outcome} after {losses} losses"
    assert losses == 2


@scenario(SMALL, silently=True, with_a_word=False)
async def a_machine_goes(world: World, silently: bool) -> None:
    """Nobody hears of its end: its silence must be enough."""
    client = ask(world)
    await until(lambda: told(client) > 10)
    (name,) = holders(world)
    world.kill(name, silently=silently, again_s=None)
    began = world.loop.now
    await end(client)
    finished(client)
    assert world.loop.now - began < 9.0, "its silence was not noticed"


@scenario(SMALL)
async def a_worker_drains(world: World) -> None:
    client = ask(world, max_tokens=100, prompt=(MARK, 100, 1))
    await until(lambda: told(client) > 10)
    (name,) = holders(world)
    parts = world.nodes[name].parts
    world.did(f"drain {name} with release")
    world.nodes[name].up = False
    world.nodes[name].process.soon(parts.drain.ask, worker_pb2.DrainRequest(release=True))
    await end(client)
    finished(client)


# Silence.


@scenario(BOTH, **{
    f"{name.replace('.', '_')}_for_{str(for_s).replace('.', '_')}": (name, for_s)
    for name in ("g1", "r1", "w", "w.e") for for_s in (0.4, 2.0, 12.0)
})  # fmt: skip
async def a_process_is_stopped(world: World, what: tuple[str, float]) -> None:
    name, for_s = what
    clients = [ask(world, max_tokens=200, prompt=(MARK, 200, 200, 1), choices=2, gateway=each) for each in ("g1", "g2")]
    await until(lambda: all(told(client) > 10 for client in clients))
    if name.startswith("w"):
        name = name.replace("w", holders(world)[0])
    began = world.loop.now
    world.stop(name, for_s)
    late = ask(world, gateway="g2", seed=5)
    await end(*clients, late)
    finished(*clients, late)
    if name in ("g1", "r1") or for_s < 1:
        assert retries(world) == 0, "a process that woke blamed its peers"
    elif for_s > 10:
        assert max(client.ended for client in clients) < began + 12, "a worker that stands still was waited for"


@scenario(SMALL, **each((6.0, 12.0)))
async def a_machine_sleeps_and_nobody_blames_anybody(world: World, for_s: float) -> None:
    """Every process is stopped at once: when they wake nothing is in any buffer, and the silence was everybody's."""
    client = ask(world, max_tokens=400, prompt=(MARK, 290, 290, 1), choices=2)
    await until(lambda: told(client) > 10)
    for name in ("g1", "r1", "w1", "w2", "w1.e", "w2.e"):
        world.stop(name, for_s)
    await end(client)
    finished(client)
    (gateway,) = world.living("gateway")
    assert gateway.core.links.lost_attempts == 0


# Who asks for what.


@scenario(BOTH)
async def two_tenants_use_one_client_id(world: World) -> None:
    clients = [
        ask(world, tenant=tenant, gateway=gateway, client_id="same", max_tokens=300, prompt=(MARK, 290, 1), seed=seed)
        for tenant, gateway, seed in (("a", "g1", 1), ("b", "g2", 2))
    ]
    await until(lambda: all(told(client) > 5 for client in clients))
    other = ask(world, tenant="b", gateway="g1", client_id="other", cancels_s=0.1, cancels_at="g1")
    await asyncio.sleep(0.5)
    assert not any(client.ended for client in clients)
    first, second = (
        Client(world, replace(client.ask, cancels_s=0.0, cancels_at=gateway), number)
        for client, gateway, number in zip(clients, ("g2", "g1"), (98, 99), strict=True)
    )
    await cancelled_by(world, first)
    await asyncio.sleep(0.3)
    assert clients[0].outcome == Reason.CLIENT_CANCEL.value
    assert not clients[1].ended
    await cancelled_by(world, second)
    await end(*clients, other)
    assert clients[1].outcome == Reason.CLIENT_CANCEL.value
    assert (first.confirmed, second.confirmed) == (True, True)


@scenario(Plan(gateways=1, routers=1, workers=2, features={"w1": FEATURES - {"logprobs"}}))
async def an_older_worker_is_given_a_feature_it_does_not_have(world: World) -> None:
    tap = Tap(world)
    clients = [ask(world, seed=seed, max_tokens=10, logprobs=True) for seed in range(6)]
    await end(*clients)
    finished(*clients)
    assert any(result.HasField("mismatch") for _, result in tap.answers), "the older worker was never asked"
    assert all(source == "w2" for source, result in tap.answers if result.HasField("admitted"))


# The store.


@scenario(BOTH, away=False, empty=True)
async def the_store_goes_and_comes_back(world: World, empty: bool) -> None:
    clients = [ask(world, max_tokens=200, prompt=(MARK, 200, 1), gateway=gateway) for gateway in ("g1", "g2")]
    await until(lambda: all(told(client) > 5 for client in clients))
    world.store_away(3.0, empty=empty)
    late = ask(world, seed=4)
    await end(*clients, late)
    finished(*clients, late)
    await asyncio.sleep(4.0)
    assert not world.checks.open_records(), world.checks.open_records()


@scenario(BOTH)
async def a_resumable_request_outlives_a_store_that_comes_back_empty(world: World) -> None:
    client = ask(world, max_tokens=200, prompt=(MARK, 200, 1), window_s=30.0, others=("g1", "g2"))
    await until(lambda: told(client) > 5)
    world.store_away(1.5, empty=True)
    await end(client)
    finished(client)


@scenario(SLOW_STEPS)
async def keys_outlive_a_store_that_comes_back_empty(world: World) -> None:
    """No key is taken before owners have told the store again; then one in use leads to its request, and new ones are
    taken."""
    first = ask(world, key="k", others=("g1", "g2"), **HALF_A_MINUTE)
    await until(lambda: told(first) > 5)
    world.store_away(0.5, empty=True)
    await asyncio.sleep(0.6)
    early = ask(world, key="k", gateway="g2", others=("g2",), **HALF_A_MINUTE)
    new = ask(world, key="new", gateway="g2", others=("g2",), seed=9, max_tokens=5)
    await asyncio.sleep(17.0)
    late = ask(world, key="k", gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await end(first, early, new, late)
    finished(first, early, new, late)
    assert len({client.request_id for client in (first, early, late)}) == 1, "INV-11: one key, two requests"
    assert early.refusals > 3, "a key was taken that may have been in use"
    assert new.ended - new.began < 25.0, "new keys are refused for too long"


@scenario(SLOW_STEPS, **each((0.0, 0.2, 0.4, 0.6, 0.8)))
async def a_gateway_starts_when_the_store_has_just_lost_everything(world: World, after_s: float) -> None:
    """It never saw the store as it was, and knows all the same that owners are still to say what they have."""
    first = ask(world, key="k", window_s=60.0, others=("g1",), **HALF_A_MINUTE)
    await until(lambda: told(first) > 5)
    world.kill("g2", again_s=1.1 + after_s)  # the others have looked by then
    owner = world.nodes["g1"].link
    assert owner is not None
    owner.slow_s = 0.1
    world.store_away(0.5, empty=True)
    await until(lambda: world.nodes["g2"].up)
    back = ask(world, resumes=first.request_id, window_s=60.0, gateway="g2", others=("g2",), **HALF_A_MINUTE)
    second = ask(world, key="k", window_s=60.0, gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await end(first, back, second)
    finished(first, back, second)
    assert second.request_id == first.request_id, "INV-11: one key, two requests"


@scenario(SLOW_STEPS, **each((0.0, 0.1, 0.2, 0.3, 0.4)))
async def the_store_is_emptied_between_two_looks_at_it(world: World, after_s: float) -> None:
    """Nobody saw it go: whoever misses something there looks again before believing it."""
    first = ask(world, key="k", others=("g2",), breaks_s=1.0, **HALF_A_MINUTE)
    await until(lambda: first.returns and told(first) > 5)
    await asyncio.sleep(1.0 + after_s)
    world.did("the store is emptied")
    world.redis.empty()
    back = ask(world, resumes=first.request_id, window_s=30.0, gateway="g2", others=("g2",), **HALF_A_MINUTE)
    second = ask(world, key="k", gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await end(first, back, second)
    finished(first, back, second)
    assert second.request_id == first.request_id, "INV-11: one key, two requests"


@scenario(SLOW_STEPS, **each((0.1, 0.5, 1.0)))
async def the_store_comes_back_with_what_it_had_a_moment_before(world: World, lost_s: float) -> None:
    """What was kept and told since then is gone: its owner tells it again, and whoever reads it then finds no hole."""
    client = ask(world, window_s=60.0, others=("g1", "g2"), **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    saved = world.redis.saved()
    await asyncio.sleep(lost_s)
    world.store_away(0.5, saved=saved)
    await asyncio.sleep(3.0)
    far = told(client)
    whole = ask(world, resumes=client.request_id, window_s=60.0, gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await until(lambda: told(whole) >= far, 5.0)
    world.kill("g1", again_s=None)
    await end(client, whole)
    finished(client, whole)


@scenario(SLOW_STEPS, **each((0.1, 0.5, 1.0)))
async def the_store_comes_back_with_less_than_was_told_and_without_the_owner(world: World, lost_s: float) -> None:
    """Nobody knows what the client has read: it is generated again, and its client waits for that."""
    client = ask(world, window_s=60.0, others=("g2",), **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    saved = world.redis.saved()
    await asyncio.sleep(lost_s)
    world.store_away(0.5, saved=saved)
    world.kill("g1", again_s=None)
    await end(client)
    finished(client)
    assert client.returns


@scenario(SLOW_STEPS, **each((0.0, 0.2, 5.0)))
async def a_request_ends_and_then_the_store_is_emptied(world: World, after_s: float) -> None:
    """Its owner has nothing more to write, and tells it all the same."""
    client = ask(world, window_s=60.0, others=("g2",), breaks_s=0.5, gateway="g1", max_tokens=30)
    key = ask(world, key="k", gateway="g1", max_tokens=30)
    await until(lambda: client.request_id)
    await until(lambda: not world.nodes["g1"].parts.core.table.busy)
    await asyncio.sleep(after_s)
    world.store_away(0.5, empty=True)
    late = ask(world, resumes=client.request_id, window_s=60.0, gateway="g2", others=("g2",), max_tokens=30)
    again = ask(world, key="k", gateway="g2", others=("g2",), max_tokens=30)
    await end(client, key, late, again)
    finished(client, key, late, again)
    assert again.request_id == key.request_id, "INV-11: one key, two requests"


@scenario(SLOW_STEPS)
async def a_follower_tells_what_its_owner_does_not_know_to_be_kept(world: World) -> None:
    """Appends arrive and their answers do not: a client reads them elsewhere, and comes back to the owner."""
    client = ask(world, window_s=60.0, others=("g2", "g1"), **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    owner = world.nodes["g1"].link
    assert owner is not None
    owner.deaf = True
    before = told(client)
    await until(lambda: client.returns and told(client) > before)
    world.cut("g2", "store", 4.0)
    await asyncio.sleep(3.0)
    owner.deaf = False
    await end(client)
    finished(client)


@scenario(BOTH)
async def the_store_forgets_its_scripts_again_and_again(world: World) -> None:
    """Between being given one and being asked for it, too."""
    clients = [
        ask(world, seed=seed, gateway=gateway, window_s=30.0, others=("g1", "g2"), max_tokens=200)
        for gateway in ("g1", "g2") for seed in range(3)
    ]  # fmt: skip
    for _ in range(2000):
        world.redis.forget_scripts()
        await asyncio.sleep(0.001)
    await end(*clients)
    finished(*clients)


@scenario(SLOW_STEPS)
async def a_key_was_taken_while_its_owner_was_cut_off_from_a_store_that_forgot_it(world: World) -> None:
    """The key decides: its first request, which nobody could know, is given up when its owner comes back."""
    first = ask(world, key="k", others=("g1",), **HALF_A_MINUTE)
    await until(lambda: told(first) > 5)
    world.cut("g1", "store", 20.0)
    world.store_away(0.5, empty=True)
    await asyncio.sleep(17.0)
    second = ask(world, key="k", gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await end(first, second)
    finished(second)
    assert first.outcome in (Reason.REQUEST_UNKNOWN.value, Reason.OWNER_MOVED.value), f"it ended {first.outcome}"
    kept = world.redis.keys("tl:out:")
    assert kept == [f"tl:out:{{{second.request_id}}}"], f"INV-11: one key, and outputs of {kept}"


# Take-over.


@scenario(BOTH, **each((1, 10, 40)))
async def a_gateway_dies_and_another_takes_over(world: World, tokens: int) -> None:
    client = ask(world, window_s=30.0, others=("g1", "g2"))
    await until(lambda: told(client) >= tokens)
    world.kill("g1", again_s=None)
    await end(client)
    finished(client)
    assert client.returns


@scenario(Plan(gateways=2, routers=1, workers=2, other_tokens=True), **each((1, 10, 40)))
async def gateway_and_worker_die_together_and_the_next_draws_other_tokens(world: World, tokens: int) -> None:
    """What the client has is what the store has: nothing else may be told."""
    client = ask(world, window_s=30.0, others=("g1", "g2"))
    await until(lambda: told(client) >= tokens)
    (name,) = holders(world)
    world.kill("g1", again_s=None)
    await asyncio.sleep(0.03)
    world.kill(name)
    await end(client)
    finished(client)


@scenario(Plan(gateways=2, routers=1, workers=2, other_tokens=True), store_slow=0.15, store_quick=0.0)
async def deltas_are_told_only_when_they_are_kept(world: World, slow_s: float) -> None:
    """The store answers late: gateway and worker die while appends are under way."""
    client = ask(world, window_s=30.0, others=("g1", "g2"))
    link = world.nodes["g1"].link
    assert link is not None
    link.slow_s = slow_s
    await until(lambda: told(client) >= 10)
    (name,) = holders(world)
    link.cut = True
    await asyncio.sleep(0.2)
    world.kill("g1", again_s=None)
    world.kill(name)
    await end(client)
    finished(client)


@scenario(
    Plan(gateways=2, routers=1, workers=2, other_tokens=True, shape=Shape(step_s=0.06)),
    from_all=True,
    from_the_store=False,
)
async def one_of_two_gateways_is_partitioned(world: World, everything: bool) -> None:
    """It goes on and may not say so: the other one owns the request once the lease has lapsed."""
    client = ask(world, max_tokens=400, prompt=(MARK, 290, 1), window_s=30.0, others=("g1", "g2"))
    await until(lambda: told(client) > 10)
    world.cut("g1", "store", 9.0)
    if everything:
        for other in ("r1", "w1", "w2", "g2"):
            world.cut("g1", other, 9.0)
        world.cut("g1", "c1", 9.0)
    world.reset("g1", "c1")
    await end(client)
    finished(client)


@scenario(SLOW_STEPS)
async def a_store_that_comes_back_empty_hears_nothing_of_former_owners(world: World) -> None:
    """It was taken over, and ended there: for the gateway that was robbed it must be over too."""
    client = ask(world, window_s=30.0, others=("g2",), **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    world.cut("g1", "store", 8.0)
    await end(client)
    finished(client)
    assert client.returns, "it was not taken over"
    await asyncio.sleep(KEEP_S + 1.0)  # nobody tells the store of it again
    world.store_away(0.5, empty=True)
    await asyncio.sleep(4.0)
    assert not world.checks.open_records(), world.checks.open_records()


@scenario(BOTH)
async def a_live_owner_is_followed_and_not_robbed(world: World) -> None:
    client = ask(world, max_tokens=400, prompt=(MARK, 290, 1), window_s=30.0, others=("g1", "g2"), breaks_s=0.3)
    await until(lambda: client.returns)
    await asyncio.sleep(1.0)
    assert not client.ended
    assert not any(len(parts.core.table) for parts in world.living("gateway")[1:]), "the owner was robbed"
    await end(client)
    finished(client)


@scenario(Plan(gateways=2, routers=1, workers=2, other_tokens=True), **each((0.02, 0.3, 0.8)))
async def a_key_is_used_again_while_its_gateway_dies(world: World, after_s: float) -> None:
    first = ask(world, key="k", others=("g1", "g2"))
    await asyncio.sleep(after_s)
    world.kill("g1")
    second = ask(world, key="k", gateway="g2", others=("g2", "g1"))
    await end(first, second)
    assert first.outcome in (FINISHED, BROKEN)
    finished(second)
    if first.outcome == FINISHED:
        assert first.said.ids == second.said.ids, "INV-11: one key, two transcripts"
