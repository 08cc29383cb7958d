"""What one router hears: absolute load whenever it changes, at most every 10 ms, and a heartbeat.

Pure, in the manner of `stream`: whoever writes asks `next`, and sleeps until `due` or until woken. The one rule: the
echo and the loads of a report are read in the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shared.clock import Clock
from shared.wire import HEARTBEAT_S, IDLE_HEARTBEAT_S
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2
from workers.door.door import Door

CHANGE_S = 0.010

Versions = Callable[[], Sequence[common_pb2.ModelVersion]]
"""What is served now, with its readiness."""


class Watch:
    """One router's stream."""

    def __init__(
        self,
        door: Door,
        clock: Clock,
        worker_id: str,
        versions: Versions,
        router_incarnation: int,
        wake: Callable[[], None],
    ) -> None:
        self._door = door
        self._clock = clock
        self._worker_id = worker_id
        self._versions = versions
        self._router = router_incarnation
        self._wake = wake
        self._told = worker_pb2.WatchResponse()
        self._told_versions: list[common_pb2.ModelVersion] = []
        self._told_at = -math.inf
        self._dirty = True

    def changed(self) -> None:
        """Something may be different."""
        if not self._dirty:
            self._dirty = True
            self._wake()

    @property
    def done(self) -> bool:
        """The worker has nothing more to report."""
        return self._door.closed

    @property
    def due(self) -> float:
        """Seconds on the clock from which `next` may have something to say."""
        heartbeat_at = self._told_at + self._period_s
        return min(heartbeat_at, self._told_at + CHANGE_S) if self._dirty else heartbeat_at

    def next(self) -> worker_pb2.WatchResponse | None:
        """A report if one is due: because of a change, or as a heartbeat."""
        now = self._clock.monotonic()
        if now < self.due:
            return None
        self._dirty = False
        state, versions = self._state(), list(self._versions())
        if state == self._told and versions == self._told_versions and now < self._told_at + self._period_s:
            return None
        report = self._with_ages(state)
        if versions != self._told_versions:
            report.versions.extend(versions)
        self._told, self._told_versions, self._told_at = state, versions, now
        report.heartbeat_ms = int(self._period_s * 1e3)
        return report

    @property
    def _period_s(self) -> float:
        return HEARTBEAT_S if any(load.requests for load in self._told.loads) else IDLE_HEARTBEAT_S

    def _state(self) -> worker_pb2.WatchResponse:
        """What counts as a change."""
        return worker_pb2.WatchResponse(
            worker_id=self._worker_id,
            incarnation=self._door.incarnation,
            loads=[self._door.loads.current()],
            echo_batch_seq=self._door.routers.echo(self._router),
            draining=self._door.draining,
        )

    def _with_ages(self, state: worker_pb2.WatchResponse) -> worker_pb2.WatchResponse:
        report = worker_pb2.WatchResponse()
        report.CopyFrom(state)
        report.engine_tick_age_ms = self._door.engine.pulse.tick_age_ms
        report.oldest_waiting_ms = int(self._door.loads.oldest_waiting_ms)
        report.max_step_ms = math.ceil(self._door.loads.engine.max_step_ms)
        return report
