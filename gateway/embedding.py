"""One request to embed texts: its inputs, the pieces of its result on lane BULK, its answer.

The one rule: encode work is retried whole, so a new attempt may begin the result again; bytes that differ from those
already here are refused, never mixed.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

from gateway import prompt, submission, validate
from gateway.attempt import Attempt
from gateway.auth import Principal
from gateway.kit import Kit
from gateway.parts import Parts
from gateway.request import Request
from gateway.telemetry import Story
from gateway.transcript import Fit, Run, Stop
from shared import rpc
from shared.errors import Reason, TrunklineError, Violation
from shared.wire import Stamp
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2
from trunkline.router.v1 import router_pb2
from trunkline.worker.v1 import worker_pb2

_FLOAT_BYTES: Final = 4


class Embeddings:
    """Where embeddings come from."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @asynccontextmanager
    async def start(
        self,
        request: inference_pb2.EmbedRequest,
        principal: Principal,
        *,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> AsyncIterator[Embedding]:
        """A scope that admits on entry (raises TrunklineError) and cancels on exit; see `Generations.start`."""
        named = [ms for ms in (budget_ms, request.deadline_ms) if ms]
        embedding = Embedding(
            self._parts, principal, request, budget_ms=min(named, default=None), trace_parent=trace_parent
        )
        async with embedding.scope():
            yield embedding


class Embedding(Request):
    """See the module. Also the work of its attempts."""

    lane = worker_pb2.LANE_BULK

    def __init__(
        self,
        parts: Parts,
        principal: Principal,
        asked: inference_pb2.EmbedRequest,
        *,
        budget_ms: int | None,
        trace_parent: tuple[str, str],
    ) -> None:
        super().__init__(
            parts, principal, asked.model, operation="embeddings", budget_ms=budget_ms, trace_parent=trace_parent
        )
        self._asked = asked
        self._base = router_pb2.SubmitRequest()
        self._result = Pieces(0)

    async def answer(self) -> inference_pb2.EmbedResponse:
        """Wait for the end. Raises the TrunklineError it ends with."""
        await self.ended.wait()
        if self.error is not None:
            if self.ran:
                rpc.mark_work_done()
            raise self.error
        self.told_receipt = self.receipt()
        width = self.version.embedding_size
        values = struct.unpack(f"<{len(self._result.data) // _FLOAT_BYTES}f", self._result.data)
        vectors = [values[at : at + width] for at in range(0, len(values), width)]
        return inference_pb2.EmbedResponse(
            embeddings=[inference_pb2.Embedding(values=vector) for vector in vectors],
            usage=self.usage,
            request_id=self.id,
            receipt=self.told_receipt,
        )

    async def _prepare(self) -> int:
        asked, parts = self._asked, self.parts
        self.version = parts.catalog.choose(asked.model)
        began = parts.clock.monotonic()
        validate.validate_embed(asked, self.version)
        self.stages.admit_s += parts.clock.monotonic() - began
        with self.stage("tokenise"):
            kit = await parts.catalog.kit(self.version)
            size = sum(len(item.text) + 4 * len(item.token_ids.ids) for item in asked.inputs)
            self._base = await prompt.off_loop(size, lambda: self._submission_of(kit))
        inputs = len(self._base.submission.encode.inputs)
        self._result = Pieces(inputs * self.version.embedding_size * _FLOAT_BYTES)
        return self._base.prefill_tokens

    def _submission_of(self, kit: Kit) -> router_pb2.SubmitRequest:
        asked = self._asked
        inputs = [
            kit.tokenizer.encode(item.text) if item.WhichOneof("input") == "text" else list(item.token_ids.ids)
            for item in asked.inputs
        ]
        _check_lengths(inputs, self.version)
        normalize = asked.normalize if asked.HasField("normalize") else True
        return submission.embedding(self.sender(), self.version, inputs, normalize)

    # What its attempts ask and bring.

    @property
    def work(self) -> Embedding:
        """Itself."""
        return self

    @property
    def tokens(self) -> int:
        """Bytes of the result that are here."""
        return len(self._result.data)

    @property
    def complete(self) -> bool:
        """The whole result is here."""
        return self._result.complete

    async def queued(self, attempt: Attempt) -> None:
        """An attempt begins, and the result with it."""
        self._result = Pieces(self._result.total)
        await super().queued(attempt)

    def submission(self, stamp: Stamp) -> router_pb2.SubmitRequest:
        """All inputs."""
        request = router_pb2.SubmitRequest()
        request.CopyFrom(self._base)
        request.submission.epoch, request.submission.attempt = stamp
        return request

    def token(self, choice: int, index: int, token: int, now: float) -> bool:
        """As `append`."""
        return False

    def append(self, run: Run) -> Fit:
        """Nothing of an embedding is a token."""
        return Fit.DIVERGED

    def piece(self, piece: worker_pb2.BulkPiece) -> Fit:
        """A piece came."""
        return self._result.add(piece)

    def stops(self) -> list[Stop]:
        """An embedding has no choices to stop."""
        return []

    def next_indices(self) -> list[worker_pb2.NextIndex]:
        """The next byte."""
        return [worker_pb2.NextIndex(choice=0, index=len(self._result.data))]

    # Its end.

    @property
    def usage(self) -> common_pb2.Usage:
        """What was read."""
        return common_pb2.Usage(prompt_tokens=self._base.prefill_tokens)

    def _ended(self) -> None:
        pass  # `answer` waits for `ended` itself

    def _finish_word(self) -> str:
        return "stop"

    def _story(self) -> Story:
        return self.story(asked={})


class Pieces:
    """A bulk result put together: `total` bytes, in order."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.data = bytearray()

    @property
    def complete(self) -> bool:
        """All bytes are here."""
        return len(self.data) == self.total

    def add(self, piece: worker_pb2.BulkPiece) -> Fit:
        """Take a piece; what is known already must be equal."""
        if piece.kind != worker_pb2.BulkPiece.KIND_EMBEDDING or piece.total != self.total:
            return Fit.DIVERGED
        known = len(self.data) - piece.offset
        if known < 0:
            return Fit.GAP
        overlap = min(known, len(piece.data))
        if self.data[piece.offset : piece.offset + overlap] != piece.data[:overlap]:
            return Fit.DIVERGED
        if piece.offset + len(piece.data) > self.total:
            return Fit.DIVERGED
        self.data += piece.data[overlap:]
        return Fit.TAKEN if overlap < len(piece.data) else Fit.KNOWN


def _check_lengths(inputs: Sequence[Sequence[int]], version: common_pb2.ModelVersion) -> None:
    """Raises PROMPT_TOO_LONG, BAD_FIELD, naming the inputs."""
    empty = [Violation(f"inputs[{place}]", "has no tokens") for place, ids in enumerate(inputs) if not ids]
    if empty:
        raise TrunklineError(Reason.BAD_FIELD, "an input has no tokens", violations=empty)
    longest = max(map(len, inputs))
    if longest > version.max_context:
        raise TrunklineError(
            Reason.PROMPT_TOO_LONG,
            f"An input has {longest} tokens; the context of {version.model} holds {version.max_context}.",
            metadata={"prompt_tokens": str(longest), "max_context": str(version.max_context)},
        )
