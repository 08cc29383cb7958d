"""The load tool's arithmetic, and its clients against servers that say what they are told to say."""

from __future__ import annotations

import asyncio
import json
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from shared.clock import SYSTEM_CLOCK
from shared.errors import Reason, TrunklineError, to_status
from trunkctl.bench.clients import Failed, Target
from trunkctl.bench.grpc_client import GrpcClient
from trunkctl.bench.http_client import Answer, HttpClient
from trunkctl.bench.load import Load, Pace, Share
from trunkctl.bench.measures import Health, Outcome, Report, Slo, measure, quantile
from trunkctl.bench.plot import draw
from trunkctl.bench.workload import Lengths, Mix, Request, arrivals, read_lengths, request
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc

MIX = Mix(seed=3, prompt=Lengths(100, 1.0, 10, 400), output=Lengths(5), vocab=1000)
SLO = Slo(ttft_ms=500, itl_ms=50)


def outcome(*times: float, due: float = 0.0, counts: list[int] | None = None, error: str = "") -> Outcome:
    """A request that was due then and whose pieces came then."""
    ended = times[-1] if times else due
    return Outcome(
        number=0, due=due, sent=due, ended=ended, times=list(times), counts=counts or [1] * len(times), error=error
    )


def figures(*outcomes: Outcome, offered_s: float | None = None) -> Report:
    return measure(outcomes, [Health(loop_lags=[0.001], cpu=0.5)], SLO, offered_s)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.001, 1))
def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) * (1 - 1e-9)
    assert sum(value < found for value in values) < share * len(values) * (1 + 1e-9)


def test_quantiles_of_known_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.9, 0.99, 1.0)] == [50, 90, 99, 100]
    assert quantile([7.0], 0.5) == 7


def test_tokens_of_one_piece_share_the_pause_before_it() -> None:
    one = outcome(1.0, 1.3, 1.4, counts=[2, 3, 1])
    assert one.gaps() == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert one.pauses() == pytest.approx([0.3, 0.1])
    report = figures(one)
    assert report.tpot_ms is not None
    assert report.tpot_ms.p50 == pytest.approx(100)
    assert report.output_tokens == 6


def test_times_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    late = Outcome(number=0, due=1.0, sent=1.4, ended=2.0, times=[1.5], counts=[1])
    report = figures(late)
    assert report.ttft_ms is not None
    assert report.e2e_ms is not None
    assert report.client.send_lag_ms is not None
    assert (report.ttft_ms.p50, report.e2e_ms.p50) == (500, 1000)
    assert report.client.send_lag_ms.p50 == pytest.approx(400)
    assert report.client.slow


def test_goodput_counts_failed_slow_and_stalling_requests_as_bad() -> None:
    good = outcome(0.4, 0.44, 0.48)
    slow_to_begin = outcome(0.6, 0.61)
    stalling = outcome(0.1, 0.2)
    failed = outcome(error="UNAVAILABLE")
    only_one_token = outcome(0.5)
    report = figures(good, slow_to_begin, stalling, failed, only_one_token)
    assert report.goodput == 0.4
    assert report.errors == {"UNAVAILABLE": 1}
    assert (report.sent, report.completed) == (5, 4)


def test_rates_leave_out_what_comes_after_load_was_offered() -> None:
    report = figures(outcome(1.0, 2.0, 3.0, 4.0), outcome(1.5), offered_s=2.0)
    assert report.output_tok_s == 3 / 2
    assert report.requests_s == 1 / 2
    assert report.wall_s == 4.0


def test_no_outcome_at_all_is_a_report_without_latencies() -> None:
    report = figures()
    assert (report.sent, report.ttft_ms, report.goodput) == (0, None, 0.0)


def test_arrivals_are_poisson_and_the_same_for_the_same_seed() -> None:
    times = list(arrivals(1, 50.0, seconds=200.0))
    assert times == list(arrivals(1, 50.0, seconds=200.0))
    assert times != list(arrivals(2, 50.0, seconds=200.0))
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert len(times) == pytest.approx(10_000, rel=0.05)
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.02, rel=0.05)  # an exponential's deviation is its mean
    assert sum(gap > 0.04 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.02)  # e^-2
    assert len(list(arrivals(1, 50.0, count=7))) == 7


