"""What requests work with, and what they are held to. The one rule: `gateway.app` alone puts them together."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import trace

from gateway.admission import Admission
from gateway.catalog import Catalog
from gateway.custody import Custody
from gateway.delivery import Manners
from gateway.table import Table
from gateway.telemetry import Telemetry
from gateway.upstream import Upstream
from shared.clock import Clock
from shared.ids import Identity, Rng
from shared.lifecycle import Lifecycle
from shared.records import Records


@dataclass(frozen=True)
class RequestLimits:
    """What any request is held to."""

    default_deadline_ms: int = 600_000
    max_deadline_ms: int = 3_600_000
    max_in_flight: int = 4096


@dataclass(frozen=True)
class Parts:
    """What requests work with."""

    identity: Identity
    clock: Clock
    rng: Rng
    lifecycle: Lifecycle
    catalog: Catalog
    admission: Admission
    records: Records
    upstream: Upstream
    table: Table
    tracer: trace.Tracer
    telemetry: Telemetry
    limits: RequestLimits
    manners: Manners
    custody: Custody
