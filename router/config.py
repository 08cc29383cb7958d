"""The router's configuration. The one rule: every field has a default that serves, but for `id`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.config import LogConfig, Minor, TracingConfig
from shared.wire import PROTOCOL

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Address = Annotated[str, msgspec.Meta(pattern=r"^.+:[0-9]+$")]
Weight = Annotated[float, msgspec.Meta(ge=0)]


class QueueConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may wait, and how long."""

    capacity: Positive = 1024  # requests
    capacity_mb: Positive = 256  # their size
    per_tenant_share: Share = 0.5  # of the capacity, for one tenant
    ttl_ms: Positive = 600_000  # longest wait, however large the budget
    no_replica_wait_ms: int = 2_000  # how long a request waits for a replica to come back before it is refused
    output_weight: Weight = 1.0  # of a possible output token in a request's cost; a prefill token counts 1
    would_miss_margin: Annotated[float, msgspec.Meta(ge=1)] = 2.0  # refuse if the expected wait is this many budgets


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How work goes out."""

    max_items: Positive = 64  # in one SubmitBatch
    connect_ms: Positive = 500  # to reach a worker; after that the batch was never written
    timeout_ms: Positive = 5_000  # for a batch's answer; after that its outcome is unknown
    prefill_tokens: Positive = 16_384  # queued at one worker before more of it waits here


class WeightsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weight of each score (`router.scorers`; `preferred`: the submission names the worker)."""

    load: Weight = 0.5
    prefill: Weight = 0.3
    kv: Weight = 0.2
    preferred: Weight = 1.0


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is believed of workers, and for how long."""

    max_report_age_ms: Positive = 7_000  # no decision reads an older report
    forget_s: Positive = 60  # a lost worker that is registered nowhere is known this much longer


class AssetsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files relayed to gateways."""

    cache_mb: Positive = 256
    max_file_mb: Positive = 128


class RouterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One router process."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    grpc_listen: str = "127.0.0.1:0"
    admin_listen: str = "127.0.0.1:0"
    ops_listen: str = "127.0.0.1:0"
    advertise: str = ""  # host under which others reach this process; empty: the one it listens on
    redis_url: str = ""  # empty: no state store, workers are the static ones
    workers: tuple[Address, ...] = ()  # static addresses, host:port
    drain_settle_ms: Natural = 1_000  # of a drain in which what is new is still taken, for peers to notice
    drain_grace_ms: Positive = 30_000  # after that, for what is queued; it is handed back where another router serves
    protocol_minor: Minor = PROTOCOL.minor
    queue: QueueConfig = QueueConfig()
    batch: BatchConfig = BatchConfig()
    weights: WeightsConfig = WeightsConfig()
    fleet: FleetConfig = FleetConfig()
    assets: AssetsConfig = AssetsConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()