def test_a_request_depends_on_its_seed_and_number_alone() -> None:
    assert request(MIX, 5) == request(MIX, 5)
    assert request(MIX, 5).prompt != request(MIX, 6).prompt
    made = [request(MIX, number) for number in range(500)]
    assert all(10 <= len(each.prompt) <= 400 for each in made)
    assert statistics.median(len(each.prompt) for each in made) == pytest.approx(100, rel=0.2)
    assert all(0 < token < 1000 for each in made for token in each.prompt if isinstance(token, int))
    assert all(each.max_tokens == 5 for each in made)


def test_lengths_are_read_or_refused() -> None:
    assert read_lengths("16") == Lengths(16)
    assert read_lengths("512,1.0,32,8192") == Lengths(512, 1.0, 32, 8192)
    for wrong in ("", "x", "0", "1,2", "5,1.0,9,3", "5,-1,1,9"):
        with pytest.raises(ValueError, match="MEDIAN,SIGMA"):
            read_lengths(wrong)


def test_shares_of_all_processes_make_up_the_whole() -> None:
    for whole in (1, 7, 16):
        assert sum(Share(index, 3).part(whole) for index in range(3)) == whole


def test_a_picture_is_well_formed_and_small_whatever_it_shows() -> None:
    many = [outcome(*[0.1 * step + 0.01 * number for step in range(1, 40)], due=0.0) for number in range(1000)]
    for outcomes in ([], [outcome(error="x")], many):
        picture = draw('a "title" & <more>', outcomes)
        ElementTree.fromstring(picture)
        assert len(picture) < 150_000


# The HTTP client.


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


