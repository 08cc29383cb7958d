"""A load's client on the mesh's own protocol. One channel per gateway, shared by all requests."""

from typing import Any

import grpc

from shared.errors import from_rpc
from trunkctl.bench.clients import Arrived, Failed, Target
from trunkctl.bench.workload import Request
from trunkctl.client import MAX_MESSAGE
from trunkline.inference.v1 import inference_pb2, inference_pb2_grpc

_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.use_local_subchannel_pool", 1))


class GrpcClient:
    """See `clients.Client`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for address in target.addresses]
        self._stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._metadata = (("authorization", f"Bearer {target.key}"),) if target.key else ()

    async def stream(self, request: Request, arrived: Arrived) -> int:
        """Runs one generation."""
        stub = self._stubs[request.number % len(self._stubs)]
        message = inference_pb2.GenerateRequest(spec=self._spec(request))
        call: Any = stub.Generate(message, metadata=self._metadata, timeout=self._target.timeout_s)
        told, began = 0, False
        try:
            async for event in call:
                began = True
                match event.WhichOneof("event"):
                    case "delta" if event.delta.token_ids:  # the end alone is no piece
                        arrived(len(event.delta.token_ids))
                    case "finished":
                        told = event.finished.usage.completion_tokens
        except grpc.aio.AioRpcError as error:
            raise Failed(_kind(error, began)) from error
        finally:
            call.cancel()
        return told

    async def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels:
            await channel.close(None)

    def _spec(self, request: Request) -> inference_pb2.GenerationSpec:
        target, count = self._target, request.max_tokens
        spec = inference_pb2.GenerationSpec(
            model=target.model, max_tokens=count, ignore_eos=target.ignore_eos, return_token_ids=True
        )
        spec.min_tokens = count if target.ignore_eos else 0
        spec.sampling.temperature = target.temperature
        if isinstance(request.prompt, str):
            spec.prompt = request.prompt
        else:
            spec.prompt_token_ids.ids.extend(request.prompt)
        return spec


def _kind(error: grpc.aio.AioRpcError, began: bool) -> str:
    """The reason that a gateway gave; what the transport says by itself is named as the HTTP client names it."""
    known = from_rpc(error)
    if known.metadata.get("grpc") == "UNAVAILABLE":
        return "connection lost" if began else "connect: UNAVAILABLE"
    return str(known.reason)
