"""gRPC servers and channels as every service uses them: options, our scope around handlers, health, reflection.

The one rule: servers come from `make_server`, channels from `Channels`; retries between services are ours, never the
transport's. Keepalive agrees on both ends: a client that pings more often than its server allows loses all its calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry import trace

from shared import channels
from shared.call import budget as budget
from shared.call import current as current
from shared.call import mark_work_done as mark_work_done
from shared.call import remaining_s as remaining_s
from shared.clock import SYSTEM_CLOCK, Clock
from shared.ids import Identity as Identity
from shared.interceptor import Around
from shared.lifecycle import Lifecycle

INTERNAL_MESSAGE_BYTES: Final = (16 << 20) + (64 << 10)
PUBLIC_MESSAGE_BYTES: Final = (4 << 20) + (64 << 10)

Options = tuple[tuple[str, Any], ...]

_KEEPALIVE: Final[Options] = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_SERVER: Final[Options] = (
    *_KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A port that is taken must be noticed; grpc shares it silently by default.
    ("grpc.so_reuseport", 0),
)

PUBLIC_SERVER_OPTIONS: Final[Options] = (
    *_SERVER,
    ("grpc.max_receive_message_length", PUBLIC_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
)
INTERNAL_SERVER_OPTIONS: Final[Options] = (
    *_SERVER,
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
)
CLIENT_OPTIONS: Final[Options] = (
    *_KEEPALIVE,
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Channels with equal arguments would share a connection, lanes included, and a dropped one's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class Channels(channels.Channels):
    """Channels with our options; see `shared.channels`."""

    def __init__(self, identity: Identity, tracer: trace.Tracer) -> None:
        super().__init__(identity, tracer, CLIENT_OPTIONS)


def make_server(
    *, tracer: trace.Tracer, public: bool, identity: Identity | None = None, clock: Clock = SYSTEM_CLOCK
) -> grpc.aio.Server:
    """A server with our scope around its handlers; add servicers, `bind` it, start it.

    `public` starts traces and steers client retries; otherwise the protocol version is checked.
    """
    return grpc.aio.server(
        interceptors=[Around(tracer, clock, public=public)],
        options=PUBLIC_SERVER_OPTIONS if public else INTERNAL_SERVER_OPTIONS,
    )


def add_health(server: grpc.aio.Server, lifecycle: Lifecycle) -> None:
    """Serve grpc.health.v1 from the lifecycle: "" is the process; service names and "model/<name>" beside it."""
    health_pb2_grpc.add_HealthServicer_to_server(_Health(lifecycle), server)


def add_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve reflection for these full service names, itself and health."""
    names = (*service_names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


_STATUS: Final = {
    True: health_pb2.HealthCheckResponse.SERVING,
    False: health_pb2.HealthCheckResponse.NOT_SERVING,
    None: health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
}


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        serving = self._lifecycle.serving(request.service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=_STATUS[serving])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while True:
            version = self._lifecycle.version
            status = _STATUS[self._lifecycle.serving(request.service)]
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await self._lifecycle.changed(version)