TWO_PIECES = sse(
    {"choices": [{"text": "a", "token_ids": [1]}]},
    {"choices": [{"text": "bc", "token_ids": [2, 3]}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size: int) -> None:
    counts: list[int] = []
    answer = Answer(counts.append)
    answer.status = 200
    for start in range(0, len(TWO_PIECES), size):
        answer.take(TWO_PIECES[start : start + size])
    answer.end()
    assert (counts, answer.told) == ([1, 2], 3)


def target(address: str, timeout_s: float = 5.0) -> Target:
    return Target(
        protocol="openai-http",
        addresses=(address,),
        key="secret",
        model="m",
        timeout_s=timeout_s,
        temperature=0.0,
        ignore_eos=True,
    )


Reply = Callable[[int], bytes]


class Server:
    """Answers the n-th request with what `reply` says, after `wait_s`; an empty reply closes the connection."""

    def __init__(self, reply: Reply, wait_s: float = 0.0) -> None:
        self.address = ""
        self.bodies: list[bytes] = []
        self.connections = 0
        self._reply = reply
        self._wait_s = wait_s

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = [int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
                self.bodies.append(await reader.readexactly(length))
                number = len(self.bodies) - 1
                await asyncio.sleep(self._wait_s)
                writer.write(self._reply(number))
                if not self._reply(number).startswith(b"HTTP/1.1") or b"content-length" not in self._reply(number):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@asynccontextmanager
async def serving(said: Reply, wait_s: float = 0.0) -> AsyncIterator[Server]:
    server = Server(said, wait_s)
    async with await asyncio.start_server(server.handle, "127.0.0.1", 0) as listening:
        server.address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        yield server


async def ask(client: HttpClient) -> tuple[list[int], int]:
    counts: list[int] = []
    told = await client.stream(Request(0, [5, 6], 3), counts.append)
    return counts, told


async def test_an_http_stream_is_counted_and_its_connection_kept() -> None:
    async with serving(lambda _: reply(TWO_PIECES)) as server:
        client = HttpClient(target(server.address))
        for _ in range(3):
            assert await ask(client) == ([1, 2], 3)
        await client.close()
        assert server.connections == 1
        sent = json.loads(server.bodies[0])
        assert sent["prompt"] == [5, 6]
        assert (sent["max_tokens"], sent["min_tokens"], sent["ignore_eos"], sent["stream"]) == (3, 3, True, True)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (reply(b'{"error": {"code": "RPM", "message": "too many"}}', "429 Too Many Requests"), "HTTP 429 RPM"),
        (reply(b"<html>", "502 Bad Gateway"), "HTTP 502"),
        (reply(sse({"choices": [{"token_ids": [1]}]}, {"error": {"code": "FAILED"}})), "FAILED"),
        (b"", "connection lost"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:", "connection lost"),
        (b"SSH-2.0-nothing\r\n\r\n", "not HTTP"),
    ],
)
async def test_what_ends_an_http_stream_early_is_named(said: bytes, kind: str) -> None:
    async with serving(lambda _: said) as server:
        client = HttpClient(target(server.address))
        with pytest.raises(Failed, match=f"^{kind}"):
            await ask(client)
        await client.close()


async def test_a_server_that_says_nothing_times_out_and_one_that_is_not_there_is_named() -> None:
    async with serving(lambda _: reply(TWO_PIECES), wait_s=5.0) as server:
        with pytest.raises(Failed, match="timeout"):
            await ask(HttpClient(target(server.address, timeout_s=0.1)))
    with pytest.raises(Failed, match="connect: ConnectionRefusedError"):
        await ask(HttpClient(target(server.address)))


# The gRPC client.


class Failing(inference_pb2_grpc.InferenceServiceServicer):
    """Fails with a reason of ours where one token is asked for, else after a piece, as a transport does."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:  # type: ignore[override]
        if request.spec.max_tokens == 1:
            await context.abort_with_status(
                rpc_status.to_status(to_status(TrunklineError(Reason.NO_REPLICA, "none is up")))
            )
        yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[1]))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def test_a_gateway_that_is_not_there_or_leaves_is_not_counted_as_a_reason_of_the_meshs() -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Failing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcClient(replace(target(f"127.0.0.1:{port}"), addresses=(f"127.0.0.1:{port}", "127.0.0.1:1")))
    try:
        for number, tokens, kind in ((0, 1, "NO_REPLICA"), (0, 2, "connection lost"), (1, 1, "connect: UNAVAILABLE")):
            with pytest.raises(Failed, match=f"^{kind}$"):
                await client.stream(Request(number, [5, 6], tokens), lambda _: None)
    finally:
        await client.close()
        await server.stop(None)


# The loop.


async def run(server: Server, pace: Pace, warm_up: int = 0) -> list[Outcome]:
    async def begin() -> float:
        return SYSTEM_CLOCK.monotonic()

    client = HttpClient(target(server.address))
    try:
        result = await Load(client, MIX, pace, Share(), SYSTEM_CLOCK).run(warm_up, begin)
    finally:
        await client.close()
    return result.outcomes


async def test_an_open_loop_does_not_wait_for_slow_answers() -> None:
    async with serving(lambda _: reply(TWO_PIECES), wait_s=0.6) as server:
        outcomes = await run(server, Pace(rate=60.0, concurrency=1, seconds=0.5, count=None))
    assert len(outcomes) == len(list(arrivals(MIX.seed, 60.0, seconds=0.5)))
    assert all(each.sent - each.due < 0.25 for each in outcomes)
    assert all(each.ttft >= 0.6 for each in outcomes)


async def test_a_closed_loop_keeps_so_many_requests_under_way_and_ends_after_its_count() -> None:
    async with serving(lambda _: reply(TWO_PIECES), wait_s=0.02) as server:
        outcomes = await run(server, Pace(rate=None, concurrency=3, seconds=None, count=10), warm_up=2)
        assert server.connections == 3
        assert len(server.bodies) == 12
    assert sorted(each.number for each in outcomes) == list(range(10))
    assert all(each.told == 3 and not each.error for each in outcomes)


async def test_failures_are_outcomes_and_do_not_end_the_load() -> None:
    async with serving(lambda n: reply(TWO_PIECES) if n % 2 else reply(b"", "503 Service Unavailable")) as server:
        outcomes = await run(server, Pace(rate=None, concurrency=1, seconds=None, count=4))
    assert [each.error for each in outcomes] == ["HTTP 503", "", "HTTP 503", ""]
