"""The scope around handlers, channels, health and reflection, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import REGISTRY

from shared import rpc
from shared.errors import Reason, TrunklineError, Violation, from_rpc
from shared.ids import Identity
from shared.lifecycle import Lifecycle, bind
from shared.ports import address_of
from shared.wire import PROTOCOL_TEXT
from trunkline.router.v1 import router_pb2, router_pb2_grpc
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

ME = Identity("gateway", "g0", 0xAB)
ROUTER = "trunkline.router.v1.RouterService"
PROMPT = "attack at dawn"
LOOKUP = router_pb2.LookupRequest()
WATCH = router_pb2.WatchModelsRequest()

Handler = Callable[[Any, Any], Any]


async def answer(request: Any, context: Any) -> router_pb2.LookupResponse:
    return router_pb2.LookupResponse(position=3)


@dataclass
class Mesh:
    """One server whose handlers the test sets, and channels to it. `remaining` is what the last call had left."""

    spans: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    lookup: Handler = answer
    watch: Handler = answer
    outputs: Handler = answer
    remaining: float | None = None

    def __post_init__(self) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.tracer = provider.get_tracer("test")
        self.channels = rpc.Channels(ME, self.tracer)
        self.lifecycle = Lifecycle(ME, services=[ROUTER])

    @asynccontextmanager
    async def serving(self, *, public: bool = False) -> AsyncIterator[Mesh]:
        mesh = self

        class Router(router_pb2_grpc.RouterServiceServicer):
            async def Lookup(self, request: Any, context: Any) -> Any:
                mesh.remaining = rpc.remaining_s()
                return await mesh.lookup(request, context)

            def WatchModels(self, request: Any, context: Any) -> Any:
                mesh.remaining = rpc.remaining_s()
                return mesh.watch(request, context)

        class Worker(worker_pb2_grpc.WorkerServiceServicer):
            def Outputs(self, requests: Any, context: Any) -> Any:
                return mesh.outputs(requests, context)

        server = rpc.make_server(tracer=self.tracer, public=public)
        router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)
        rpc.add_health(server, self.lifecycle)
        rpc.add_reflection(server, [ROUTER])
        self.address = await bind(server, "127.0.0.1:0")
        await server.start()
        self.channel = self.channels.get(self.address)
        self.router = router_pb2_grpc.RouterServiceStub(self.channel)
        self.worker = worker_pb2_grpc.WorkerServiceStub(self.channel)
        try:
            yield self
        finally:
            await self.channels.close()
            await server.stop(None)

    async def span(self, name: str = f"{ROUTER}/Lookup") -> ReadableSpan:
        """The one server span of that name, once it has ended."""
        async with asyncio.timeout(5):
            while True:
                found = [span for span in self.spans.get_finished_spans() if span.name == name]
                if found:
                    (one,) = found
                    return one
                await asyncio.sleep(0.005)


def exceptions(span: ReadableSpan) -> list[dict[str, Any]]:
    return [dict(event.attributes or {}) for event in span.events if event.name == "exception"]


async def refused(call: Any) -> TrunklineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc(caught.value)


async def asked(mesh: Mesh) -> Any:
    return await mesh.router.Lookup(LOOKUP)


async def queue_full(request: Any, context: Any) -> Any:
    raise TrunklineError(Reason.QUEUE_FULL, "The queue is full.", retry_after_s=0.5)


async def secret(request: Any, context: Any) -> Any:
    raise ValueError(PROMPT)


async def beats(request: Any, context: Any) -> AsyncIterator[Any]:
    while True:
        yield router_pb2.WatchModelsResponse(heartbeat=True)
        await asyncio.sleep(0.002)


# --- errors ---


async def test_a_refusal_reaches_the_caller_with_its_reason_and_is_one_exception_in_the_span() -> None:
    async with Mesh(lookup=queue_full).serving(public=True) as mesh:
        error = await refused(mesh.router.Lookup(LOOKUP))
        assert (error.reason, error.message, error.retry_after_s) == (Reason.QUEUE_FULL, "The queue is full.", 0.5)
        span = await mesh.span()
        assert span.attributes is not None
        assert span.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
        assert span.attributes["error.type"] == "QUEUE_FULL"
        assert exceptions(span) == [{"exception.type": "QUEUE_FULL", "exception.message": "The queue is full."}]
        assert span.status.status_code is StatusCode.UNSET, "the caller's fault is not the server's error"


async def test_the_text_of_an_unknown_exception_reaches_neither_caller_nor_span(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Mesh(lookup=secret).serving(public=True) as mesh:
        error = await refused(mesh.router.Lookup(LOOKUP))
        assert error.reason is Reason.INTERNAL
        assert "dawn" not in str(error)
        span = await mesh.span()
        assert "dawn" not in span.to_json()
        (event,) = exceptions(span)
        assert event["exception.type"] == "ValueError"
        assert "in secret" in event["exception.stacktrace"]
        assert span.status.status_code is StatusCode.ERROR
        assert "RouterService/Lookup failed" in caplog.text


async def test_a_stream_that_fails_half_way_ends_with_the_reason_after_what_it_sent() -> None:
    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        yield router_pb2.WatchModelsResponse(heartbeat_ms=1)
        raise TrunklineError(Reason.DRAINING, "The router drains.")

    async with Mesh(watch=watch).serving() as mesh:
        call = mesh.router.WatchModels(WATCH)
        assert (await call.read()).heartbeat_ms == 1
        assert (await refused(call.read())).reason is Reason.DRAINING


async def test_a_refusal_with_more_violations_than_trailers_hold_still_arrives() -> None:
    async def lookup(request: Any, context: Any) -> Any:
        violations = [Violation(f"stop[{i}]", "must be at most 256 bytes") for i in range(3000)]
        raise TrunklineError(Reason.BAD_FIELD, "3000 fields are not valid: " + "ü" * 5000, violations=violations)

    async with Mesh(lookup=lookup).serving() as mesh:
        error = await refused(mesh.router.Lookup(LOOKUP))
        assert error.reason is Reason.BAD_FIELD
        assert len(error.violations) > 10


@pytest.mark.parametrize("how", ["abort", "set_code"])
async def test_a_status_the_handler_sets_by_itself_is_in_the_span(how: str) -> None:
    async def lookup(request: Any, context: Any) -> Any:
        if how == "abort":
            await context.abort(grpc.StatusCode.ABORTED, "so")
        context.set_code(grpc.StatusCode.ABORTED)
        return router_pb2.LookupResponse()

    async with Mesh(lookup=lookup).serving(public=True) as mesh:
        await refused(mesh.router.Lookup(LOOKUP))
        assert (await mesh.span()).attributes["rpc.response.status_code"] == "ABORTED"


@pytest.mark.parametrize(
    ("reason", "retry_after_s", "work", "pushback"),
    [
        (Reason.STATE_AWAY, None, False, None),
        (Reason.STATE_AWAY, 0.75, False, "750"),
        (Reason.STATE_AWAY, 0.75, True, "-1"),
        (Reason.BAD_FIELD, None, False, "-1"),
    ],
)
async def test_a_public_server_tells_the_transport_whether_to_retry(
    reason: Reason, retry_after_s: float | None, work: bool, pushback: str | None
) -> None:
    async def lookup(request: Any, context: Any) -> Any:
        if work:
            await asyncio.create_task(note())
        raise TrunklineError(reason, "No.", retry_after_s=retry_after_s)

    async def note() -> None:  # in a task of the handler's own
        rpc.mark_work_done()

    for public in (True, False):
        async with Mesh(lookup=lookup).serving(public=public) as mesh:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await mesh.router.Lookup(LOOKUP)
            told = dict(caught.value.trailing_metadata()).get("grpc-retry-pushback-ms")
            assert told == (pushback if public else None)


# --- cancellation ---


async def test_a_cancelled_stream_is_recorded_as_cancelled_and_its_generator_is_closed_within_the_call() -> None:
    ended: list[str] = []
    mesh = Mesh()

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for beat in beats(request, context):
                yield beat
        finally:
            assert not mesh.spans.get_finished_spans(), "the span ended before the handler's clean-up"
            ended.append("cleaned up")

    mesh.watch = watch
    async with mesh.serving(public=True):
        call = mesh.router.WatchModels(WATCH)
        await call.read()
        call.cancel()
        span = await mesh.span(f"{ROUTER}/WatchModels")
        assert ended == ["cleaned up"]
        assert span.attributes["rpc.response.status_code"] == "CANCELLED"
        assert span.attributes["error.type"] == "CANCELLED"
        assert span.status.status_code is StatusCode.UNSET
        assert not exceptions(span)


async def test_a_generator_that_waits_on_a_full_pipe_is_closed_too() -> None:
    closed = asyncio.Event()

    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield router_pb2.WatchModelsResponse(router_id="x" * 100_000)
        finally:
            closed.set()

    async with Mesh(watch=watch).serving() as mesh:
        call = mesh.router.WatchModels(WATCH)
        await call.read()
        await asyncio.sleep(0.2)  # the window fills: the server now waits in its write
        call.cancel()
        async with asyncio.timeout(5):
            await closed.wait()


@asynccontextmanager
async def cuttable(address: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """An address that leads to `address`, and what resets the connections there."""
    pairs: list[asyncio.StreamWriter] = []

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = address.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        pairs.extend((writer, far_writer))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    def cut() -> None:
        for writer in pairs:
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as proxy:
        yield address_of(proxy.sockets[0]), cut


async def test_a_connection_that_dies_under_a_write_is_counted_and_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """grpc fails the write or cancels the handler, whichever it comes to first; only the former can be counted."""
    ended = asyncio.Event()

    async def floods(request: Any, context: Any) -> None:
        async def write() -> None:
            while True:
                await context.write(router_pb2.WatchModelsResponse(router_id="x" * 200_000))

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(write())
        finally:
            ended.set()

    def counted() -> float:
        return REGISTRY.get_sample_value("trunkline_calls_broken_total", {"method": f"{ROUTER}/WatchModels"}) or 0.0

    before = counted()
    for _ in range(50):
        ended.clear()
        async with Mesh(watch=floods).serving() as mesh, cuttable(mesh.address) as (address, cut):
            call = router_pb2_grpc.RouterServiceStub(mesh.channels.get(address)).WatchModels(WATCH)
            await call.read()
            cut()
            async with asyncio.timeout(5):
                await ended.wait()
        if counted() > before:
            break
    assert counted() == before + 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING and record.name != "asyncio"] == []


async def test_a_call_past_its_deadline_is_recorded_as_that() -> None:
    async def lookup(request: Any, context: Any) -> Any:
        await asyncio.sleep(5)

    async with Mesh(lookup=lookup).serving(public=True) as mesh:
        error = await refused(mesh.router.Lookup(LOOKUP, timeout=0.1))
        assert error.reason is Reason.RUN_EXPIRED
        span = await mesh.span()
        assert span.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
        assert span.status.status_code is StatusCode.ERROR


async def test_a_cancelled_caller_raises_cancelled_and_the_server_hears_of_it() -> None:
    heard = asyncio.Event()

    async def lookup(request: Any, context: Any) -> Any:
        try:
            await asyncio.sleep(5)
        finally:
            heard.set()

    async with Mesh(lookup=lookup).serving() as mesh:
        task = asyncio.create_task(asked(mesh))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(2):
            await heard.wait()


# --- all shapes of handlers ---


async def test_a_two_way_stream_answers_each_message_in_turn() -> None:
    async def outputs(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield worker_pb2.OutputsResponse(batch=worker_pb2.OutputBatch(seq=request.ack.seq))

    async with Mesh(outputs=outputs).serving() as mesh:
        call = mesh.worker.Outputs()
        for seq in (1, 2, 3):
            await call.write(worker_pb2.OutputsRequest(ack=worker_pb2.Ack(seq=seq)))
            assert (await call.read()).batch.seq == seq
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_handler_may_write_by_itself() -> None:
    async def watch(request: Any, context: Any) -> None:
        for ms in (1, 2):
            await context.write(router_pb2.WatchModelsResponse(heartbeat_ms=ms))

    async with Mesh(watch=watch).serving() as mesh:
        assert [m.heartbeat_ms async for m in mesh.router.WatchModels(WATCH)] == [1, 2]


# --- deadlines ---


async def test_the_budget_that_remains_goes_along_to_the_next_hop() -> None:
    async with Mesh().serving() as far:

        async def lookup(request: Any, context: Any) -> Any:
            await asyncio.sleep(0.2)
            return await far.router.Lookup(request)

        async with Mesh(lookup=lookup).serving() as near:
            await near.router.Lookup(LOOKUP, timeout=10)
            # The transport writes times with three digits, rounded up: each hop may add one part in a hundred.
            assert 9.9 < near.remaining <= 10.1
            assert 9.0 < far.remaining <= 9.9


async def test_without_a_deadline_none_appears_and_an_explicit_one_wins() -> None:
    async with Mesh().serving() as mesh:
        await mesh.router.Lookup(LOOKUP)
        assert mesh.remaining is None
        with rpc.budget(5.0):
            await mesh.router.Lookup(LOOKUP)
            assert 4.9 < mesh.remaining <= 5.05
            await mesh.router.Lookup(LOOKUP, timeout=30)
            assert mesh.remaining > 29
        assert rpc.remaining_s() is None


async def test_a_budget_that_is_spent_refuses_the_next_call_at_once() -> None:
    async with Mesh().serving() as mesh:
        with rpc.budget(0.0):
            assert (await refused(asked(mesh))).reason is Reason.RUN_EXPIRED
        assert mesh.remaining is None, "the server was asked"


async def test_a_standing_stream_takes_no_deadline_from_the_call_that_opens_it() -> None:
    async with Mesh(watch=beats).serving() as mesh:
        with rpc.budget(0.2):
            call = mesh.router.WatchModels(WATCH)
            await call.read()
            await asyncio.sleep(0.3)
            await call.read()
            assert mesh.remaining is None
            call.cancel()


# --- traces ---


async def test_a_server_span_has_the_names_of_the_conventions_and_hangs_under_the_callers() -> None:
    async with Mesh().serving() as mesh:
        with mesh.tracer.start_as_current_span("attempt") as parent:
            await mesh.router.Lookup(LOOKUP)
        span = await mesh.span()
        assert span.kind is SpanKind.SERVER
        assert dict(span.attributes) == {
            "rpc.system.name": "grpc",
            "rpc.method": f"{ROUTER}/Lookup",
            "rpc.response.status_code": "OK",
        }
        assert span.parent.span_id == parent.get_span_context().span_id
        assert span.context.trace_id == parent.get_span_context().trace_id


async def test_what_a_handler_calls_or_starts_hangs_under_its_own_span() -> None:
    async with Mesh().serving() as far:

        async def lookup(request: Any, context: Any) -> Any:
            return await asyncio.create_task(asked(far))

        async with Mesh(lookup=lookup).serving(public=True) as near:
            await near.router.Lookup(LOOKUP)
            mine, theirs = await near.span(), await far.span()
            assert theirs.parent.span_id == mine.context.span_id


async def test_between_services_a_call_without_a_trace_makes_no_span_and_a_public_one_begins_a_trace() -> None:
    for public, expected in ((False, 0), (True, 1)):
        async with Mesh().serving(public=public) as mesh:
            await mesh.router.Lookup(LOOKUP)
            await asyncio.sleep(0.02)
            assert len(mesh.spans.get_finished_spans()) == expected


async def test_trace_state_is_carried_through_and_a_malformed_parent_is_survived() -> None:
    seen: list[Any] = []

    async def lookup(request: Any, context: Any) -> Any:
        seen.append(dict(context.invocation_metadata()))
        return router_pb2.LookupResponse()

    async with Mesh(lookup=lookup).serving() as far:

        async def relay(request: Any, context: Any) -> Any:
            return await far.router.Lookup(request)

        async with Mesh(lookup=relay).serving(public=True) as near:
            parent = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03")
            await near.router.Lookup(LOOKUP, metadata=[parent, ("tracestate", "vendor=1,other=2")])
            await near.router.Lookup(LOOKUP, metadata=[("traceparent", "00-nonsense"), ("tracestate", "=")])
        assert seen[0]["tracestate"] == "vendor=1,other=2"
        assert seen[0]["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert len(seen[1]["traceparent"]) == 55
        assert seen[0]["tl-incarnation"] == "00000000000000ab"


# --- versions ---


@pytest.mark.parametrize(
    ("spoken", "understood"), [("1.0", True), ("1.9", True), (None, True), ("2.0", False), ("x", False)]
)
async def test_another_major_version_is_refused_between_services(spoken: str | None, understood: bool) -> None:
    metadata = [("tl-protocol", spoken)] if spoken else None
    async with Mesh().serving() as mesh, grpc.aio.insecure_channel(mesh.address) as channel:
        call = router_pb2_grpc.RouterServiceStub(channel).Lookup(LOOKUP, metadata=metadata)
        if understood:
            assert (await call).position == 3
        else:
            error = await refused(call)
            assert (error.reason, error.metadata["protocol"]) == (Reason.PROTOCOL_MISMATCH, PROTOCOL_TEXT)


# --- health and reflection ---


async def test_health_follows_the_lifecycle_per_service_and_model_and_is_not_traced() -> None:
    async with Mesh().serving(public=True) as mesh:
        stub = health_pb2_grpc.HealthStub(mesh.channel)

        async def check(name: str) -> str:
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

        assert await check("") == "NOT_SERVING"
        mesh.lifecycle.set_ready(True)
        mesh.lifecycle.set_model("smollm2", True)
        assert [await check(n) for n in ("", ROUTER, "model/smollm2")] == ["SERVING"] * 3
        mesh.lifecycle.set_model("smollm2", False)
        assert [await check(n) for n in ("", "model/smollm2")] == ["SERVING", "NOT_SERVING"]
        mesh.lifecycle.set_model("smollm2", True)
        mesh.lifecycle.drain()
        assert [await check(n) for n in ("", ROUTER, "model/smollm2")] == ["NOT_SERVING"] * 3
        for name in ("nobody", "model/none", "smollm2"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(name)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert not mesh.spans.get_finished_spans()


async def test_a_watcher_of_health_hears_every_change_once() -> None:
    async with Mesh().serving() as mesh:
        call = health_pb2_grpc.HealthStub(mesh.channel).Watch(health_pb2.HealthCheckRequest(service="model/m"))
        status = health_pb2.HealthCheckResponse

        async def next_() -> int:
            async with asyncio.timeout(5):
                return (await call.read()).status

        assert await next_() == status.SERVICE_UNKNOWN
        mesh.lifecycle.set_model("m", True)
        assert await next_() == status.NOT_SERVING, "the process is not ready"
        mesh.lifecycle.set_ready(True)
        mesh.lifecycle.set_model("other", True)  # no change for this watcher
        assert await next_() == status.SERVING
        mesh.lifecycle.drain()
        assert await next_() == status.NOT_SERVING
        call.cancel()


async def test_reflection_names_the_services() -> None:
    async with Mesh().serving() as mesh:
        stub = reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        response = await call.read()
        call.cancel()
        names = {service.name for service in response.list_services_response.service}
        assert names == {ROUTER, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


# --- channels and limits ---


async def test_lanes_have_connections_of_their_own_and_a_dropped_channel_is_replaced() -> None:
    peers: list[str] = []

    async def lookup(request: Any, context: Any) -> Any:
        peers.append(context.peer())
        return await answer(request, context)

    async with Mesh(lookup=lookup).serving() as mesh:
        assert mesh.channels.get(mesh.address) is mesh.channel
        for lane in ("", "bulk", ""):
            await router_pb2_grpc.RouterServiceStub(mesh.channels.get(mesh.address, lane)).Lookup(LOOKUP)
        await mesh.channels.drop(mesh.address)
        await router_pb2_grpc.RouterServiceStub(mesh.channels.get(mesh.address)).Lookup(LOOKUP)
    tokens, bulk, tokens_again, after = peers
    assert tokens == tokens_again
    assert len({tokens, bulk, after}) == 3


async def test_a_call_on_a_dropped_channel_still_gets_its_answer() -> None:
    async def lookup(request: Any, context: Any) -> Any:
        await asyncio.sleep(0.2)
        return await answer(request, context)

    async with Mesh(lookup=lookup, watch=beats).serving() as mesh:
        stub = router_pb2_grpc.RouterServiceStub(mesh.channels.get(mesh.address, "x"))
        task, stream = asyncio.create_task(once(stub)), stub.WatchModels(WATCH)
        await stream.read()
        await mesh.channels.drop(mesh.address)
        del stub
        gc.collect()
        assert (await task).position == 3
        await stream.read()
        stream.cancel()


async def once(stub: Any) -> Any:
    return await stub.Lookup(LOOKUP)


@pytest.mark.parametrize(("public", "limit"), [(True, rpc.PUBLIC_MESSAGE_BYTES), (False, rpc.INTERNAL_MESSAGE_BYTES)])
async def test_messages_are_taken_up_to_the_limit(public: bool, limit: int) -> None:
    async with Mesh().serving(public=public) as mesh:
        overhead = router_pb2.LookupRequest(request_id=bytes(limit)).ByteSize() - limit
        await mesh.router.Lookup(router_pb2.LookupRequest(request_id=bytes(limit - overhead)))
        error = await refused(mesh.router.Lookup(router_pb2.LookupRequest(request_id=bytes(limit - overhead + 1))))
        assert error.reason is Reason.TOO_LARGE


def test_no_client_pings_more_often_than_a_server_allows() -> None:
    ping = dict(rpc.CLIENT_OPTIONS)["grpc.keepalive_time_ms"]
    for options in (rpc.PUBLIC_SERVER_OPTIONS, rpc.INTERNAL_SERVER_OPTIONS):
        assert dict(options)["grpc.http2.min_ping_interval_without_data_ms"] <= ping
        assert dict(options)["grpc.keepalive_permit_without_calls"] == 1


async def test_streams_and_calls_side_by_side_never_block_the_loop(unblocked: None) -> None:
    async def watch(request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(50):
            yield router_pb2.WatchModelsResponse()

    async def read_all(mesh: Mesh) -> int:
        return len([m async for m in mesh.router.WatchModels(WATCH)])

    async with Mesh(watch=watch).serving(public=True) as mesh, asyncio.TaskGroup() as group:
        streams = [group.create_task(read_all(mesh)) for _ in range(8)]
        for _ in range(50):
            await mesh.router.Lookup(LOOKUP)
        assert [await stream for stream in streams] == [50] * 8
