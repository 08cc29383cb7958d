"""What this worker is at the moment: its artefact, its engine's life, what it tells others of them.

Owns the incarnation. The one rule: everything that changes with the engine changes here, in one turn of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shared.ids import Rng, incarnation_text, new_incarnation
from shared.lifecycle import BUILD, Lifecycle
from trunkline.common.v1 import common_pb2
from trunkline.worker.v1 import worker_pb2
from workers.assets import Assets
from workers.config import WorkerConfig
from workers.door.door import Door
from workers.door.execution import EngineBroken
from workers.door.intake import Served
from workers.door.ledger import Capacity
from workers.engine import messages as m
from workers.supervisor import Send


class Worker:
    """The engine's user (`supervisor.User`), and the author of `Describe`, versions and registration."""

    def __init__(
        self,
        config: WorkerConfig,
        assets: Assets,
        door: Door,
        lifecycle: Lifecycle,
        lag_s: Callable[[], float],
        rng: Rng,
    ) -> None:
        """`lag_s`: lateness of this process's own loop, seconds."""
        self._config = config
        self._assets = assets
        self._door = door
        self._lifecycle = lifecycle
        self._lag_s = lag_s
        self._rng = rng
        self._served: Served | None = None  # now, or last
        self._ready: m.Ready | None = None

    def engine_starts(self, stage: str, fraction: float) -> None:
        """See `supervisor.User`."""
        self._lifecycle.set_ready(False, f"the engine starts: {stage} {fraction:.0%}")

    def engine_ready(self, ready: m.Ready, send: Send) -> None:
        """See `supervisor.User`."""
        served = self._describe(ready)
        door = self._config.door
        capacity = Capacity(door.max_requests, self._config.engine.max_held, int(served.kv_tokens * door.kv_overcommit))
        self._served, self._ready = served, ready
        self._lifecycle.identity = replace(self._lifecycle.identity, incarnation=served.incarnation)
        self._door.engine_up(served, capacity, send)
        self._lifecycle.set_model(self._assets.model, True)
        self._lifecycle.set_ready(True)

    def engine_says(self, said: m.StepOut | m.Tick) -> None:
        """See `supervisor.User`."""
        self._door.engine.says(said)

    def engine_stalled(self) -> bool:
        """See `supervisor.User`."""
        return self._door.engine.stalled(self._lag_s())

    def engine_ended(self, why: str) -> None:
        """See `supervisor.User`."""
        self._door.engine_down(why)
        self._lifecycle.set_ready(False, why)

    def versions(self) -> list[common_pb2.ModelVersion]:
        """What is served; known once a first engine was ready."""
        if self._served is None or self._ready is None:
            return []
        return [self._assets.described(self._served, self._ready, taking=self._taking)]

    @property
    def _taking(self) -> bool:
        return self._door.served is not None and not self._door.draining

    def description(self) -> worker_pb2.DescribeResponse:
        """For Describe."""
        ready, protocol = self._ready, self._lifecycle.identity.protocol
        return worker_pb2.DescribeResponse(
            worker_id=self._config.id,
            incarnation=self._door.incarnation,
            build=BUILD,
            protocol_major=protocol.major,
            protocol_minor=protocol.minor,
            versions=self.versions(),
            features=sorted(protocol.features),
            kernel_mode=ready.kernel_mode if ready else "",
            numeric_path=ready.path if ready else "",
            device=self._config.engine.device,
            tensor_parallel_size=self._assets.manifest.tensor_parallel,
            pipeline_parallel_size=self._assets.manifest.pipeline_parallel,
            kv_tokens=self._served.kv_tokens if self._served else 0,
            max_requests=self._config.door.max_requests,
        )

    def registration(self) -> dict[str, str]:
        """Fields of its registration that change with the engine, or when it drains."""
        return {"incarnation": incarnation_text(self._door.incarnation), "taking": "1" if self._taking else "0"}

    def gauges(self) -> dict[str, float]:
        """For the admin service."""
        load = self._door.loads.current()
        return {
            "requests_held": self._door.held,
            "running": load.running,
            "waiting": load.waiting,
            "kv_tokens_free": load.kv_tokens_free,
            "kv_tokens_cached": load.kv_tokens_cached,
            "kv_tokens_total": load.kv_tokens_total,
        }

    def _describe(self, ready: m.Ready) -> Served:
        manifest = self._assets.manifest
        if (ready.artefact_hash, ready.tokenizer_hash) != (manifest.artefact_hash, manifest.tokenizer_hash):
            raise EngineBroken("the engine has loaded another artefact than the door")
        return Served(
            incarnation=new_incarnation(self._rng),
            artefact_hash=ready.artefact_hash,
            tokenizer_hash=ready.tokenizer_hash,
            features=self._lifecycle.identity.protocol.features,
            vocab_size=ready.vocab_size,
            max_context=ready.max_context,
            block_size=ready.block_size,
            kv_tokens=ready.kv_blocks * ready.block_size,
            vector_bytes=4 * ready.hidden_size,
            sequences=self._config.engine.max_held,
        )
