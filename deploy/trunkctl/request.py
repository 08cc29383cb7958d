"""`trunkctl request get|cancel`: looks a request up, or ends it, through any gateway."""

import argparse

from google.protobuf import json_format
from rich.table import Table

from shared.clock import SystemClock
from trunkctl.client import CALL_TIMEOUT_S, add_options, connect
from trunkctl.generate import write
from trunkctl.options import Subparsers, request_id
from trunkctl.tables import show_table
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2


def add_parser(subparsers: Subparsers) -> None:
    """Adds `request`."""
    parser = subparsers.add_parser("request", help="look a request up, or cancel it")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    get = commands.add_parser("get", help="show what is known of a request")
    get.add_argument("--json", action="store_true", help="as JSON")
    get.set_defaults(run=run_get)
    cancel = commands.add_parser("cancel", help="cancel a request and wait until the engine has freed it")
    cancel.set_defaults(run=run_cancel)
    for command in (get, cancel):
        command.add_argument("id", help="request id, also as answers' `id` shows it; the client's own with --client-id")
        command.add_argument("--client-id", action="store_true", help="the id is the one the client chose")
        add_options(command)


def run_get(args: argparse.Namespace) -> int:
    """Shows the record."""
    with connect(args) as mesh:
        request = inference_pb2.GetGenerationRequest(**_key(args))
        record = mesh.stub.GetGeneration(request, metadata=mesh.metadata, timeout=CALL_TIMEOUT_S).record
    if args.json:
        write(json_format.MessageToJson(record, preserving_proto_field_name=True) + "\n")
    else:
        show_table(_table(record))
    return 0


def run_cancel(args: argparse.Namespace) -> int:
    """Cancels; exit code 1 where nobody could confirm that the engine has freed the request."""
    with connect(args) as mesh:
        request = inference_pb2.CancelGenerationRequest(**_key(args))
        answer = mesh.stub.CancelGeneration(request, metadata=mesh.metadata, timeout=CALL_TIMEOUT_S)
    freed = "freed" if answer.confirmed else "not confirmed"
    write(f"{state_name(answer.state)}, {freed}\n")
    return 0 if answer.confirmed else 1


def state_name(state: common_pb2.RequestState) -> str:
    """Such as RUNNING."""
    return common_pb2.RequestState.Name(state).removeprefix("REQUEST_STATE_")


def _key(args: argparse.Namespace) -> dict[str, str]:
    return {"client_request_id": args.id} if args.client_id else {"request_id": request_id(args.id)}


def _table(record: common_pb2.RequestRecord) -> Table:
    end = record.ended_at_ms or SystemClock().wall_ms()
    usage = record.usage
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "request": record.request_id,
        "state": f"{state_name(record.state)} {record.reason}",
        "model": f"{record.model} {record.version}",
        "tenant": record.tenant,
        "gateway": record.gateway_id,
        "worker": record.worker_id,
        "attempt": f"{record.attempt} of epoch {record.epoch}",
        "tokens": f"{usage.prompt_tokens} in ({usage.cached_tokens} cached), {usage.completion_tokens} out",
        "lasted": f"{end - record.accepted_at_ms} ms",
        "trace": record.trace_id,
    }.items():
        table.add_row(f"[dim]{name}[/]", value.strip())
    return table
