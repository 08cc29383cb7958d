"""A gateway against streams that break, workers and routers that die, and messages that come twice, late or not at all.

Whatever happens: a choice's text is the undisturbed text, or the stream ends with a typed error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from shared.errors import Reason, TrunklineError
from tests.fakes import mesh as fake
from tests.fakes.gateway_client import (
    TOKENIZER,
    Client,
    Said,
    expected,
    first_token,
    rest,
    serving,
    spec,
    until,
    world,
)
from tests.fakes.mesh import FakeRouter, MeshWorker, RouterDies, fails_with, fake_mesh
from tests.fakes.valkey import Valkey
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.worker.v1 import worker_pb2

PROMPT = (5, 6, 7)
LENGTHS = (2, 20, 60)
WHOLE = {choice: expected(PROMPT, choice, length) for choice, length in enumerate(LENGTHS)}
STOP = common_pb2.FINISH_REASON_STOP


def assert_whole(said: Said) -> None:
    assert said.texts == WHOLE
    assert set(said.finishes.values()) == {STOP}
    assert said.finished is not None
    assert said.finished.usage.completion_tokens == sum(LENGTHS)
    receipt = said.finished.receipt
    parts = (
        receipt.admit_ms, receipt.tokenise_ms, receipt.router_queue_ms, receipt.dispatch_ms, receipt.worker_queue_ms,
        receipt.prefill_ms, receipt.decode_ms, receipt.detokenise_ms, receipt.client_wait_ms,
        receipt.lost_attempts_ms, receipt.unattributed_ms,
    )  # fmt: skip
    assert abs(sum(parts) - receipt.total_ms) < 1e-6


# --- streams that break ---------------------------------------------------------------------------------------------


async def each_with_a_worker_of_its_own(
    client: Client,
    router: FakeRouter,
    others: list[MeshWorker],
    numbers: Iterable[int],
    harm: Callable[[MeshWorker, int], None],
) -> list[Said]:
    """Streams of prompts (number, 6, 7), each at a worker that `harm` prepares, ten at a time; they must be whole."""
    workers = {number: MeshWorker(f"own{number}", lengths=LENGTHS) for number in numbers}
    router.place = lambda request: [workers[request.submission.generate.prompt[0]], *others]
    room = asyncio.Semaphore(10)

    async def one(number: int, worker: MeshWorker) -> Said:
        async with room, worker:
            harm(worker, number)
            said = await client.stream(spec((number, 6, 7), n=3))
            worker.resets.clear()  # a run that coalesced has fewer messages
        whole = {choice: expected((number, 6, 7), choice, length) for choice, length in enumerate(LENGTHS)}
        assert said.texts == whole, f"the text differs in run {number}"
        return said

    return await asyncio.gather(*(one(number, worker) for number, worker in workers.items()))


async def test_a_stream_reset_after_any_message_costs_nothing_but_time(redis_url: str, tmp_path: Path) -> None:
    def reset(worker: MeshWorker, number: int) -> None:
        worker.resets = {number}

    async with world(redis_url, tmp_path) as (client, (router,), _):
        all_said = await each_with_a_worker_of_its_own(client, router, [], range(1, max(LENGTHS) + 3), reset)
        assert all(said.finished is not None and said.finished.receipt.attempts == 1 for said in all_said)


async def test_a_stream_reset_after_every_message_costs_nothing_but_time(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": LENGTHS, "step_s": 0.003}) as (client, _, (worker,)):
        worker.resets = set(range(1, 1000))
        assert_whole(await client.stream(spec(PROMPT, n=3)))
        assert len(worker.hellos) > 5
        worker.resets.clear()


async def test_hello_says_what_is_held_and_what_is_pending(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (10**6,) * 2}) as (client, (router,), (worker,)):
        call = client.generate(spec(PROMPT, n=2))
        await first_token(call)
        router.before.append(lambda _request: asyncio.sleep(30))
        waiting = client.generate(spec(PROMPT))
        await until(lambda: len(router.requests) == 2)
        worker.break_streams()
        await until(lambda: len(worker.hellos) == 2)
        hello = worker.hellos[1]
        assert [(each.request_id, each.epoch, each.attempt) for each in hello.held] == [(*worker.held, 1, 1)]
        assert [place.choice for place in hello.held[0].next] == [0, 1]
        assert all(place.index > 0 for place in hello.held[0].next)
        assert [each.request_id for each in hello.pending] == [router.requests[1].submission.request_id]
        assert hello.stream_generation > worker.hellos[0].stream_generation
        call.cancel()
        waiting.cancel()


async def test_runs_that_come_twice_are_taken_once(redis_url: str, tmp_path: Path) -> None:
    def twice(batch: worker_pb2.OutputBatch) -> list[worker_pb2.OutputBatch]:
        again = worker_pb2.OutputBatch()
        again.CopyFrom(batch)
        del again.opened[:], again.events[:]
        first = worker_pb2.OutputBatch()
        first.CopyFrom(batch)
        del first.events[:]
        last = worker_pb2.OutputBatch(events=batch.events)
        return [first, again, last]

    async with world(redis_url, tmp_path, fakes={"lengths": LENGTHS}) as (client, _, (worker,)):
        worker.mutators.extend([twice] * 30)
        assert_whole(await client.stream(spec(PROMPT, n=3)))
        worker.mutators.clear()


async def test_a_run_that_leaves_a_gap_is_asked_for_again(redis_url: str, tmp_path: Path) -> None:
    def without_runs(batch: worker_pb2.OutputBatch) -> list[worker_pb2.OutputBatch]:
        return [worker_pb2.OutputBatch(opened=batch.opened, events=batch.events)]

    async with world(redis_url, tmp_path, fakes={"lengths": LENGTHS}) as (client, _, (worker,)):
        worker.mutators.extend([lambda batch: [batch]] * 4 + [without_runs])
        said = await client.stream(spec(PROMPT, n=3))
        assert_whole(said)
        assert len(worker.hellos) == 2
        assert said.finished is not None
        assert said.finished.receipt.attempts == 1


async def test_tokens_that_differ_from_the_transcript_are_never_spliced_in(redis_url: str, tmp_path: Path) -> None:
    def other_tokens(batch: worker_pb2.OutputBatch) -> list[worker_pb2.OutputBatch]:
        again = worker_pb2.OutputBatch()
        again.CopyFrom(batch)
        del again.opened[:], again.events[:]
        again.token_ids[:] = [1 + token for token in batch.token_ids]
        return [batch, again]

    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, _, (one, _)):
        one.mutators.extend([lambda batch: [batch]] * 4 + [other_tokens])
        said = await client.stream(spec(PROMPT, n=3))
        assert_whole(said)
        assert said.finished is not None
        assert (said.finished.receipt.attempts, said.finished.receipt.worker) == (2, "w2")
        await until(lambda: bool(one.cancels))


@pytest.mark.parametrize("fault", ["columns", "handle", "seq"])
async def test_a_batch_that_breaks_the_protocol_breaks_the_stream_and_no_text(
    redis_url: str, tmp_path: Path, fault: str
) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": LENGTHS}) as (client, _, (worker,)):

        def harm(batch: worker_pb2.OutputBatch) -> list[worker_pb2.OutputBatch]:
            if fault == "columns":
                batch.choice.append(0)
            elif fault == "handle":
                batch.handle[:] = [999] * len(batch.handle)
            else:
                worker._streams[0].seq += 1
            return [batch]

        worker.mutators.extend([lambda batch: [batch]] * 4 + [harm])
        assert_whole(await client.stream(spec(PROMPT, n=3)))
        assert len(worker.hellos) == 2


# --- binding --------------------------------------------------------------------------------------------------------


async def test_openings_that_are_not_current_are_answered_with_cancel(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": (200,)}) as (client, (router,), (one, two)):
        # Both workers have a stream first.
        router.workers = [two]
        await client.stream(spec(PROMPT))
        router.workers = [one]
        call = client.generate(spec(PROMPT))
        said = await first_token(call)
        (request_id,) = one.held
        unknown = bytes(16)
        for worker, stale in ((one, (unknown, 1, 1)), (two, (request_id, 1, 1)), (two, (request_id, 1, 7))):
            opened = worker_pb2.Opened(request_id=stale[0], epoch=stale[1], attempt=stale[2], handle=77)
            run = worker_pb2.OutputBatch(
                opened=[opened], handle=[77], choice=[0], index=[0], count=[1], finish=[0], token_ids=[3]
            )
            worker.say(worker_pb2.OutputsResponse(batch=run))
            await until(lambda worker=worker, stale=stale: stale in worker.cancels)
            worker.cancels.clear()
        await rest(call, said)
        assert said.texts == {0: expected(PROMPT, 0, 200)}
        assert client.gateway.core.links.stale == 3


async def test_opened_may_come_before_submits_answer_and_the_answer_then_means_nothing(
    redis_url: str, tmp_path: Path
) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": LENGTHS}) as (client, (router,), (worker,)):
        await client.stream(spec(PROMPT, n=3))  # the stream is open from now on

        async def dies_late(_request: object) -> None:
            await asyncio.sleep(0.03)
            raise RouterDies

        router.after.append(dies_late)
        said = await client.stream(spec(PROMPT, n=3))
        assert_whole(said)
        assert said.finished is not None
        assert said.finished.receipt.attempts == 1
        assert not worker.cancels


async def test_a_worker_that_never_opens_what_it_was_said_to_have_is_given_up(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.link.OPEN_WITHIN_S", 0.3)
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, (router,), (one, _)):
        router.after.append(lambda _request: one.held.clear())
        said = await client.stream(spec(PROMPT, n=3))
        assert_whole(said)
        assert said.finished is not None
        assert (said.finished.receipt.attempts, said.finished.receipt.worker) == (2, "w2")
        await until(lambda: bool(one.cancels))


# --- workers that die -----------------------------------------------------------------------------------------------


async def test_a_worker_killed_at_any_step_costs_nothing_but_time(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": LENGTHS}) as (client, (router,), survivors):
        kills: set[asyncio.Task[None]] = set()

        def kill(worker: MeshWorker, number: int) -> None:
            worker.stepped = lambda step: kills.add(asyncio.create_task(worker.kill())) if step == number else None

        all_said = await each_with_a_worker_of_its_own(client, router, survivors, range(1, max(LENGTHS) + 2), kill)
        await asyncio.gather(*kills)
        receipts = [said.finished.receipt for said in all_said if said.finished is not None]
        assert all(receipt.attempts <= 2 and receipt.migrations <= 1 for receipt in receipts)
        assert sum(receipt.migrations for receipt in receipts) > max(LENGTHS) / 2


async def test_the_next_attempt_carries_what_was_emitted_and_excludes_the_lost_incarnation(
    redis_url: str, tmp_path: Path
) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, (router,), (one, _)):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        await until(lambda: one.steps >= 5)
        began = time.monotonic()
        await one.kill()
        await rest(call, said)
        assert_whole(said)
        assert time.monotonic() - began < 0.6, "a refused connection is a lost worker at once"
        again = router.requests[1]
        assert (again.submission.attempt, list(again.excluded)) == (2, [one.incarnation])
        emitted = [list(choice.emitted) for choice in again.submission.generate.choices]
        assert emitted == [fake.tokens(PROMPT, choice, len(ids)) for choice, ids in enumerate(emitted)]
        assert len(emitted[0]) == 2
        assert again.submission.generate.choices[0].finish == STOP
        assert again.prefill_tokens == len(PROMPT) + sum(map(len, emitted))
        assert again.submission.spec_hash == router.requests[0].submission.spec_hash
        assert said.finished is not None
        receipt = said.finished.receipt
        assert (receipt.migrations, receipt.attempts) == (1, 2)
        assert receipt.lost_attempts_ms > 0


async def test_an_engine_started_anew_behind_its_door_has_lost_what_it_held(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": LENGTHS}) as (client, (router,), (worker,)):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        old = worker.incarnation
        await worker.reborn()
        await rest(call, said)
        assert_whole(said)
        assert list(router.requests[1].excluded) == [old]


@pytest.mark.parametrize("why", [worker_pb2.Released.WHY_DRAINING, worker_pb2.Released.WHY_OVERLOADED])
async def test_a_released_request_goes_on_elsewhere(
    redis_url: str, tmp_path: Path, why: worker_pb2.Released.Why
) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, _, (one, _)):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        one.release(why)
        await rest(call, said)
        assert_whole(said)
        assert said.finished is not None
        assert said.finished.receipt.worker == "w2"


async def test_what_another_cancelled_at_the_worker_is_submitted_again(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, _, (one, _)):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        (held,) = one.held.values()
        order = worker_pb2.CancelOutput(request_id=held.sub.request_id, epoch=1, attempt=1)
        one._cancel(one._streams[0], order)
        await rest(call, said)
        assert_whole(said)


async def test_a_failure_that_another_worker_may_do_better_is_tried_there(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, _, (one, _)):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        one.fail(Reason.ENGINE_FAULT, retryable=True)
        await rest(call, said)
        assert_whole(said)


async def test_a_failure_for_good_is_told_with_its_reason_after_the_text_so_far(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (10**6,)}) as (client, _, (worker,)):
        said = Said()
        stream = asyncio.create_task(client.stream(spec(PROMPT), said))
        await until(lambda: said.deltas)
        worker.fail(Reason.NAN_LOGITS, retryable=False)
        with pytest.raises(TrunklineError) as caught:
            await stream
        assert caught.value.reason is Reason.NAN_LOGITS
        assert expected(PROMPT, 0, 10_000).startswith(said.texts[0])


async def test_two_workers_lost_while_they_ran_it_make_a_request_suspect(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=3, fakes={"lengths": (10**6,)}) as (client, (router,), own):
        stream = asyncio.create_task(client.stream(spec(PROMPT)))
        for worker in own[:2]:
            await until(lambda worker=worker: worker.held and worker._streams)
            await asyncio.sleep(0.02)
            await worker.kill()
        with pytest.raises(TrunklineError) as caught:
            await stream
        assert caught.value.reason is Reason.POISON_SUSPECTED
        assert len(router.requests) == 2


async def test_with_no_replica_left_the_error_says_so_and_what_was_lost(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (10**6,)}) as (client, _, (worker,)):
        said = Said()
        stream = asyncio.create_task(client.stream(spec(PROMPT), said))
        await until(lambda: said.deltas)
        worker.release(worker_pb2.Released.WHY_GROUP_FAILED, "rank 1 ended in all_reduce at step 7")
        worker.alive = False
        with pytest.raises(TrunklineError) as caught:
            await stream
        assert caught.value.reason is Reason.NO_REPLICA
        assert "rank 1 ended in all_reduce at step 7" in caught.value.message


async def test_the_gateways_budget_of_moves_is_a_limit(redis_url: str, tmp_path: Path) -> None:
    limits = {"moves_burst": 1, "moves_per_s": 1, "worker_losses": 10}
    async with world(redis_url, tmp_path, workers=3, fakes={"lengths": (10**6,)}, limits=limits) as (client, _, own):
        stream = asyncio.create_task(client.stream(spec(PROMPT)))
        for worker in own[:2]:
            await until(lambda worker=worker: worker.held and worker._streams)
            await asyncio.sleep(0.02)
            await worker.kill()
        with pytest.raises(TrunklineError) as caught:
            await stream
        assert caught.value.reason is Reason.WORKER_LOST


async def test_a_silent_worker_is_lost_after_five_seconds_and_not_before(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, _, (one, _)):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        one.silent = True
        silent_at = time.monotonic()
        await rest(call, said)
        assert_whole(said)
        assert 4.5 < time.monotonic() - silent_at < 6.5


async def test_an_engine_that_makes_no_progress_is_lost_though_its_door_lives(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, _, (one, _)):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        one.pause()
        one.tick_age_ms = 10_500
        await rest(call, said)
        assert_whole(said)


# --- routers that die -----------------------------------------------------------------------------------------------


async def test_a_router_killed_between_admit_and_answer_costs_an_attempt(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, routers=2, fakes={"lengths": LENGTHS}) as (client, fronts, (worker,)):
        for front in fronts:
            front.after.append(fails_with(RouterDies()))
        said = await client.stream(spec(PROMPT, n=3))
        assert_whole(said)
        assert said.finished is not None
        assert said.finished.receipt.attempts == 3
        stamps = [(sub.epoch, sub.attempt) for sub in worker.submissions]
        assert stamps == [(1, 1), (1, 2), (1, 3)]


async def test_a_router_killed_with_a_submission_in_its_queue_costs_an_attempt(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, routers=2, fakes={"lengths": LENGTHS}) as (client, fronts, _):
        for front in fronts:
            front.before.append(lambda _request: asyncio.sleep(30))
        stream = asyncio.create_task(client.stream(spec(PROMPT, n=3)))
        await until(lambda: any(front.requests for front in fronts))
        asked, other = sorted(fronts, key=lambda front: not front.requests)
        other.before.clear()
        await asked.kill()
        assert_whole(await stream)
        assert other.requests[0].submission.attempt == 2


async def test_submissions_with_a_router_that_falls_silent_go_to_another(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, routers=2, fakes={"lengths": LENGTHS}) as (client, fronts, _):
        fronts[0].frozen = True
        began = time.monotonic()
        streams = [asyncio.create_task(client.stream(spec(PROMPT, n=3))) for _ in range(2)]
        for stream in streams:
            assert_whole(await stream)
        assert 4 < time.monotonic() - began < 8
        fronts[0].frozen = False


async def test_running_streams_do_not_notice_that_every_router_dies(redis_url: str, tmp_path: Path) -> None:
    fakes = {"lengths": LENGTHS, "step_s": 0.005}
    async with world(redis_url, tmp_path, routers=2, fakes=fakes) as (client, fronts, _):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        for front in fronts:
            await front.kill()
        await rest(call, said)
        assert_whole(said)


async def test_without_any_router_the_error_is_typed_and_the_gateway_says_that_it_is_not_ready(
    redis_url: str, tmp_path: Path
) -> None:
    limits = {"fruitless_attempts": 3}
    async with world(redis_url, tmp_path, limits=limits) as (client, (router,), _):
        await router.kill()
        with pytest.raises(TrunklineError) as caught:
            await client.stream(spec(PROMPT))
        assert caught.value.reason is Reason.NO_REPLICA
        await until(lambda: not client.gateway.lifecycle.ready)
        await router.start()
        await until(lambda: client.gateway.lifecycle.ready)
        assert (await client.stream(spec(PROMPT))).texts == {0: expected(PROMPT, 0, 8)}


async def test_an_unknown_outcome_is_tried_again_elsewhere(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=2, fakes={"lengths": LENGTHS}) as (client, (router,), (one, _)):
        unknown = TrunklineError(
            Reason.OUTCOME_UNKNOWN, "who knows", metadata={"incarnation": f"{one.incarnation:016x}"}
        )
        router.after.append(fails_with(unknown))
        said = await client.stream(spec(PROMPT, n=3))
        assert_whole(said)
        assert said.finished is not None
        assert said.finished.receipt.worker == "w2"
        assert list(router.requests[1].excluded) == [one.incarnation]


@pytest.mark.parametrize(
    ("reason", "asked"), [(Reason.QUEUE_FULL, 1), (Reason.WOULD_MISS, 1), (Reason.TOO_LARGE, 1), (Reason.NO_REPLICA, 2)]
)
async def test_a_typed_refusal_reaches_the_client_as_it_is(
    redis_url: str, tmp_path: Path, reason: Reason, asked: int
) -> None:
    async with world(redis_url, tmp_path, routers=2) as (client, fronts, _):
        refusal = TrunklineError(reason, "this is why", metadata={"a": "b"}, retry_after_s=3.0)
        for front in fronts:
            front.before.append(fails_with(refusal))
        with pytest.raises(TrunklineError) as caught:
            await client.stream(spec(PROMPT))
        assert (caught.value.reason, caught.value.message) == (reason, "this is why")
        assert (caught.value.metadata, caught.value.retry_after_s) == ({"a": "b"}, 3.0)
        assert sum(len(front.requests) for front in fronts) == asked
        for front in fronts:
            front.before.clear()


async def test_a_version_that_is_gone_before_the_first_token_is_resolved_anew_once(
    redis_url: str, tmp_path: Path
) -> None:
    async with world(redis_url, tmp_path) as (client, (router,), (worker,)):
        worker.serves = fake.version("2")
        call = asyncio.create_task(client.stream(spec(PROMPT)))
        router.before.append(lambda _request: told(router, client))
        said = await call
        assert said.texts == {0: expected(PROMPT, 0, 8)}
        assert said.started is not None
        assert said.started.version == "2"
        router.versions = [fake.version("3")]
        router.changed()
        await until(lambda: client.gateway.core.catalog.versions()[0].version == "3")
        with pytest.raises(TrunklineError) as caught:
            await client.stream(spec(PROMPT))
        assert caught.value.reason is Reason.VERSION_GONE


async def told(router: FakeRouter, client: Client) -> None:
    """The gateway hears of version 2 while its request for version 1 is with the router."""
    router.versions = [fake.version("2")]
    router.changed()
    await until(lambda: client.gateway.core.catalog.versions()[0].version == "2")


# --- embeddings, and the state store --------------------------------------------------------------------------------


async def test_embeddings_survive_resets_at_every_piece_and_a_killed_worker(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, workers=2) as (client, _, (one, _)):
        asked = pb.EmbedRequest(model=fake.MODEL)
        inputs = [[number, 2, 3] for number in range(6)]
        for ids in inputs:
            asked.inputs.add().token_ids.ids.extend(ids)
        want = [fake.embedding(ids) for ids in inputs]
        one.resets = set(range(1, 1000))
        answer = await client.call("Embed", asked)
        assert [list(vector.values) for vector in answer.embeddings] == want
        assert answer.receipt.attempts == 1
        one.resets.clear()
        one.pause()
        call = asyncio.create_task(client.call("Embed", asked))
        await until(lambda: one.held)
        await one.kill()
        answer = await call
        assert [list(vector.values) for vector in answer.embeddings] == want
        assert answer.receipt.worker == "w2"


async def test_serving_goes_on_while_the_state_store_is_away_and_records_come_when_it_is_back(
    tmp_path: Path, valkey: Valkey
) -> None:
    async with world(valkey.url, tmp_path, fakes={"lengths": LENGTHS, "step_s": 0.005}) as (client, _, _):
        call = client.generate(spec(PROMPT, n=3))
        said = await first_token(call)
        valkey.kill()
        await rest(call, said)
        assert_whole(said)
        assert said.started is not None
        assert_whole(await client.stream(spec(PROMPT, n=3)))
        assert client.gateway.lifecycle.ready
        got = await client.call("GetGeneration", pb.GetGenerationRequest(request_id=said.started.request_id))
        assert got.record.state == common_pb2.REQUEST_STATE_FINISHED
        with pytest.raises(TrunklineError) as caught:
            await client.call("GetGeneration", pb.GetGenerationRequest(request_id="ab" * 16))
        assert caught.value.reason is Reason.STATE_AWAY


async def test_a_gateway_starts_without_its_state_store(tmp_path: Path) -> None:
    async with fake_mesh(lengths=LENGTHS) as (routers, _), serving(*routers, directory=tmp_path) as client:
        assert_whole(await client.stream(spec(PROMPT, n=3)))
        assert "state store" in client.gateway.lifecycle.detail
        assert TOKENIZER.decode(fake.tokens(PROMPT, 0, 2), after_text=True) == WHOLE[0]
