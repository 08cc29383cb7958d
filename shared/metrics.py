"""Prometheus metrics: the exposition, and the histograms whose names and buckets telemetry conventions fix.

The one rule: labels are bounded (models, reasons, roles), never ids, tenants or text.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, Histogram, generate_latest

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

DURATION_BUCKETS: Final = tuple(0.01 * 2**i for i in range(14))
FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BUCKETS: Final = tuple(4.0**i for i in range(14))


def gen_ai(name: str, help_: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
    """A histogram of the GenAI conventions under its Prometheus name: `gen_ai.server.request.duration` becomes
    `gen_ai_server_request_duration_seconds`; only token counts have no unit. Once per process and name."""
    unit = "" if name.endswith(".token.usage") else "seconds"
    return Histogram(name.replace(".", "_"), help_, labels, buckets=buckets, unit=unit)


def exposition() -> bytes:
    """Everything registered in this process, as text."""
    return generate_latest(REGISTRY)
