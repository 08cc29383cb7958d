"""What the HTTP faces need of the gateway behind them. Interfaces only; `gateway.generation` is the real thing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from gateway.auth import Principal
from gateway.ledger import Headroom
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

Operation = Literal["chat", "text_completion", "embeddings"]


class Generation(Protocol):
    """One admitted generation."""

    @property
    def request_id(self) -> str:
        """32 hexadecimal digits."""
        ...

    @property
    def headroom(self) -> Headroom | None:
        """What its admission left of the limits."""
        ...

    def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Started, then deltas and heartbeats, then Finished; or raises TrunklineError."""
        ...


class Generations(Protocol):
    """Where generations come from."""

    def start(
        self,
        spec: inference_pb2.GenerationSpec,
        principal: Principal,
        *,
        operation: Operation,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> AbstractAsyncContextManager[Generation]:
        """A scope that admits on entry (raises TrunklineError) and cancels on exit what is not finished."""
        ...


class Models(Protocol):
    """What is served."""

    def versions(self, model: str | None = None) -> Sequence[common_pb2.ModelVersion]:
        """All versions, or those of one model."""
        ...
