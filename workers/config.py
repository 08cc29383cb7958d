"""The worker's configuration. The one rule: every field has a default that serves, but for `id` and `model.path`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.config import LogConfig, Minor, TracingConfig
from shared.wire import PROTOCOL
from workers.engine.options import EngineOptions

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Objective = Annotated[float, msgspec.Meta(ge=0, le=60_000)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is served. Empty name and version: as the artefact says."""

    path: str  # artefact directory
    name: str = ""
    version: str = ""


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine process. Zero means "decide from the machine and the model"."""

    device: str = "cpu"
    kernel_mode: Literal["fused", "standard"] = "fused"
    threads: Natural = 0  # intra-op threads
    max_batch_tokens: Positive = 64  # tokens of one step; on two CPUs a chunk of 64 holds streams up for 0.1 s
    itl_slo_ms: Objective = 0.0  # between two tokens of a stream: prefills beside it are cut to it; 0 = off
    max_seqs: Positive = 32  # sequences running at once
    max_held: Positive = 4096  # sequences held, waiting or running
    max_context: Natural = 0
    kv_blocks: Natural = 0  # blocks of 16 tokens
    kv_memory_fraction: Share = 0.3  # share of the memory left beside the weights
    memory_limit_mb: Natural = 0
    module: Text = "workers.engine.process"
    flags: dict[str, str | int | float] = {}  # further ones for `module`

    def options(self, model: str) -> EngineOptions:
        """As the engine process takes them."""
        own = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in ("module", "flags")}
        return EngineOptions(model=model, **own)


class DoorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the door takes on and keeps."""

    max_requests: Positive = 64
    kv_overcommit: Annotated[float, msgspec.Meta(ge=1)] = 2.0  # admitted need over the size of the KV pool
    retained_mb: Positive = 64  # kept for one gateway until acknowledged
    slow_reader_ms: Positive = 30_000  # how long a request is paused before it ends
    orphan_grace_ms: Positive = 10_000  # how long outputs wait for a stream
    tombstone_ms: Positive = 60_000  # how long ended attempts are refused
    window_messages: Positive = 256  # unacknowledged on one stream
    window_kb: Positive = 1024


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker."""

    id: Text
    model: ModelConfig
    grpc_listen: str = "127.0.0.1:0"
    admin_listen: str = "127.0.0.1:0"
    ops_listen: str = "127.0.0.1:0"
    advertise: str = ""  # host under which others reach this process; empty: the one it listens on
    redis_url: str = ""  # empty: not registered anywhere, found by routers' static lists
    drain_settle_ms: Natural = 1_000  # of a drain in which what is new is still taken, for routers to notice
    drain_release: bool = True  # hand back what runs, unless this is the last replica; else let it finish
    drain_grace_ms: Positive = 600_000  # for what runs to finish; then it is handed back
    protocol_minor: Minor = PROTOCOL.minor
    engine: EngineConfig = EngineConfig()
    door: DoorConfig = DoorConfig()
    tracing: TracingConfig = TracingConfig()
    log: LogConfig = LogConfig()
