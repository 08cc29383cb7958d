"""InferenceService: each handler is check, call, answer. Errors are raised; the server's scope maps them.

The one rule: nothing is done for a caller before its key is known and allows it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from typing import Any, Final

import grpc
from opentelemetry import trace

from gateway import prompt
from gateway.auth import Authenticator, Principal, Scope
from gateway.catalog import Catalog, unknown_model
from gateway.embedding import Embeddings
from gateway.generation import Generation
from gateway.generations import Generations
from gateway.lookup import Lookup, unknown
from gateway.request import Operation
from gateway.view import View
from shared import channels, rpc
from shared.errors import Reason, TrunklineError, Violation
from trunkline.inference.v1 import inference_pb2 as pb
from trunkline.inference.v1 import inference_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_REQUEST_ID: Final = re.compile(r"[0-9a-f]{32}")
_PAGE: Final = 100
_MAX_PAGE: Final = 1000
_TELL_S: Final = 1.0  # for a status to be written to a client that is stuck
_NO_TRACE: Final = ("", "")  # the call's own span is the parent


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """See the proto."""

    def __init__(
        self,
        authenticator: Authenticator,
        generations: Generations,
        embeddings: Embeddings,
        catalog: Catalog,
        lookup: Lookup,
        tracer: trace.Tracer,
    ) -> None:
        self._authenticator = authenticator
        self._generations = generations
        self._embeddings = embeddings
        self._catalog = catalog
        self._lookup = lookup
        self._tracer = tracer

    async def Generate(  # type: ignore[override]  # a stub's caller sees the same stream
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Generates and streams. Writes by itself: a client that takes nothing is felt in the write."""
        async with self._start(request.spec, context) as generation:
            with _broken_off_when_stuck(generation):
                async with aclosing(generation.events()) as events:
                    async for event in events:
                        await context.write(event)

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> pb.CompleteResponse:
        """Generates and answers once."""
        async with self._start(request.spec, context) as generation:
            return await _whole(generation)

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        """Embeds texts."""
        principal = self._principal(context, "embed", request.model)
        async with self._embeddings.start(
            request, principal, budget_ms=_budget_ms(), trace_parent=_NO_TRACE
        ) as embedding:
            return await embedding.answer()

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: Context
    ) -> pb.CancelGenerationResponse:
        """Cancels a generation of the caller's tenant."""
        tenant = self._principal(context, "cancel").tenant
        answer = await self._lookup.cancel(tenant, await self._request_id(tenant, request))
        return pb.CancelGenerationResponse(confirmed=answer.confirmed, state=answer.state)

    async def GetGeneration(self, request: pb.GetGenerationRequest, context: Context) -> pb.GetGenerationResponse:
        """Looks up a generation of the caller's tenant."""
        tenant = self._principal(context, "generate").tenant
        record = await self._lookup.get(tenant, await self._request_id(tenant, request))
        return pb.GetGenerationResponse(record=record)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Turns text into the model's token ids."""
        self._principal(context, "generate", request.model)
        kit = await self._catalog.kit(self._catalog.choose(request.model))
        spec = pb.GenerationSpec(model=request.model)
        if request.WhichOneof("input") == "chat":
            spec.chat.CopyFrom(request.chat)
            return pb.TokenizeResponse(token_ids=await prompt.off_loop(
                prompt.size(spec), lambda: prompt.encode(kit, spec)
            ))  # fmt: skip
        special = not request.no_special_tokens
        encode = kit.tokenizer.encode
        ids = await prompt.off_loop(len(request.text), lambda: encode(request.text, special=special))
        return pb.TokenizeResponse(token_ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Turns token ids into text."""
        self._principal(context, "generate", request.model)
        tokenizer = (await self._catalog.kit(self._catalog.choose(request.model))).tokenizer
        ids, skip = request.token_ids, request.skip_special_tokens
        text = await prompt.off_loop(4 * len(ids), lambda: tokenizer.decode(ids, skip_special=skip))
        return pb.DetokenizeResponse(text=text)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Lists the models that this caller may use."""
        principal = self._principal(context)
        after, size = _page(request)
        names = sorted({version.model for version in self._catalog.versions()})
        names = [name for name in names if name > after and principal.may_use(name)]
        shown = [self._model(name) for name in names[:size]]
        return pb.ListModelsResponse(
            models=shown, next_page_token=_page_token(shown[-1].name) if len(names) > size else ""
        )  # fmt: skip

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        """Describes one model."""
        if not self._principal(context).may_use(request.name) or not self._catalog.versions(request.name):
            raise unknown_model(request.name)
        return pb.GetModelResponse(model=self._model(request.name))

    async def Resume(  # type: ignore[override]  # as Generate
        self, request: pb.ResumeRequest, context: Context
    ) -> None:
        """Goes on with a resumable generation."""
        tenant = self._principal(context, "generate").tenant
        if not _REQUEST_ID.fullmatch(request.request_id):
            raise unknown()
        async with self._generations.resume(tenant, request.request_id, request.cursor) as view:
            with _broken_off_when_stuck(view):
                async with aclosing(view.events()) as events:
                    async for event in events:
                        await context.write(_resumed(event))

    def _start(self, spec: pb.GenerationSpec, context: Context) -> AbstractAsyncContextManager[Generation | View]:
        principal = self._principal(context, "generate", spec.model)
        operation: Operation = "chat" if spec.WhichOneof("input") == "chat" else "text_completion"
        return self._generations.start(
            spec, principal, operation=operation, budget_ms=_budget_ms(), trace_parent=_NO_TRACE
        )  # fmt: skip

    def _principal(self, context: Context, scope: Scope | None = None, model: str | None = None) -> Principal:
        with self._tracer.start_as_current_span("auth", record_exception=False):
            metadata = channels.read(context.invocation_metadata())
            principal = self._authenticator.authenticate(metadata.get("authorization"))
            if scope is not None:
                self._authenticator.authorize(principal, scope, model)
            return principal

    async def _request_id(self, tenant: str, request: pb.CancelGenerationRequest | pb.GetGenerationRequest) -> str:
        match request.WhichOneof("key"):
            case "request_id":
                if not _REQUEST_ID.fullmatch(request.request_id):
                    raise unknown()
                return request.request_id
            case "client_request_id":
                return await self._lookup.resolve(tenant, request.client_request_id)
            case _:
                raise _bad("key", "one of request_id and client_request_id is needed")

    def _model(self, name: str) -> pb.Model:
        return pb.Model(name=name, versions=self._catalog.versions(name))


def _resumed(event: pb.GenerateResponse) -> pb.ResumeResponse:
    match event.WhichOneof("event"):
        case "started":
            return pb.ResumeResponse(started=event.started)
        case "delta":
            return pb.ResumeResponse(delta=event.delta)
        case "finished":
            return pb.ResumeResponse(finished=event.finished)
        case _:
            return pb.ResumeResponse(heartbeat=event.heartbeat)


async def _whole(generation: Generation | View) -> pb.CompleteResponse:
    """The concatenated stream."""
    generation.whole = True
    answer = pb.CompleteResponse()
    texts: dict[int, list[str]] = {}
    choices: dict[int, pb.Choice] = {}
    async with aclosing(generation.events()) as events:
        async for event in events:
            match event.WhichOneof("event"):
                case "started":
                    answer.started.CopyFrom(event.started)
                case "delta":
                    delta = event.delta
                    choice = choices.setdefault(delta.choice, pb.Choice(index=delta.choice))
                    texts.setdefault(delta.choice, []).append(delta.text)
                    choice.token_ids.extend(delta.token_ids)
                    choice.logprobs.extend(delta.logprobs)
                    choice.finish_reason, choice.matched_stop = delta.finish_reason, delta.matched_stop
                case "finished":
                    answer.finished.CopyFrom(event.finished)
    for index in sorted(choices):
        choices[index].text = "".join(texts[index])
        answer.choices.append(choices[index])
    return answer


@contextmanager
def _broken_off_when_stuck(generation: Generation | View) -> Iterator[None]:
    """Ends this call when its client takes nothing. The status waits behind what the client has not taken: it is sent
    on its way, and nobody stays to see it arrive."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "a handler runs in a task"
    stuck = False

    def break_off() -> None:
        nonlocal stuck
        stuck = True
        task.cancel()
        loop.call_later(_TELL_S, task.cancel)

    generation.on_stuck = break_off
    try:
        yield
    except asyncio.CancelledError:
        if not stuck or task.uncancel():
            raise
        raise TrunklineError(Reason.SLOW_READER, "the client took nothing for too long") from None


def _budget_ms() -> int | None:
    """The call's own deadline."""
    remaining = rpc.remaining_s()
    return None if remaining is None else max(1, round(remaining * 1000))


def _page(request: pb.ListModelsRequest) -> tuple[str, int]:
    """(name to go on after, size). Raises BAD_FIELD."""
    if not 0 <= request.page_size <= _MAX_PAGE:
        raise _bad("page_size", f"must be in [0, {_MAX_PAGE}], is {request.page_size}")
    try:
        after = base64.b64decode(request.page_token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise _bad("page_token", "is not one that ListModels gave") from None
    return after, request.page_size or _PAGE


def _page_token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _bad(field: str, description: str) -> TrunklineError:
    message = f"{field}: {description}"
    return TrunklineError(Reason.BAD_FIELD, message, violations=[Violation(field, description)])
