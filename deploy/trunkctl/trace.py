"""`trunkctl trace ID`: a request's latency waterfall, from the spans that a development mesh keeps in its store."""

import argparse
import time

import msgspec
import redis
from google.protobuf import json_format
from rich.console import Console

from shared import keys
from shared.clock import Clock, SystemClock
from trunkctl.client import CALL_TIMEOUT_S, add_options, connect, local_plan
from trunkctl.failure import START_ONE, CommandError
from trunkctl.home import find_home
from trunkctl.options import Subparsers, request_id
from trunkctl.waterfall import Span, receipt_table, waterfall
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

STORE_TIMEOUT_S = 2.0
SPANS_WAIT_S = 6.0  # spans are written in the background, shortly after their end
QUIET_S = 0.8  # several times the interval at which services write
POLL_S = 0.1


def add_parser(subparsers: Subparsers) -> None:
    """Adds `trace`."""
    parser = subparsers.add_parser(
        "trace",
        help="draw where a request's time went",
        description="Draws the waterfall of a request from the spans that a development mesh keeps for an hour.",
    )
    parser.add_argument("id", type=request_id, help="request id, also as an answer's `id` shows it, or trace id")
    parser.add_argument("--redis-url", metavar="URL", help="store that holds the spans (that of the local mesh)")
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draws one trace."""
    store = _store(args)
    trace_id = args.id if _read(store, args.id) else _trace_of_request(args)
    spans = settled_spans(store, trace_id, SystemClock())
    if not spans:
        raise CommandError(f"the store holds no spans of {args.id}; it keeps them for an hour, in development only")
    draw(Console(highlight=False), spans, receipt_of(spans))
    return 0


def draw(console: Console, spans: list[Span], receipt: common_pb2.Receipt | None) -> None:
    """Prints the waterfall, then the receipt."""
    if spans:
        console.print(waterfall(spans))
        console.print()
    if receipt:
        console.print(receipt_table(receipt))


def receipt_of(spans: list[Span]) -> common_pb2.Receipt | None:
    """The receipt that the gateway wrote on its span, if the request got as far as that."""
    prefix = "trunkline.receipt."
    found = {
        name.removeprefix(prefix): value
        for span in spans
        for name, value in span.attrs.items()
        if name.startswith(prefix)
    }
    return json_format.ParseDict(found, common_pb2.Receipt(), ignore_unknown_fields=True) if found else None


def settled_spans(store: redis.Redis, trace_id: str, clock: Clock) -> list[Span]:
    """The trace, once its services have written what they know: after QUIET_S without a new span, or SPANS_WAIT_S."""
    spans, waited, quiet = _read(store, trace_id), 0.0, 0.0
    while waited < SPANS_WAIT_S and quiet < QUIET_S and not _long_over(spans, clock):
        time.sleep(POLL_S)
        waited += POLL_S
        now = _read(store, trace_id)
        quiet = quiet + POLL_S if now and len(now) == len(spans) else 0.0
        spans = now
    return spans


def open_store(url: str) -> redis.Redis:
    """The state store at this URL, with short time-outs."""
    return redis.Redis.from_url(url, socket_timeout=STORE_TIMEOUT_S, socket_connect_timeout=STORE_TIMEOUT_S)


def _store(args: argparse.Namespace) -> redis.Redis:
    plan = local_plan(find_home(args.home))
    url = args.redis_url or (plan.redis_url if plan else None)
    if url is None:
        raise CommandError(f"no mesh is up here ({START_ONE}); --redis-url names another's store of spans")
    return open_store(url)


def _read(store: redis.Redis, trace_id: str) -> list[Span]:
    try:
        return [msgspec.json.decode(span, type=Span) for span in store.lrange(keys.trace(trace_id), 0, -1)]
    except redis.RedisError as error:
        raise CommandError(f"the state store does not answer: {error}") from None


def _long_over(spans: list[Span], clock: Clock) -> bool:
    return bool(spans) and max(span.end_us for span in spans) / 1000 < clock.wall_ms() - 1000 * SPANS_WAIT_S


def _trace_of_request(args: argparse.Namespace) -> str:
    with connect(args) as mesh:
        request = inference_pb2.GetGenerationRequest(request_id=args.id)
        return mesh.stub.GetGeneration(request, metadata=mesh.metadata, timeout=CALL_TIMEOUT_S).record.trace_id
