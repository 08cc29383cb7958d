"""Scenes of rules that no race touches: one for each sentence of the wire that would otherwise be taken on trust.

The one rule: as for races; what is looked at is named by the sentence that it proves.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from shared.errors import Reason
from shared.ids import Identity
from tests.sim.clients import FINISHED, LENGTH, Client
from tests.sim.engine import MARK, Shape
from tests.sim.loop import Process
from tests.sim.net import ARRIVES, Fate, Passing, SimChannels
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
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

# Submissions.


@scenario(SMALL)
async def a_seed_is_drawn_once(world: World) -> None:
    tap = Tap(world)
    client = ask(world, seedless=True)
    await until(lambda: told(client) >= 10)
    world.kill(holders(world)[0])
    await end(client)
    finished(client)
    seeds = {item.generate.sampling.seed for _, item in tap.batches}
    assert len(tap.batches) == 2
    assert len(seeds) == 1, "a later attempt has another seed"
    client.ask = replace(client.ask, seed=seeds.pop())


@scenario(SMALL)
async def a_submit_fails_after_its_request_was_opened(world: World) -> None:
    """Its outcome is unknown to the router; the gateway knows better."""
    lost: list[Passing] = []

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "message", "w") and not lost:
            lost.append(passing)
            return Fate(reset_before=True)
        return Fate(late_s=0.2) if passes(passing, "Submit", "status", "r") else ARRIVES

    await meet(world)
    Tap(world, fate)
    client = ask(world)
    await end(client)
    finished(client)
    assert lost
    assert retries(world) == 0, "what the call came to counted though its request was opened"


@scenario(ONE)
async def the_answer_of_a_submit_is_lost(world: World) -> None:
    """No call is repeated by the transport: the next attempt has a number of its own."""

    def fate(passing: Passing, number: int) -> Fate:
        return Fate(reset_before=passes(passing, "Submit", "message", "r") and number == 1)

    tap = Tap(world, fate)
    client = ask(world)
    await end(client)
    finished(client)
    assert len(tap.batches) == 2
    assert tap.dispatched_once, "an attempt was submitted twice"


@scenario(Plan(gateways=1, routers=2, workers=1, max_requests=2))
async def a_worker_that_refused_is_left_alone_until_it_reports(world: World) -> None:
    """Two routers fill it up; what it rejects keeps its place and its attempt. Its reports are slow."""
    tap = Tap(world, lambda passing, _: Fate(late_s=0.4) if passes(passing, "Watch", "message", "w") else ARRIVES)
    clients = [ask(world, seed=seed) for seed in range(10)]
    await end(*clients)
    finished(*clients)
    rejected = [result for _, result in tap.answers if result.HasField("rejected")]
    assert rejected, "it was never too much"
    assert retries(world) == 0, "a rejected item lost its attempt"
    assert len(tap.batches) < 30, f"{len(tap.batches)} submissions of {len(clients)} requests"


# Fences.


def _first_batch_never_arrives(world: World, copy_after_s: float | None = None) -> Tap:
    """Nobody knows, and attempt 2 runs at the other worker; a copy of the first may come there after all."""

    def fate(passing: Passing, number: int) -> Fate:
        if not (passes(passing, "SubmitBatch", "call", "r") and number == 1):
            return ARRIVES
        other = "w2:1" if passing.target == "w1" else "w1:1"
        return Fate(copies=((other, copy_after_s),) if copy_after_s else (), reset_before=True)

    return Tap(world, fate)


@scenario(SMALL)
async def a_batch_comes_when_a_later_attempt_runs(world: World) -> None:
    await meet(world)
    tap = _first_batch_never_arrives(world, copy_after_s=0.4)
    client = ask(world)
    await end(client)
    finished(client)
    assert [item.attempt for _, item in tap.batches] == [1, 2], "an earlier attempt took over"


@scenario(SMALL)
async def a_cancel_of_an_earlier_attempt_comes_late(world: World) -> None:
    """It acts on what is not later than itself; of what is not known it is acknowledged."""
    tap = _first_batch_never_arrives(world)
    client = ask(world)
    await until(lambda: told(client) > 5)
    router = Process(world.loop, "r9")
    channel = SimChannels(world.net, router, Identity("router", "r9", 9)).get(f"{holders(world)[0]}:1")
    cancel = worker_pb2_grpc.WorkerServiceStub(channel).Cancel  # type: ignore[no-untyped-call]

    async def late() -> None:
        for request_id in (bytes.fromhex(client.request_id), b"x" * 16):
            await cancel(worker_pb2.CancelRequest(request_id=request_id, epoch=1, attempt=1), timeout=1.0)

    await router.spawn(late())
    await end(client)
    finished(client)
    assert [item.attempt for _, item in tap.batches] == [1, 2], "an earlier attempt's cancel ended a later one"


@scenario(Plan(gateways=1, routers=1, workers=2, other_tokens=True))
async def a_copy_that_drew_other_tokens_is_not_adopted(world: World) -> None:
    """The worker that is asked next has run a duplicate: its tokens do not join on to the transcript."""

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "SubmitBatch", "call", "r") and number == 1:
            return Fate(copies=(("w2:1" if passing.target == "w1" else "w1:1", 0.0),))
        return ARRIVES

    tap = Tap(world, fate)
    client = ask(world)
    await until(lambda: told(client) >= 20)
    world.kill(tap.batches[0][0])
    await end(client)
    finished(client)


@scenario(Plan(gateways=2, routers=1, workers=2, shape=Shape(step_s=0.06)))
async def a_former_owner_hears_that_it_is_fenced(world: World) -> None:
    fenced: list[Passing] = []

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "Outputs", "message", "w") and passing.target == "g1":
            batch = worker_pb2.OutputsResponse.FromString(passing.data).batch
            fenced.extend(passing for event in batch.events if event.HasField("fenced"))
        return ARRIVES

    Tap(world, fate)
    client = ask(world, max_tokens=400, prompt=(MARK, 290, 1), window_s=30.0, others=("g2",))
    await until(lambda: told(client) > 10)
    world.cut("g1", "store", 9.0)
    await end(client)
    finished(client)
    assert fenced, "its events just stopped"


# Outputs.


@scenario(ONE)
async def a_cancel_is_lost_with_its_stream(world: World) -> None:
    """The next Hello does not list the request: that cancels it."""
    lost: list[Passing] = []

    def fate(passing: Passing, number: int) -> Fate:
        if lost or not passes(passing, "Outputs", "message", "g"):
            return ARRIVES
        if not worker_pb2.OutputsRequest.FromString(passing.data).HasField("cancel"):
            return ARRIVES
        lost.append(passing)
        return Fate(reset_before=True)

    Tap(world, fate)
    client = ask(world, leaves_s=0.5, max_tokens=400, prompt=(MARK, 290, 1))
    await end(client)
    await asyncio.sleep(0.5)
    assert lost
    assert not holders(world), "what a Hello leaves out goes on"


@scenario(SLOW_STEPS)
async def what_a_dead_gateway_ran_ends_with_the_grace(world: World) -> None:
    client = ask(world, **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    world.kill("g1", again_s=None)
    await end(client)
    await asyncio.sleep(9.0)
    assert holders(world), "it was not waited for"
    await asyncio.sleep(2.5)
    assert not holders(world), "orphans are kept"


@scenario(replace(SLOW_STEPS, gateways=1))
async def a_gateway_comes_back_to_what_its_worker_has_dropped(world: World) -> None:
    """It lists what the worker does not hold any more, hears so at once, and submits it again."""
    client = ask(world, **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    (name,) = holders(world)
    world.stop("g1", 12.0)
    world.reset("g1", name)
    await asyncio.sleep(12.0)
    await until(lambda: retries(world), within_s=1.0)
    await end(client)
    finished(client)


@scenario(ONE)
async def a_cancel_is_confirmed_when_the_engine_has_let_go(world: World) -> None:
    client = ask(world, client_id="mine", max_tokens=400, prompt=(MARK, 290, 1))
    await until(lambda: told(client) > 2)
    keeper = world.nodes["w1"].parts.supervisor
    keeper.engine.slow = 80.0
    await asyncio.sleep(0.1)
    canceller = Client(world, replace(client.ask, cancels_s=0.0), 99)
    began = world.loop.now
    await cancelled_by(world, canceller)
    assert canceller.confirmed
    assert not keeper.engine.scheduler.requests, "it was confirmed, and the engine runs it"
    assert world.loop.now - began < 2.0
    await end(client)
    assert client.outcome == Reason.CLIENT_CANCEL.value


@scenario(Plan(gateways=1, routers=1, workers=1, shape=Shape(step_s=0.001)))
async def a_stop_string_comes_with_the_end_of_its_choice(world: World) -> None:
    """The stream breaks, and the next one brings whole choices in one run: the earlier end counts."""
    Tap(world, lambda passing, number: Fate(reset_before=passes(passing, "Outputs", "message", "w") and number < 6))
    clients = [ask(world, seed=seed, stops=("e", "a", "o", "i"), prompt=(MARK, 6, 7, 9), max_tokens=20, choices=2)
               for seed in range(30)]  # fmt: skip
    await end(*clients)
    finished(*clients)


@scenario(Plan(gateways=1, routers=1, workers=1, shape=Shape(step_s=0.001)))
async def tokens_of_many_steps_travel_together(world: World) -> None:
    tap = Tap(world)
    began = world.loop.now
    clients = [ask(world, seed=seed, max_tokens=400, prompt=(MARK, 290, seed)) for seed in range(4)]
    await end(*clients)
    finished(*clients)
    messages, steps = tap.counts["Outputs", "message", "w"], world.nodes["w1"].parts.supervisor.engine.engine.steps
    most = 20 + (world.loop.now - began) / 0.005
    assert messages < most < steps, f"{messages} messages for {steps} steps"


# Who lives.


@scenario(SMALL)
async def a_suspect_gets_no_new_work(world: World) -> None:
    busy = [ask(world, seed=seed, max_tokens=400, prompt=(MARK, 290, 1)) for seed in range(4)]
    await until(lambda: len(holders(world)) == 2)
    await asyncio.sleep(0.1)
    tap = Tap(world)
    world.cut("r1", "w1", 3.0)
    await asyncio.sleep(1.9)
    clients = [ask(world, seed=seed, max_tokens=10) for seed in range(6)]
    await end(*busy, *clients)
    finished(*busy, *clients)
    assert {name for name, _ in tap.batches} == {"w2"}, "a worker that has not been heard of got work"


@scenario(SMALL)
async def a_worker_that_is_not_reached_again_is_lost_in_a_second(world: World) -> None:
    client = ask(world)
    await until(lambda: told(client) > 10)
    (name,) = holders(world)
    for other in ("g1", "r1"):
        world.cut(other, name, 20.0)
        world.reset(other, name)
    began = world.loop.now
    await end(client)
    finished(client)
    assert world.loop.now - began < 3.0, "a broken stream was waited for"


@scenario(ONE)
async def streams_that_nobody_needs_are_closed(world: World) -> None:
    links = world.nodes["g1"].parts.core.links
    assert links.open_streams == 0, "a stream was opened before its first use"
    first = ask(world)
    await end(first)
    assert links.open_streams == 1
    await asyncio.sleep(62.0)
    assert links.open_streams == 0, "a stream was kept that nobody needs"
    second = ask(world)
    await end(second)
    finished(first, second)


# What ends a request.


@scenario(Plan(gateways=1, routers=1, workers=2, limits={"moves_burst": 1, "moves_per_s": 1}))
async def moves_have_a_budget(world: World) -> None:
    clients = [ask(world, seed=seed) for seed in range(6)]
    await until(lambda: all(told(client) > 5 for client in clients))
    world.kill("w1")
    await end(*clients)
    outcomes = [client.outcome for client in clients]
    assert outcomes.count(Reason.WORKER_LOST.value) >= 1, "more was moved than the budget has"
    assert outcomes.count(FINISHED) + outcomes.count(Reason.WORKER_LOST.value) == len(clients)


@scenario(ONE)
async def the_last_replica_drains_by_finishing(world: World) -> None:
    client = ask(world, max_tokens=100, prompt=(MARK, 100, 1))
    await until(lambda: told(client) > 10)
    parts = world.nodes["w1"].parts
    world.did("drain w1 with release")
    world.nodes["w1"].up = False
    world.nodes["w1"].process.soon(parts.drain.ask, worker_pb2.DrainRequest(release=True))
    await end(client)
    finished(client)
    assert retries(world) == 0, "it was handed back, to nobody"


@scenario(replace(ONE, new_versions=True), before_it_began=0, after_it_began=10)
async def a_version_goes(world: World, tokens: int) -> None:
    """Its only worker comes back with another one."""
    client = ask(world)
    if tokens:
        await until(lambda: told(client) >= tokens)
    world.kill("w1")
    if not tokens:
        await asyncio.sleep(0.1)
    await end(client)
    if tokens:
        assert client.outcome == Reason.VERSION_GONE.value, f"it ended {client.outcome}"
    else:
        finished(client)


@scenario(ONE)
async def tenants_do_not_share_a_cache(world: World) -> None:
    prompt = (*range(1, 41), 7)
    clients = []
    for tenant in "aab":
        clients.append(ask(world, tenant=tenant, prompt=prompt, max_tokens=2))
        await end(clients[-1])
    finished(*clients)
    cached = [client.said.finished.usage.cached_tokens for client in clients if client.said.finished]
    assert cached == [0, 32, 0], f"cached tokens: {cached}"


@scenario(BOTH, **each(range(1, 9)))
async def embeddings_are_reset_at_a_message(world: World, number: int) -> None:
    """Pieces are told again from where they were acknowledged; the call is answered once, whole."""

    def fate(passing: Passing, seen: int) -> Fate:
        return Fate(reset_before=passes(passing, "Outputs", "message", "w") and seen == number)

    Tap(world, fate)
    inputs = tuple(tuple(range(first, first + 30)) for first in range(12))
    clients = [ask(world, embeds=inputs, gateway=gateway) for gateway in ("g1", "g2")]
    await end(*clients)
    finished(*clients)
    assert retries(world) == 0, "a broken stream is not a lost worker"


@scenario(replace(SMALL, other_tokens=True), **each((1, 2, 4, 7)))
async def a_worker_is_killed_while_it_embeds(world: World, step: int) -> None:
    """What was there of it is worth nothing at the next one: it is done again, whole."""
    inputs = tuple(tuple(range(first, first + 60)) for first in range(8))
    client = ask(world, embeds=inputs)
    await until(lambda: holders(world))
    (name,) = holders(world)
    engine = world.nodes[name].parts.supervisor.engine
    await until(lambda: engine.engine.steps >= step or client.ended)
    world.kill(name)
    await end(client)
    finished(client)
    assert retries(world) == 1


# Owners.


@scenario(ONE)
async def an_ordinary_request_is_written_three_times(world: World) -> None:
    """When it is admitted, when a worker has it, and at its end."""
    writes: list[str] = []
    script = world.redis.script

    def counted(sha: str, text: str | None, keys: list[str], args: list[str]) -> object:
        writes.extend(key for key in keys if key.startswith("tl:req:"))
        return script(sha, text, keys, args)

    world.redis.script = counted  # type: ignore[method-assign]
    client = ask(world, choices=2)
    await end(client)
    finished(client)
    await asyncio.sleep(0.5)
    assert len(set(writes)) == 1
    assert len(writes) == 3, f"its record was written {len(writes)} times"


@scenario(BOTH)
async def a_resumable_stream_moves_while_the_store_is_away(world: World) -> None:
    resumable = ask(world, window_s=30.0, others=("g1", "g2"), **HALF_A_MINUTE)
    ordinary = ask(world, seed=2, **HALF_A_MINUTE)
    await until(lambda: told(resumable) > 5)
    world.store_away(6.0, empty=False)
    await until(lambda: resumable.returns, within_s=1.5)
    await end(resumable, ordinary)
    finished(resumable, ordinary)
    assert ordinary.ended < resumable.ended, "it waited for the store"


@scenario(BOTH)
async def an_ordinary_request_outlasts_the_drain_of_its_gateway(world: World) -> None:
    client = ask(world, **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    world.drain("g1")
    await end(client)
    finished(client)


@scenario(SLOW_STEPS)
async def a_robbed_owner_submits_nothing(world: World) -> None:
    """Its worker dies when it has lost the request and cannot know: it has to ask the store before it goes on."""
    client = ask(world, window_s=30.0, others=("g2",), **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    tap = Tap(world)
    world.cut("g1", "store", 25.0)
    await until(lambda: any(item.epoch == 2 for _, item in tap.batches), 15.0)
    await asyncio.sleep(1.0)
    for name in holders(world):
        world.kill(name)
    await end(client)
    finished(client)
    again = [item.attempt for _, item in tap.batches if item.epoch == 1]
    assert not again, f"a former owner submitted attempts {again}"


@scenario(Plan(gateways=2, routers=1, workers=1, max_requests=1, shape=Shape(step_s=0.1)))
async def a_live_owner_whose_request_waits_is_not_robbed(world: World) -> None:
    """Nothing is appended for longer than a lease."""
    first = ask(world, max_tokens=100, prompt=(MARK, 100, 1))
    await until(lambda: told(first) > 2)
    second = ask(world, seed=2, max_tokens=5, key="k", others=("g1",))
    await asyncio.sleep(0.3)
    third = ask(world, seed=2, max_tokens=5, key="k", gateway="g2", others=("g2",))
    await asyncio.sleep(8.0)
    assert not first.ended
    assert not third.ended
    assert not len(world.nodes["g2"].parts.core.table), "a live owner was robbed"
    await end(first, second, third)
    finished(first, second, third)


@scenario(SLOW_STEPS)
async def what_a_dead_gateway_left_is_swept(world: World) -> None:
    """An ordinary request, and a resumable one to which nobody comes back."""
    clients = [ask(world, **HALF_A_MINUTE), ask(world, window_s=4.0, seed=2, leaves_s=1.0, **HALF_A_MINUTE)]
    await until(lambda: all(told(client) > 5 for client in clients))
    await asyncio.sleep(1.0)
    world.kill("g1", again_s=None)
    await end(*clients)
    await asyncio.sleep(12.0)
    assert len(world.checks.open_records()) >= 1, "it was given up before its owner could be called gone"
    await asyncio.sleep(8.0)
    assert not world.checks.open_records(), world.checks.open_records()
    assert not world.checks.limits_left(), world.checks.limits_left()
    assert len(world.redis._data["tl:owners"]) == 1, "an owner is kept that owns nothing"


@scenario(SLOW_STEPS)
async def a_parked_request_waits_for_its_window(world: World) -> None:
    """Its client comes back when its gateway has been swept."""
    first = ask(world, window_s=30.0, leaves_s=2.0, **HALF_A_MINUTE)
    await until(lambda: told(first) > 5)
    world.kill("g1", again_s=None)
    await end(first)
    await asyncio.sleep(20.0)
    back = ask(world, resumes=first.request_id, window_s=30.0, gateway="g2", others=("g2",), **HALF_A_MINUTE)
    await end(back)
    finished(back)


@scenario(SLOW_STEPS)
async def an_owner_that_stood_still_keeps_its_ordinary_requests(world: World) -> None:
    client = ask(world, **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    world.stop("g1", 12.0)
    await end(client)
    finished(client)
    await asyncio.sleep(0.5)
    record = world.redis._data[f"tl:req:{{{client.said.started.request_id}}}"]  # type: ignore[union-attr]
    assert record["state"] == FINISHED, f"the record says {record['state']} {record['reason']}"


@scenario(BOTH)
async def reservations_go_back(world: World) -> None:
    clients = [ask(world, seed=seed, gateway=f"g{1 + seed % 2}", leaves_s=0.4 if seed % 3 else None)
               for seed in range(9)]  # fmt: skip
    await end(*clients)
    await asyncio.sleep(0.5)
    assert not world.checks.limits_left(), world.checks.limits_left()
    fields = world.redis._data["tl:lim:{a}"]
    held = {name: value for name, value in fields.items() if name.startswith("n:")}
    assert set(held.values()) == {"0"}, f"requests held: {held}"


@scenario(Plan(gateways=2, routers=1, workers=2, concurrency=1))
async def an_expired_reservation_ends_in_the_next_admission(world: World) -> None:
    """Its gateway is gone, and it is too early to sweep."""
    first = ask(world, deadline_s=3.0, max_tokens=400, prompt=(MARK, 290, 1))
    await until(lambda: told(first) > 5)
    world.kill("g1", again_s=None)
    await asyncio.sleep(1.0)
    early = ask(world, gateway="g2")
    await asyncio.sleep(4.0)
    late = ask(world, gateway="g2")
    await end(first, early, late)
    assert early.outcome == Reason.CONCURRENCY.value, f"it ended {early.outcome}"
    finished(late)


@scenario(SLOW_STEPS)
async def a_late_word_of_a_former_owner_changes_no_record(world: World) -> None:
    """What it could not write is written when the request has ended elsewhere."""
    client = ask(world, window_s=30.0, others=("g2",), **HALF_A_MINUTE)
    link = world.nodes["g1"].link
    assert link is not None
    await until(lambda: told(client) > 2)
    link.cut = True
    request = world.nodes["g1"].parts.core.table.live(client.request_id)
    request._move(request.state)
    await end(client)
    finished(client)
    link.cut = False
    await asyncio.sleep(3.0)
    record = world.redis._data[f"tl:req:{{{client.request_id}}}"]
    assert (record["state"], record["gateway"]) == (FINISHED, "g2"), f"{record['state']} of {record['gateway']}"


@scenario(SLOW_STEPS)
async def a_gateway_drains_and_another_goes_on(world: World) -> None:
    client = ask(world, window_s=30.0, others=("g2", "g2"), **HALF_A_MINUTE)
    await until(lambda: told(client) > 5)
    world.drain("g1")
    await until(lambda: any(len(parts.core.table) for parts in world.living("gateway")[1:]), 24.0)
    taken = told(client)
    assert taken < 280
    await end(client)
    finished(client)


@scenario(Plan(gateways=1, routers=1, workers=1, shape=Shape(step_s=0.2, blocks=200)), resumable=90.0, ordinary=0.0)
async def a_client_takes_nothing(world: World, window_s: float) -> None:
    """More waits for it than fits on the way: it is sent away, and comes back, or its request is cancelled."""
    prompt = (MARK, *(290 for _ in range(7)), 1)
    client = ask(
        world, window_s=window_s, choices=7, max_tokens=400, prompt=prompt, dozes_s=55.0, deadline_s=120.0
    )  # fmt: skip
    await until(lambda: client.dozed)
    (request,) = world.nodes["g1"].parts.core.table
    await end(client)
    if window_s:
        assert client.returns == 1, "it was waited for"
        finished(client)
    else:
        assert client.outcome == Reason.SLOW_READER.value, f"it ended {client.outcome}"
        assert request.error is not None, "its request went on"
    await asyncio.sleep(0.5)
    assert not holders(world)


@scenario(SMALL)
async def an_end_travels_with_the_last_token(world: World) -> None:
    alone: list[int] = []

    def fate(passing: Passing, number: int) -> Fate:
        if passes(passing, "Outputs", "message", "w"):
            batch = worker_pb2.OutputsResponse.FromString(passing.data).batch
            ends = zip(batch.finish, batch.count, strict=True)
            alone.extend(finish for finish, count in ends if finish == LENGTH and not count)
        return ARRIVES

    Tap(world, fate)
    clients = [ask(world, seed=seed, max_tokens=20, choices=2) for seed in range(4)]
    await end(*clients)
    finished(*clients)
    assert not alone, "an end came after the last token"
