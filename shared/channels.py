"""Channels to peers. Every call carries protocol version, own incarnation and trace context; a unary one also what
remains of the budget of the call being served.

The one rule: a stream gets no deadline by itself, and whoever opens one cancels it (`call.cancel()` in a finally):
leaving its loop does not. The wrapper sits in front of the channel instead of being a grpc.aio interceptor, so that the
call objects are grpc's own: their cancellation is exact, and a message costs nothing extra.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import grpc
from opentelemetry import trace

from shared import call
from shared.ids import Identity, incarnation_text
from shared.tracing import inject

PROTOCOL_KEY: Final = "tl-protocol"
INCARNATION_KEY: Final = "tl-incarnation"

Metadata = tuple[tuple[str, str | bytes], ...]


class Channels:
    """One cached channel per (address, lane): streams of different lanes never share a connection."""

    def __init__(self, identity: Identity, tracer: trace.Tracer, options: Sequence[tuple[str, Any]]) -> None:
        self._base: Metadata = (
            (PROTOCOL_KEY, identity.protocol.text),
            (INCARNATION_KEY, incarnation_text(identity.incarnation)),
        )
        self._options = options
        self._channels: dict[tuple[str, str], MeshChannel] = {}

    def get(self, address: str, lane: str = "") -> grpc.aio.Channel:
        """The channel to `address` (host:port); made at first use."""
        channel = self._channels.get((address, lane))
        if channel is None:
            channel = MeshChannel(grpc.aio.insecure_channel(address, options=self._options), self._base)
            self._channels[address, lane] = channel
        return cast(grpc.aio.Channel, channel)

    async def drop(self, address: str) -> None:
        """Forget the channels to `address`: the next `get` connects afresh, without back-off.

        Calls on them run on to their own end, and the connection goes with the last: closing a channel would raise
        CancelledError in whoever waits for an answer on it, as if that task had been cancelled.
        """
        for key in [key for key in self._channels if key[0] == address]:
            del self._channels[key]

    async def close(self) -> None:
        """Close them all; whoever still waits on a call gets CancelledError."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()


class MeshChannel(grpc.aio.Channel):
    """A grpc.aio channel whose calls carry our metadata."""

    def __init__(self, channel: grpc.aio.Channel, base: Metadata) -> None:
        self._channel = channel
        self._base = base

    def metadata(self, given: Any) -> Metadata:
        """Metadata of one call: what the caller gave, ours, and the current span's context."""
        pairs: Metadata = (*(given or ()), *self._base)
        span = trace.get_current_span()
        if not span.get_span_context().is_valid:
            return pairs
        traceparent, tracestate = inject(span)
        pairs = (*pairs, ("traceparent", traceparent))
        return (*pairs, ("tracestate", tracestate)) if tracestate else pairs

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio's, with metadata and the remaining budget."""
        return _UnaryCall(self, self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio's, with metadata."""
        return _StreamCall(self, self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio's, with metadata."""
        return _StreamCall(self, self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """As grpc.aio's, with metadata."""
        return _StreamCall(self, self._channel.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        """As grpc.aio's."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As grpc.aio's."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As grpc.aio's."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As grpc.aio's."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> MeshChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _StreamCall:
    """Calls of one method with a stream on either side."""

    def __init__(self, channel: MeshChannel, call_: Any) -> None:
        self._channel = channel
        self._call = call_

    def __call__(self, *requests: Any, metadata: Any = None, **kwargs: Any) -> Any:
        return self._call(*requests, metadata=self._channel.metadata(metadata), **kwargs)


class _UnaryCall(_StreamCall):
    """Calls of one unary method. With a budget that is spent nothing is sent: AioRpcError, DEADLINE_EXCEEDED."""

    def __call__(self, *requests: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        if timeout is None:
            timeout = call.remaining_s()
            if timeout == 0.0:  # which the transport would round up to a millisecond
                raise _spent()
        return super().__call__(*requests, timeout=timeout, **kwargs)


def _spent() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.DEADLINE_EXCEEDED, nothing, nothing, "the budget is spent", None)


def refused(exc: grpc.aio.AioRpcError) -> bool:
    """Whether the call failed because nothing listens at its address: the peer is gone, not just its connection."""
    return "onnection refused" in (exc.details() or "")


def task_cancelled() -> bool:
    """Whether a CancelledError means this task, not just a call that it awaits: grpc raises it for calls that were
    cancelled, and for those whose channel was closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def read(metadata: object) -> Mapping[str, str]:
    """The text values of received metadata by key (the last of a key counts)."""
    pairs = cast("Sequence[tuple[str, str | bytes]]", metadata or ())
    return {key: value for key, value in pairs if isinstance(value, str)}
