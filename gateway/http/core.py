"""What the HTTP faces need of the gateway behind them. Interfaces only; `gateway.generation` and its neighbours are the
real things."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from gateway.auth import Principal
from gateway.kit import Kit
from gateway.ledger import Headroom
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

Operation = Literal["chat", "text_completion"]


class Generation(Protocol):
    """One admitted generation."""

    on_stuck: Callable[[], object]  # called once if its client takes nothing for too long
    whole: bool  # its client gets all of it at once, at the end

    @property
    def resumable(self) -> bool:
        """Its cursors are of use: a client that is cut off may come back with one."""
        ...

    @property
    def opened(self) -> Mapping[int, int]:
        """Choices that the client has seen before, and how many characters of each."""
        ...

    @property
    def id(self) -> str:
        """32 hexadecimal digits."""
        ...

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        ...

    @property
    def headroom(self) -> Headroom | None:
        """What its admission left of the limits."""
        ...

    def events(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Started, then deltas and heartbeats, then Finished; or raises TrunklineError."""
        ...


class Resumed(Generation, Protocol):
    """A generation that was come back to."""

    @property
    def operation(self) -> Operation:
        """What it began as."""
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
        """A scope that admits on entry (raises TrunklineError); on exit it cancels what is not over or resumable."""
        ...

    def resume(self, tenant: str, request_id: str, cursor: str) -> AbstractAsyncContextManager[Resumed]:
        """A scope of one that is there, from a cursor on (empty: from its beginning). Raises TrunklineError."""
        ...


class Embedding(Protocol):
    """One admitted request to embed."""

    async def answer(self) -> inference_pb2.EmbedResponse:
        """Wait for the end. Raises TrunklineError."""
        ...


class Embeddings(Protocol):
    """Where embeddings come from."""

    def start(
        self,
        request: inference_pb2.EmbedRequest,
        principal: Principal,
        *,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> AbstractAsyncContextManager[Embedding]:
        """As for generations."""
        ...


class Models(Protocol):
    """What is served."""

    def versions(self, model: str | None = None) -> Sequence[common_pb2.ModelVersion]:
        """All versions, or those of one model, newest first."""
        ...

    def choose(self, model: str) -> common_pb2.ModelVersion:
        """The version that takes a request. Raises MODEL_UNKNOWN."""
        ...

    async def kit(self, version: common_pb2.ModelVersion) -> Kit:
        """Tokenizer and template of a version. Raises NO_REPLICA."""
        ...
