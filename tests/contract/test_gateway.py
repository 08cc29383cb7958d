"""A gateway in this process, over real sockets, against routers and workers that keep the wire's rules."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import Reason, TrunklineError, from_rpc
from tests.fakes import mesh as fake
from tests.fakes.clock import ShiftedClock
from tests.fakes.gateway_client import (
    LENGTH,
    STOP,
    TOKENIZER,
    Client,
    Said,
    expected,
    first_token,
    rest,
    serving,
    spec,
    text,
    until,
    world,
)
from tests.fakes.mesh import fails_with, fake_mesh
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2 as pb

PROMPT = (5, 6, 7)
CANCELLED, EXPIRED = common_pb2.REQUEST_STATE_CANCELLED, common_pb2.REQUEST_STATE_EXPIRED
FINISHED, RUNNING = common_pb2.REQUEST_STATE_FINISHED, common_pb2.REQUEST_STATE_RUNNING


async def test_a_stream_says_the_models_text_and_accounts_for_its_time(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        began = time.monotonic()
        said = await client.stream(spec(PROMPT, return_token_ids=True))
        took_ms = (time.monotonic() - began) * 1000
        assert said.texts == {0: expected(PROMPT, 0, 8)}
        assert said.ids == {0: fake.tokens(PROMPT, 0, 8)}
        assert said.finishes == {0: STOP}
        assert said.matched == {0: "<|end|>"}
        assert said.started is not None
        assert said.finished is not None
        usage, receipt = said.finished.usage, said.finished.receipt
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 8, 1)
        assert receipt.total_ms <= took_ms
        assert (receipt.attempts, receipt.migrations, receipt.worker) == (1, 0, "w1")
        assert receipt.trace_id == said.started.trace_id != ""
        assert receipt.unattributed_ms <= max(0.01 * receipt.total_ms, 2.0)


async def test_complete_is_the_concatenated_stream(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (2, 5, 9)}) as (client, _, _):
        asked = spec("Once", n=3, return_token_ids=True, echo=True)
        asked.sampling.logprobs = 2
        said = await client.stream(asked)
        whole = await client.call("Complete", pb.CompleteRequest(spec=asked))
        assert {choice.index: choice.text for choice in whole.choices} == said.texts
        assert {choice.index: list(choice.token_ids) for choice in whole.choices} == said.ids
        assert [len(choice.logprobs) for choice in whole.choices] == [2, 5, 9]
        assert whole.choices[0].text.startswith("Once")
        top = whole.choices[0].logprobs[0]
        assert top.chosen.token == TOKENIZER.token_bytes(top.chosen.token_id)
        assert [candidate.token_id for candidate in top.top] == [1, 2]


async def test_max_tokens_ends_a_choice_with_length(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        said = await client.stream(spec(PROMPT, max_tokens=5))
        assert said.texts == {0: expected(PROMPT, 0, 5)}
        assert said.finishes == {0: LENGTH}


async def test_a_chat_is_rendered_by_the_models_template(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, routers, _):
        asked = pb.GenerationSpec(model=fake.MODEL)
        asked.chat.messages.add(role="user", content="Hé")
        await client.stream(asked)
        prompt = list(routers[0].requests[0].submission.generate.prompt)
        assert text(prompt) == "user: Hé\nassistant:"
        tokenised = await client.call("Tokenize", pb.TokenizeRequest(model=fake.MODEL, chat=asked.chat))
        assert list(tokenised.token_ids) == prompt


async def test_unset_sampling_takes_the_models_defaults_and_a_seed_is_drawn_before_attempt_1(
    redis_url: str, tmp_path: Path
) -> None:
    async with world(redis_url, tmp_path) as (client, routers, _):
        await client.stream(spec(PROMPT))
        sampling = routers[0].requests[0].submission.generate.sampling
        assert sampling.temperature == 0.5
        assert sampling.HasField("seed")
        assert not sampling.HasField("logprobs")


async def test_headers_come_with_the_first_token_and_heartbeats_say_that_a_silent_stream_lives(
    redis_url: str, tmp_path: Path
) -> None:
    async with world(redis_url, tmp_path, limits={"heartbeat_ms": 200}) as (client, _, (worker,)):
        worker.pause()
        call = client.generate(spec(PROMPT))
        headers = asyncio.create_task(call.initial_metadata())
        await asyncio.sleep(0.1)
        assert not headers.done(), "headers were sent before there was anything to say"
        await asyncio.sleep(0.5)
        worker.pause(False)
        said = Said()
        async for event in call:
            said.take(event)
        await headers
        assert said.heartbeats >= 2
        assert said.texts == {0: expected(PROMPT, 0, 8)}


@pytest.mark.parametrize("stop", ["STOP", " quick brown", "é", "x"])
async def test_a_stop_string_across_token_borders_ends_the_choice_at_the_token_that_completes_it(
    redis_url: str, tmp_path: Path, stop: str
) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (400,)}) as (client, _, (worker,)):
        whole, prompt = "", next(p for p in range(200) if stop in expected((p,), 0, 300))
        for count in range(1, 301):
            whole = text(fake.tokens((prompt,), 0, count))
            if stop in whole:
                break
        said = await client.stream(spec((prompt,), stop=[stop, "never there"], return_token_ids=True))
        assert said.texts[0] == whole[: whole.index(stop)]
        assert said.ids[0] == fake.tokens((prompt,), 0, count)
        assert (said.finishes[0], said.matched[0]) == (STOP, stop)
        assert worker.stops == [(0, count)]
        assert said.finished is not None
        assert said.finished.usage.completion_tokens == count


async def test_a_stop_string_ends_one_choice_and_the_others_go_on(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (40, 40)}) as (client, _, _):
        stop = expected(PROMPT, 0, 3)[-1]
        said = await client.stream(spec(PROMPT, n=2, stop=[stop], include_stop=True))
        assert said.texts[0].endswith(stop)
        assert said.texts[0].count(stop) == 1
        other = expected(PROMPT, 1, 40)
        assert said.texts[1] == other[: other.index(stop) + 1] if stop in other else other


async def test_the_first_refusal_names_every_bad_field_and_nothing_is_submitted(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, routers, _):
        asked = spec(PROMPT, n=0, max_tokens=0)
        asked.sampling.top_p = 7
        with pytest.raises(TrunklineError) as caught:
            await client.stream(asked)
        assert caught.value.reason is Reason.BAD_FIELD
        fields = {violation.field for violation in caught.value.violations}
        assert fields == {"spec.n", "spec.max_tokens", "spec.sampling.top_p"}
        assert not routers[0].requests


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "none"}, Reason.MODEL_UNKNOWN),
        ({"resume_window_ms": 3_600_001}, Reason.BAD_FIELD),
        ({"prompt_token_ids": pb.TokenIds(ids=[1] * 4096)}, Reason.PROMPT_TOO_LONG),
    ],
)
async def test_what_cannot_be_served_is_refused_with_its_reason(
    redis_url: str, tmp_path: Path, change: dict[str, Any], reason: Reason
) -> None:
    async with world(redis_url, tmp_path) as (client, routers, _):
        asked = spec(PROMPT)
        asked.MergeFrom(pb.GenerationSpec(**change))
        with pytest.raises(TrunklineError) as caught:
            await client.stream(asked)
        assert caught.value.reason is reason
        assert not routers[0].requests


@pytest.mark.parametrize("request_id", ["0" * 32, "", "x"])
async def test_what_is_not_there_cannot_be_resumed(redis_url: str, tmp_path: Path, request_id: str) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        call = client.stub.Resume(pb.ResumeRequest(request_id=request_id), metadata=client.metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert from_rpc(caught.value).reason is Reason.REQUEST_UNKNOWN


# --- deadlines, cancels, readers ------------------------------------------------------------------------------------


async def test_a_deadline_in_the_queue_dequeues_and_says_so(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, (router,), _):
        router.before.append(lambda _request: asyncio.sleep(30))
        with pytest.raises(TrunklineError) as caught:
            await client.stream(spec(PROMPT, deadline_ms=150))
        assert caught.value.reason is Reason.QUEUE_EXPIRED
        await until(lambda: len(router.left) == 1)
        assert 0 < router.requests[0].submission.budget_ms <= 150


@pytest.mark.parametrize("after_tokens", [0, 3])
async def test_a_deadline_in_prefill_or_decode_cancels_the_worker_and_says_so(
    redis_url: str, tmp_path: Path, after_tokens: int
) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (1000,)}) as (client, _, (worker,)):
        worker.stepped = lambda step: worker.pause(step >= after_tokens)
        worker.pause(after_tokens == 0)
        said = Said()
        with pytest.raises(TrunklineError) as caught:
            await client.stream(spec(PROMPT, deadline_ms=200), said)
        assert caught.value.reason is Reason.RUN_EXPIRED
        assert said.texts.get(0, "") == expected(PROMPT, 0, after_tokens).rstrip("\ufffd")
        await until(lambda: len(worker.cancels) == 1)
        assert not worker.held


async def test_the_tightest_of_the_clients_deadlines_counts(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, (router,), (worker,)):
        worker.pause()
        with pytest.raises(TrunklineError) as caught:
            await client.stream(spec(PROMPT, deadline_ms=60_000), timeout_s=0.3)
        assert caught.value.row.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not worker.held)
        assert router.requests[0].submission.budget_ms <= 300
        ((request_id, *_),) = worker.cancels
        await until(lambda: client.gateway.core.table.ended(request_id.hex()) is not None)
        record = client.gateway.core.table.ended(request_id.hex())
        assert record is not None
        assert (record.state, record.reason) == (EXPIRED, "RUN_EXPIRED")


async def test_a_client_that_leaves_in_the_queue_is_dequeued(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, (router,), _):
        router.before.append(lambda _request: asyncio.sleep(30))
        call = client.generate(spec(PROMPT))
        await until(lambda: len(router.requests) == 1)
        call.cancel()
        await until(lambda: len(router.left) == 1)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_client_that_leaves_before_or_after_the_first_token_frees_the_worker_at_once(
    redis_url: str, tmp_path: Path, tokens: int
) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (100_000,)}) as (client, _, (worker,)):
        worker.pause(tokens == 0)
        call = client.generate(spec(PROMPT))
        if tokens:
            await first_token(call)
        else:
            await until(lambda: worker.hellos and worker.held)
        left_at = time.monotonic()
        call.cancel()
        await until(lambda: bool(worker.cancels))
        assert time.monotonic() - left_at < 0.05
        assert not worker.held
        record = client.gateway.core.table.ended(worker.cancels[0][0].hex())
        assert record is not None
        assert (record.state, record.reason) == (CANCELLED, "CLIENT_GONE")


async def test_a_client_that_takes_nothing_is_cancelled_and_its_call_is_broken_off(
    redis_url: str, tmp_path: Path
) -> None:
    settings = {"limits": {"slow_reader_ms": 500}}
    async with world(redis_url, tmp_path, fakes={"lengths": (10**6,) * 16}, **settings) as (client, _, (worker,)):
        asked = spec(PROMPT, n=16)
        asked.sampling.logprobs = 20  # the transport takes what it can hold before the client's silence is felt
        call = client.generate(asked)
        said = await first_token(call)
        assert said.started is not None
        request_id = said.started.request_id
        await until(lambda: client.gateway.core.table.ended(request_id) is not None, 10)
        ended = client.gateway.core.table.ended(request_id)
        assert ended is not None
        assert (ended.state, ended.reason) == (CANCELLED, "SLOW_READER")
        await until(lambda: not worker.held)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call, said)
        assert from_rpc(caught.value).reason is Reason.SLOW_READER


async def test_cancel_waits_for_the_engine_and_the_stream_ends_cancelled(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (10**6,)}) as (client, _, (worker,)):
        call = client.generate(spec(PROMPT, client_request_id="mine"))
        said = await first_token(call)
        answer = await client.call("CancelGeneration", pb.CancelGenerationRequest(client_request_id="mine"))
        assert (answer.confirmed, answer.state) == (True, CANCELLED)
        assert not worker.held
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call, said)
        assert from_rpc(caught.value).reason is Reason.CLIENT_CANCEL


async def test_what_cost_work_is_not_retried_by_the_clients_transport(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, (router,), (worker,)):
        router.before.append(fails_with(TrunklineError(Reason.QUEUE_FULL, "the queue is full", retry_after_s=0.25)))
        assert await pushback(client.generate(spec(PROMPT))) == "250"
        worker.pause()
        call = client.generate(spec(PROMPT))
        await until(lambda: worker.hellos and worker.held)
        worker.fail(Reason.ENGINE_FAULT, retryable=False)
        assert await pushback(call) == "-1"


async def pushback(call: Any) -> object:
    """What the failed call's trailers tell the client's transport."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return dict(caught.value.trailing_metadata() or ()).get("grpc-retry-pushback-ms")


