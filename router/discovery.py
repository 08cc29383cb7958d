"""Finds workers and keeps one Watch stream to each.

Owns the streams. The one rule: registrations and the configuration only say where to connect; whether a worker lives
and what it serves comes from its own stream. A worker is forgotten a while after nobody names it and it
lives no more.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc

from router.config import FleetConfig
from router.fleet import SERVING, Fleet, Worker
from router.metrics import Metrics
from shared.channels import refused, task_cancelled
from shared.clock import Clock
from shared.errors import from_rpc
from shared.ids import Identity
from shared.logging import canonical
from shared.peers import Peers
from shared.rpc import Channels
from trunkline.worker.v1 import worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

LANE: Final = "watch"  # reports never queue behind batches
LOOK_S: Final = 1.0
RETRY_S: Final = (0.1, 1.0)  # first and longest pause before a stream is opened again
SETTLE_S: Final = 2.0

WatchCall = grpc.aio.UnaryStreamCall[worker_pb2.WatchRequest, worker_pb2.WatchResponse]


class Discovery:
    """See the module. `run` is to be one of the tasks of `tasks`, in which the streams run too."""

    def __init__(
        self,
        *,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        peers: Peers,
        fleet: Fleet,
        channels: Channels,
        identity: Identity,
        metrics: Metrics,
        config: FleetConfig,
    ) -> None:
        self._clock = clock
        self._tasks = tasks
        self._peers = peers
        self._fleet = fleet
        self._channels = channels
        self._identity = identity
        self._metrics = metrics
        self._config = config
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._needed_at: dict[str, float] = {}  # when somebody named the worker, or it lived, last
        self._tried: dict[str, asyncio.Event] = {}
        self._calls: dict[str, WatchCall] = {}
        fleet.observe(self._fleet_changed)

    async def run(self) -> None:
        """Follow whoever is named, until cancelled."""
        while True:
            await self.look()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._peers.changed()
            except TimeoutError:
                pass  # time to forget is time that passes

    async def look(self) -> None:
        """Open streams to those that are new, and close those to the forgotten."""
        now = self._clock.monotonic()
        named = {peer.address for peer in self._peers.snapshot().values()}
        living = {worker.address for worker in self._fleet.workers() if worker.state in SERVING}
        self._needed_at.update(dict.fromkeys(sorted(named | living), now))
        for address in sorted(named - self._streams.keys()):
            self._tried[address] = asyncio.Event()
            self._streams[address] = self._tasks.create_task(self._follow(self._fleet.add(address)))
        for address in [a for a, at in self._needed_at.items() if now - at > self._config.forget_s]:
            await self._forget(address)

    async def settled(self) -> None:
        """Returns when every stream opened so far has said something or failed, at the latest after `SETTLE_S`."""
        try:
            async with asyncio.timeout(SETTLE_S):
                for tried in list(self._tried.values()):
                    await tried.wait()
        except TimeoutError:
            _log.warning("some workers have not answered yet")

    async def _follow(self, worker: Worker) -> None:
        """Keep a stream open until cancelled."""
        pause_s = RETRY_S[0]
        try:
            while True:
                pause_s = RETRY_S[0] if await self._watch(worker) else min(2 * pause_s, RETRY_S[1])
                self._tried[worker.address].set()
                await asyncio.sleep(pause_s)
                if worker.state not in SERVING:
                    # Its calls are lost with it, and a fresh channel does not wait for the old one's back-off.
                    await self._channels.drop(worker.address)
        finally:
            self._fleet.remove(worker)

    async def _watch(self, worker: Worker) -> bool:
        """Reads one stream to its end; whether anything came on it."""
        major, minor = self._identity.protocol
        call = self._calls[worker.address] = worker_pb2_grpc.WorkerServiceStub(
            self._channels.get(worker.address, LANE)
        ).Watch(
            worker_pb2.WatchRequest(
                router_id=self._identity.id,
                router_incarnation=self._identity.incarnation,
                protocol_major=major,
                protocol_minor=minor,
            )
        )
        heard = gone = False
        why = "ended"
        try:
            async for report in call:
                self._heard(worker, report, first=not heard)
                heard = True
        except grpc.aio.AioRpcError as exc:
            why, gone = from_rpc(exc).reason.value, refused(exc)
        except asyncio.CancelledError:
            if task_cancelled():
                raise
            why = "silent"
        finally:
            call.cancel()
            del self._calls[worker.address]
        self._fleet.broke(worker, refused=gone)
        self._broke(worker, why, heard)
        return heard

    def _heard(self, worker: Worker, report: worker_pb2.WatchResponse, *, first: bool) -> None:
        self._fleet.reported(worker, report)
        if first:
            canonical(_log, "worker found", worker=worker.worker_id, address=worker.address)
            self._tried[worker.address].set()

    def _broke(self, worker: Worker, why: str, heard: bool) -> None:
        self._metrics.watch_breaks.inc()
        if heard:
            canonical(_log, "worker stream broke", worker=worker.worker_id, address=worker.address, why=why)

    def _fleet_changed(self, topology: bool) -> None:
        """A stream on which a worker fell silent is given up: it may be half open."""
        for worker in self._fleet.workers() if topology else ():
            if worker.state == "lost" and worker.address in self._calls:
                self._calls[worker.address].cancel()

    async def _forget(self, address: str) -> None:
        self._streams.pop(address).cancel()
        del self._needed_at[address], self._tried[address]
        await self._channels.drop(address)
