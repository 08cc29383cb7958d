"""The way to a mesh: its address, the caller's key, and one channel to the public API.

Every command that talks to a mesh offers the same options (`add_options`) and works inside `connect`.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec

from trunkctl.failure import CommandError, explain
from trunkctl.home import Home, find_home
from trunkctl.plan import Plan
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
CALL_TIMEOUT_S = 30.0  # for the short calls; generations run under their own deadline
MAX_MESSAGE = 16 << 20


@dataclass(frozen=True)
class Mesh:
    """An open way to a mesh."""

    address: str
    stub: inference_pb2_grpc.InferenceServiceStub
    metadata: tuple[tuple[str, str], ...]

    def model(self, asked: str | None) -> str:
        """The model to use: the one asked for, else the only one that the key may use."""
        if asked:
            return asked
        request = inference_pb2.ListModelsRequest()
        answer = self.stub.ListModels(request, metadata=self.metadata, timeout=CALL_TIMEOUT_S)
        names = [model.name for model in answer.models]
        if len(names) != 1:
            raise CommandError(f"--model must name one of: {', '.join(names)}" if names else "the mesh serves no model")
        return names[0]

    def versions(self, name: str) -> Sequence[common_pb2.ModelVersion]:
        """What is served of a model."""
        request = inference_pb2.GetModelRequest(name=name)
        return self.stub.GetModel(request, metadata=self.metadata, timeout=CALL_TIMEOUT_S).model.versions


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--address` and `--api-key-file`."""
    parser.add_argument("--address", metavar="HOST:PORT", help="gRPC address of a gateway (the local mesh)")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the API key (TRUNKLINE_API_KEY, the local key)"
    )


@contextmanager
def connect(args: argparse.Namespace) -> Iterator[Mesh]:
    """The mesh that the options name, else the local one; open for the length of the block."""
    home = find_home(args.home)
    plan = local_plan(home)
    address = args.address or (plan.grpc if plan else DEFAULT_ADDRESS)
    with open_mesh(address, read_key(home, args.api_key_file)) as mesh:
        yield mesh


@contextmanager
def open_mesh(address: str, key: str) -> Iterator[Mesh]:
    """A channel for the length of the block; calls still open at its end are cancelled. A call that fails inside and
    is not caught there leaves as CommandError."""
    options = [("grpc.max_receive_message_length", MAX_MESSAGE)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            yield Mesh(address, inference_pb2_grpc.InferenceServiceStub(channel), (("authorization", f"Bearer {key}"),))
        except grpc.RpcError as error:
            raise CommandError(explain(error, address)) from error


def local_plan(home: Home) -> Plan | None:
    """The plan of the mesh on this machine, if one was started."""
    try:
        return msgspec.json.decode(home.plan.read_bytes(), type=Plan)
    except FileNotFoundError:
        return None


def read_key(home: Home, file: Path | None) -> str:
    """The key from this file, else from TRUNKLINE_API_KEY, else the local one."""
    if file is None and (key := os.environ.get("TRUNKLINE_API_KEY")):
        return key
    try:
        return (file or home.dev_key).read_text().strip()
    except OSError as error:
        raise CommandError(
            f"no API key: {error}; `make up` makes one, --api-key-file or TRUNKLINE_API_KEY gives another"
        ) from None
