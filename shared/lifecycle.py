"""A process's life: readiness, drain, signals, ports, exit codes, and the admin service that shows and steers them.

The one rule: readiness goes off first; a moment later, when peers and balancers have noticed, what is new is refused;
then work ends, then the process. `run` turns a StartError into one plain line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import grpc
import uvloop

from shared.clock import SYSTEM_CLOCK, Clock
from shared.errors import StartError
from shared.ids import BUILD as BUILD
from shared.ids import Identity, incarnation_text
from shared.ports import PortTaken as PortTaken
from shared.ports import bind as bind
from shared.ports import listen as listen
from trunkline.admin.v1 import admin_pb2, admin_pb2_grpc


class Lifecycle:
    """Readiness and drain of one process. Health names: "" (the process), full service names, "model/<name>"."""

    def __init__(
        self,
        identity: Identity,
        *,
        services: Iterable[str] = (),
        clock: Clock = SYSTEM_CLOCK,
        settle_s: float = 0.0,
    ) -> None:
        """`settle_s`: for how long a drain still takes what is new, so that who has not noticed it yet is served."""
        self.identity = identity
        self.ready = False
        self.draining = False
        self.detail = "starting"
        self.grace_ms = 0  # what the drain was asked for; 0: the configured time
        self._services = frozenset(("", *services))
        self._models: dict[str, bool] = {}
        self._clock = clock
        self._started_at = clock.monotonic()
        self._settle_s = settle_s
        self._drain_at = 0.0
        self.version = 0  # counts the changes
        self._change = asyncio.Event()

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return self._clock.monotonic() - self._started_at

    def set_ready(self, ready: bool, detail: str = "") -> None:
        """Set readiness; `detail` says why it is off or only degraded. A draining process stays not ready."""
        if not self.draining:
            self._update(ready, detail)

    def set_model(self, name: str, serving: bool | None) -> None:
        """Set the health of "model/<name>"; None forgets it."""
        if serving is None:
            self._models.pop(name, None)
        else:
            self._models[name] = serving
        self._notify()

    def serving(self, name: str) -> bool | None:
        """Health of a name; None for an unknown one."""
        if name in self._services:
            return self.ready
        model = self._models.get(name.removeprefix("model/")) if name.startswith("model/") else None
        return None if model is None else model and self.ready

    def drain(self, grace_ms: int = 0) -> None:
        """Turn readiness off and wake `wait_drain`. Idempotent."""
        if not self.draining:
            self.draining = True
            self.grace_ms = grace_ms
            self._drain_at = self._clock.monotonic()
            self._update(False, "draining")

    @property
    def refusing(self) -> bool:
        """It drains, and the time for others to notice is over: what is new is refused."""
        return self.draining and self._clock.monotonic() - self._drain_at >= self._settle_s

    async def settled(self) -> None:
        """Return when it is `refusing`."""
        await self.wait_drain()
        while not self.refusing:  # noqa: ASYNC110 - the clock says it, and nobody else
            await asyncio.sleep(self._drain_at + self._settle_s - self._clock.monotonic())

    async def wait_drain(self) -> None:
        """Return once draining has begun."""
        while not self.draining:
            await self.changed()

    async def changed(self, since: int | None = None) -> None:
        """Return at the next change of anything here, or at once if `version` is no longer `since`.

        Who acts between reading and waiting passes the version it read, or misses what changed meanwhile.
        """
        if since is None or since == self.version:
            await self._change.wait()

    def install_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """SIGTERM and SIGINT begin the drain; a second one ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, loop, number)

    def _signalled(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        if not self.draining:
            self.drain()
            return
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _update(self, ready: bool, detail: str) -> None:
        if (ready, detail) != (self.ready, self.detail):
            self.ready, self.detail = ready, detail
            self._notify()

    def _notify(self) -> None:
        self.version += 1
        change, self._change = self._change, asyncio.Event()
        change.set()


def run(main: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run a service's main on uvloop; its exit code. A StartError becomes one line on stderr and 1."""
    try:
        return uvloop.run(main()) or 0
    except StartError as exc:
        return _refused(exc)
    except BaseExceptionGroup as group:
        start_errors = group.subgroup(StartError)
        if start_errors is None:
            raise
        return _refused(_first(start_errors))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def _refused(error: BaseException) -> int:
    sys.stderr.write(f"{error}\n")
    return 1


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """GetStatus and Drain, the same for every role. `gauges` are the role's own numbers, read at each call."""

    def __init__(self, lifecycle: Lifecycle, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._lifecycle = lifecycle
        self._gauges = gauges

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.GetStatusResponse:
        """Say what the process is and how it is."""
        life = self._lifecycle
        return admin_pb2.GetStatusResponse(
            role=life.identity.role,
            id=life.identity.id,
            incarnation=incarnation_text(life.identity.incarnation),
            build=BUILD,
            protocol=life.identity.protocol.text,
            uptime_s=life.uptime_s,
            ready=life.ready,
            draining=life.draining,
            detail=life.detail,
            gauges=dict(self._gauges()),
        )

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DrainResponse:
        """Begin to drain."""
        self._lifecycle.drain(request.grace_ms)
        return admin_pb2.DrainResponse()