# --- lookup ---------------------------------------------------------------------------------------------------------


async def test_any_gateway_gets_and_cancels_a_request_of_the_tenant(redis_url: str, tmp_path: Path) -> None:
    async with (
        fake_mesh(lengths=(10**6,)) as (routers, (worker,)),
        serving(*routers, directory=tmp_path, store=redis_url) as one,
        serving(*routers, directory=tmp_path, store=redis_url, gateway_id="g2") as two,
    ):
        call = one.generate(spec(PROMPT, client_request_id="mine"))
        said = await first_token(call)
        assert said.started is not None
        request_id = said.started.request_id

        async def owner_known() -> pb.GetGenerationResponse:
            while True:
                try:
                    got = await two.call("GetGeneration", pb.GetGenerationRequest(request_id=request_id))
                    if got.record.usage.completion_tokens:
                        return got
                except TrunklineError:
                    await asyncio.sleep(0.02)  # the record is written behind, the peers are looked up every second

        async with asyncio.timeout(5):
            got = await owner_known()
        assert (got.record.state, got.record.gateway_id, got.record.worker_id) == (RUNNING, "g1", "w1")
        answer = await two.call("CancelGeneration", pb.CancelGenerationRequest(client_request_id="mine"))
        assert (answer.confirmed, answer.state) == (True, CANCELLED)
        assert not worker.held
        again = await two.call("CancelGeneration", pb.CancelGenerationRequest(request_id=request_id))
        assert (again.confirmed, again.state) == (True, CANCELLED)
        call.cancel()


