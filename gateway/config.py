"""The gateway's configuration. The one rule: every field has a default that serves, but for `id` and `keys_file`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.config import LogConfig, Minor, TracingConfig
from shared.wire import PROTOCOL

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one gateway holds, and how hard it tries."""

    in_flight: Positive = 4096  # requests
    slow_reader_ms: Positive = 30_000  # for how long a client may take nothing of its stream
    heartbeat_ms: Positive = 10_000  # of silence before a stream says that it lives
    resume_window_ms: Positive = 60_000  # of a resumable request that names none
    idempotency_ttl_s: Positive = 86_400  # for which a key stands for its request
    owner_gone_ms: Positive = 15_000  # of a gateway's silence, after which what it owned is swept
    fruitless_attempts: Positive = 8  # in a row, without a new token
    worker_losses: Positive = 2  # while a request runs, before it is suspected to cause them
    moves_burst: Positive = 1024  # requests moved off lost workers at once
    moves_per_s: Positive = 32


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One gateway process."""

    id: str
    keys_file: str
    grpc_listen: str = "127.0.0.1:50051"
    http_listen: str = "127.0.0.1:8000"
    internal_listen: str = "127.0.0.1:0"  # other gateways, admin, health
    redis_url: str = "redis://127.0.0.1:6379/0"  # serving goes on while it is away
    routers: list[str] = []  # host:port; those that register are found besides
    advertise: str = ""  # host that other gateways reach this one at; empty: the one it listens on
    default_deadline_ms: Positive = 600_000
    max_deadline_ms: Positive = 3_600_000
    drain_settle_ms: Natural = 2_000  # of a drain in which what is new is still taken, for balancers to notice
    drain_grace_ms: Positive = 600_000  # after that, for what runs; what is resumable moves at once
    protocol_minor: Minor = PROTOCOL.minor
    limits: LimitsConfig = LimitsConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()
