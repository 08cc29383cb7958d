"""The router's numbers, as Prometheus scrapes them.

Owns the names `trunkline_router_*`. The one rule: label values come from fixed sets (reasons, outcomes, states), never
from requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.fleet import STATES

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All of them, in one registry. submitted = the sum of ended + pending (INV-1)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.submitted = Counter("trunkline_router_submitted", "Submissions taken", registry=registry)
        self.joined = Counter("trunkline_router_joined", "Submit calls that joined a pending one", registry=registry)
        self.ended = Counter("trunkline_router_ended", "Submissions by how they ended", ["outcome"], registry=registry)
        self.returned = Counter(
            "trunkline_router_returned", "Submissions put back into the queue, by why", ["why"], registry=registry
        )
        self.cancels = Counter(
            "trunkline_router_cancels", "Cancels for workers, by what became of them", ["outcome"], registry=registry
        )
        self.watch_breaks = Counter("trunkline_router_watch_breaks", "Broken Watch streams", registry=registry)
        self.queue_s = Histogram(
            "trunkline_router_queue_seconds", "Waiting in the queue", buckets=_SECONDS, registry=registry
        )
        self.dispatch_s = Histogram(
            "trunkline_router_dispatch_seconds", "From decision to admission", buckets=_SECONDS, registry=registry
        )
        self.batch_items = Histogram(
            "trunkline_router_batch_items", "Submissions in a batch", buckets=_ITEMS, registry=registry
        )
        self.queue_length = Gauge("trunkline_router_queue_length", "Submissions queued", registry=registry)
        self.in_flight = Gauge(
            "trunkline_router_in_flight", "Submissions given to a worker, unanswered", registry=registry
        )
        self.workers = Gauge("trunkline_router_workers", "Workers by state", ["state"], registry=registry)

    def gauge(
        self, *, queue_length: Callable[[], int], in_flight: Callable[[], int], states: Callable[[], Mapping[str, int]]
    ) -> None:
        """Where the gauges read when they are scraped."""
        self.queue_length.set_function(queue_length)
        self.in_flight.set_function(in_flight)
        for state in STATES:
            self.workers.labels(state).set_function(partial(_count, states, state))


def _count(states: Callable[[], Mapping[str, int]], state: str) -> int:
    return states().get(state, 0)