@pytest.mark.parametrize("method", ["GetGeneration", "CancelGeneration"])
async def test_another_tenants_request_is_not_there(redis_url: str, tmp_path: Path, method: str) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (10**6,)}) as (client, _, (worker,)):
        call = client.generate(spec(PROMPT, client_request_id="mine"))
        said = await first_token(call)
        assert said.started is not None
        other = Client(client.gateway, "k2")
        ask = getattr(pb, f"{method}Request")
        for asked in (
            ask(request_id=said.started.request_id),
            ask(client_request_id="mine"),
            ask(request_id="f" * 32),
            ask(request_id="nonsense"),
        ):
            with pytest.raises(TrunklineError) as caught:
                await other.call(method, asked)
            assert caught.value.reason is Reason.REQUEST_UNKNOWN
        await other.channel.close()
        assert worker.held
        call.cancel()


async def test_the_record_tells_the_life_of_a_request(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        said = await client.stream(spec(PROMPT))
        assert said.started is not None
        record = common_pb2.RequestRecord()
        async with asyncio.timeout(3):
            while record.state != FINISHED:
                record = await client.gateway.core.parts.records.get(said.started.request_id) or record
        shown = json_format.MessageToDict(record, preserving_proto_field_name=True)
        assert shown["ended_at_ms"] >= shown["accepted_at_ms"]
        assert (record.state, record.reason, record.tenant, record.worker_id) == (FINISHED, "stop", "a", "w1")
        assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (3, 8)
        assert record.trace_id == said.started.trace_id


# --- the rest of the service ----------------------------------------------------------------------------------------


async def test_models_are_listed_in_pages_and_described(redis_url: str, tmp_path: Path) -> None:
    async with fake_mesh() as ((router,), _):
        router.versions = [fake.version(model=f"m{number:02}") for number in range(25)] + [
            fake.version("2", model="m00")
        ]
        async with serving(router, directory=tmp_path, store=redis_url) as client:
            names, token = [], ""
            while True:
                page = await client.call("ListModels", pb.ListModelsRequest(page_size=10, page_token=token))
                names += [model.name for model in page.models]
                token = page.next_page_token
                if not token:
                    break
            assert names == [f"m{number:02}" for number in range(25)]
            got = await client.call("GetModel", pb.GetModelRequest(name="m00"))
            assert [version.version for version in got.model.versions] == ["2", "1"]
            for method, asked, reason in (
                ("GetModel", pb.GetModelRequest(name="none"), Reason.MODEL_UNKNOWN),
                ("ListModels", pb.ListModelsRequest(page_size=-1), Reason.BAD_FIELD),
                ("ListModels", pb.ListModelsRequest(page_token="!"), Reason.BAD_FIELD),
            ):
                with pytest.raises(TrunklineError) as caught:
                    await client.call(method, asked)
                assert caught.value.reason is reason


async def test_tokenize_and_detokenize_are_each_others_inverse(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        words = " the quick日本 fox" * 2000
        ids = (await client.call("Tokenize", pb.TokenizeRequest(model=fake.MODEL, text=words))).token_ids
        back = await client.call("Detokenize", pb.DetokenizeRequest(model=fake.MODEL, token_ids=ids))
        assert back.text == words


async def test_health_is_per_process_service_and_model_and_follows_the_replicas(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, (router,), _):
        health = health_pb2_grpc.HealthStub(client.channel)

        async def check(name: str) -> int:
            return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

        service = "trunkline.inference.v1.InferenceService"
        serving_ = health_pb2.HealthCheckResponse.SERVING
        assert [await check(name) for name in ("", service, f"model/{fake.MODEL}")] == [serving_] * 3
        router.versions = [fake.version(ready_replicas=0)]
        router.changed()
        async with asyncio.timeout(3):
            while await check(f"model/{fake.MODEL}") == serving_:
                await client.gateway.lifecycle.changed()
        assert await check("") == serving_


async def test_embeddings_come_in_pieces_and_in_order(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path) as (client, _, _):
        asked = pb.EmbedRequest(model=fake.MODEL)
        asked.inputs.add().token_ids.ids.extend([1, 2])
        asked.inputs.add(text=" the quick")
        answer = await client.call("Embed", asked)
        inputs = [[1, 2], TOKENIZER.encode(" the quick")]
        assert [list(vector.values) for vector in answer.embeddings] == [fake.embedding(ids) for ids in inputs]
        assert answer.usage.prompt_tokens == sum(map(len, inputs))
        assert answer.receipt.worker == "w1"


async def test_a_stream_to_a_worker_is_closed_after_a_minute_without_requests_and_opened_anew(
    redis_url: str, tmp_path: Path
) -> None:
    clock = ShiftedClock()
    async with world(redis_url, tmp_path, clock=clock) as (client, _, (worker,)):
        links = client.gateway.core.links
        await client.stream(spec(PROMPT))
        clock.advance(58)
        await asyncio.sleep(0.5)
        assert links.open_streams == 1
        clock.advance(3)
        await until(lambda: links.open_streams == 0)
        assert (await client.stream(spec(PROMPT))).texts == {0: expected(PROMPT, 0, 8)}
        assert len(worker.hellos) == 2


async def test_a_gateway_of_the_minor_before_speaks_it_and_asks_for_nothing_newer(
    redis_url: str, tmp_path: Path
) -> None:
    async with world(redis_url, tmp_path, protocol_minor=0) as (client, (router,), (worker,)):
        assert (await client.stream(spec(PROMPT))).texts == {0: expected(PROMPT, 0, 8)}
        hello = worker.hellos[0]
        assert (hello.protocol_major, hello.protocol_minor, list(hello.features)) == (1, 0, ["encode", "generate"])
        asked = spec(PROMPT)
        asked.sampling.logprobs = 1
        with pytest.raises(TrunklineError) as caught:
            await client.stream(asked)
        assert caught.value.reason is Reason.FEATURE_OFF
        assert [list(sent.submission.required_features) for sent in router.requests] == [["generate"]]


async def test_a_draining_gateway_finishes_what_it_has_and_refuses_what_is_new(redis_url: str, tmp_path: Path) -> None:
    async with world(redis_url, tmp_path, fakes={"lengths": (60,), "step_s": 0.005}) as (client, _, _):
        call = client.generate(spec(PROMPT))
        said = await first_token(call)
        client.gateway.lifecycle.drain()
        with pytest.raises(TrunklineError) as caught:
            await client.stream(spec(PROMPT))
        assert caught.value.reason is Reason.DRAINING
        await rest(call, said)
        assert said.texts == {0: expected(PROMPT, 0, 60)}
