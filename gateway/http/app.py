"""The HTTP faces: OpenAI's paths over the gateway's generations.

Every endpoint is check, call, answer. The one rule: nothing is read or done for a caller before the key is known, and a
body is at most 4 MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from gateway import cursor, prompt
from gateway.auth import Authenticator, Principal
from gateway.catalog import unknown_model
from gateway.http import errors, requests
from gateway.http.core import Embedding, Embeddings, Generation, Generations, Models, Operation
from gateway.http.forms import ChatForm, CompletionForm, Form, embeddings_body
from gateway.http.play import ResumedAnswer, StreamAnswer, WholeAnswer, play, while_present
from gateway.kit import Kit
from gateway.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Generate,
    TokenizeRequest,
    bad_fields,
)
from gateway.openai_types import Form as Body
from shared.clock import Clock
from shared.errors import Reason, TrunklineError, Violation
from shared.ids import Rng, new_request_id
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
BODY_S: Final = 60.0  # for a body to arrive
_CHAT: Final = ChatForm()
_COMPLETION: Final = CompletionForm()
_FORMS: Final[dict[Operation, Form]] = {"chat": _CHAT, "text_completion": _COMPLETION}
LAST_EVENT_ID: Final = "last-event-id"
_CHAT_BODY: Final = Body(ChatRequest, "chat")
_COMPLETION_BODY: Final = Body(CompletionRequest, "completions")
_EMBEDDING_BODY: Final = Body(EmbeddingRequest, "embeddings")
_TOKENIZE_BODY: Final = Body(TokenizeRequest, "tokenize")
_DETOKENIZE_BODY: Final = Body(DetokenizeRequest, "detokenize")

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Rename = Callable[[str], str]


class Faces:
    """The endpoints over their collaborators."""

    def __init__(
        self,
        authenticator: Authenticator,
        generations: Generations,
        embeddings: Embeddings,
        models: Models,
        clock: Clock,
        rng: Rng,
    ) -> None:
        self._authenticator = authenticator
        self._generations = generations
        self._embeddings = embeddings
        self._models = models
        self._clock = clock
        self._rng = rng

    def routes(self) -> list[BaseRoute]:
        """All paths."""
        return [
            self._route("/v1/chat/completions", self.chat, "POST"),
            self._route("/v1/completions", self.completions, "POST"),
            self._route("/v1/embeddings", self.embeddings, "POST"),
            self._route("/v1/generations/{id}/stream", self.resume, "GET"),
            self._route("/tokenize", self.tokenize, "POST"),
            self._route("/detokenize", self.detokenize, "POST"),
            self._route("/v1/models", self.list_models, "GET"),
            self._route("/v1/models/{model:path}", self.get_model, "GET"),
        ]

    async def chat(self, request: Request) -> ASGIApp:
        """POST /v1/chat/completions."""
        principal = self._principal(request)
        asked = _CHAT_BODY.read(await _body(request))
        specs = [requests.chat_spec(asked)]
        return await self._generate(request, principal, asked, specs, _CHAT, "chat")

    async def completions(self, request: Request) -> ASGIApp:
        """POST /v1/completions."""
        principal = self._principal(request)
        asked = _COMPLETION_BODY.read(await _body(request))
        specs = requests.completion_specs(asked)
        return await self._generate(request, principal, asked, specs, _COMPLETION, "text_completion")

    async def resume(self, request: Request) -> ASGIApp:
        """GET /v1/generations/{id}/stream: a resumable generation's stream after Last-Event-ID, or from its beginning.
        `?include_usage=true` asks for the last chunk as `stream_options` would have."""
        principal = self._principal(request)
        self._authenticator.authorize(principal, "generate", None)
        with_usage = request.query_params.get("include_usage") == "true"
        last = request.headers.get(LAST_EVENT_ID, "")
        scope = self._generations.resume(principal.tenant, request.path_params["id"], last)
        return ResumedAnswer(_FORMS, self._clock, self._new_id(), scope, with_usage)

    async def embeddings(self, request: Request) -> ASGIApp:
        """POST /v1/embeddings."""
        principal = self._principal(request)
        asked = _EMBEDDING_BODY.read(await _body(request))
        self._authenticator.authorize(principal, "embed", asked.model)
        made = requests.embed_request(asked)
        scope = self._embeddings.start(
            made, principal, budget_ms=_budget_ms(request), trace_parent=_trace_parent(request)
        )
        answer = await while_present(request.receive, _embedded(scope), _never())
        as_base64 = asked.encoding_format == "base64"
        return _json(embeddings_body(answer, asked.model, as_base64), {"x-request-id": answer.request_id})

    async def tokenize(self, request: Request) -> ASGIApp:
        """POST /tokenize: a text as a prompt, or a chat as its template renders it."""
        principal = self._principal(request)
        asked = _TOKENIZE_BODY.read(await _body(request))
        self._authenticator.authorize(principal, "generate", asked.model)
        spec, special = requests.tokenize_spec(asked)
        version = self._models.choose(asked.model)
        kit = await self._models.kit(version)
        ids = await prompt.off_loop(prompt.size(spec), lambda: _encode(kit, spec, special))
        return _json({"count": len(ids), "max_model_len": version.max_context, "tokens": ids})

    async def detokenize(self, request: Request) -> ASGIApp:
        """POST /detokenize: the text of token ids, special ones included."""
        principal = self._principal(request)
        asked = _DETOKENIZE_BODY.read(await _body(request))
        self._authenticator.authorize(principal, "generate", asked.model)
        tokenizer = (await self._models.kit(self._models.choose(asked.model))).tokenizer
        ids = asked.tokens
        text = await prompt.off_loop(4 * len(ids), lambda: tokenizer.decode(ids, skip_special=False))
        return _json({"prompt": text})

    async def list_models(self, request: Request) -> ASGIApp:
        """GET /v1/models: those the key may use."""
        principal = self._principal(request)
        newest = {version.model: version for version in reversed(self._models.versions())}
        data = [_model(version) for name, version in sorted(newest.items()) if principal.may_use(name)]
        return _json({"object": "list", "data": data})

    async def get_model(self, request: Request) -> ASGIApp:
        """GET /v1/models/{model}."""
        principal = self._principal(request)
        name = request.path_params["model"]
        versions = self._models.versions(name)
        if not versions or not principal.may_use(name):
            raise unknown_model(name)
        return _json(_model(versions[0]))

    async def _generate(
        self,
        request: Request,
        principal: Principal,
        asked: Generate,
        specs: list[inference_pb2.GenerationSpec],
        form: Form,
        operation: Operation,
    ) -> ASGIApp:
        self._authenticator.authorize(principal, "generate", asked.model)
        with_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        if asked.stream and (last := request.headers.get(LAST_EVENT_ID)):
            again = self._generations.resume(principal.tenant, cursor.decode(last).request_id.hex(), last)
            return ResumedAnswer(_FORMS, self._clock, self._new_id(), again, with_usage)
        requests.set_key(specs, request.headers.get("idempotency-key"))
        budget_ms, trace_parent = _budget_ms(request), _trace_parent(request)

        def start(spec: inference_pb2.GenerationSpec) -> AbstractAsyncContextManager[Generation]:
            return self._generations.start(
                spec, principal, operation=operation, budget_ms=budget_ms, trace_parent=trace_parent
            )

        scopes = [
            _in_the_clients_words(start, spec, requests.renames(asked, place if len(specs) > 1 else None))
            for place, spec in enumerate(specs)
        ]
        choices = asked.n or 1
        if asked.stream:
            return StreamAnswer(form, choices, self._clock, self._new_id(), scopes, with_usage)
        answer = WholeAnswer(form, choices, self._clock, self._new_id())
        await while_present(request.receive, play(scopes, answer), _never())
        return _json(answer.body(), answer.headers())

    def _principal(self, request: Request) -> Principal:
        return self._authenticator.authenticate(request.headers.get("authorization"))

    def _new_id(self) -> str:
        return new_request_id(self._rng).hex()

    def _route(self, path: str, endpoint: Endpoint, method: str) -> Route:
        async def face(request: Request) -> ASGIApp:
            try:
                return await endpoint(request)
            except HTTPException:
                raise
            except Exception as exc:
                error = _as_error(exc)
            return errors.response(error, {"x-request-id": error.metadata.get("request_id") or self._new_id()})

        return Route(path, face, methods=[method])


def build(routes: list[BaseRoute]) -> Starlette:
    """The application; what no route takes is answered in the same form of errors."""
    handlers: dict[Any, Any] = {HTTPException: errors.on_http_exception}
    return Starlette(routes=routes, exception_handlers=handlers)


def _as_error(exc: Exception) -> TrunklineError:
    if isinstance(exc, TrunklineError):
        return exc
    if isinstance(exc, ClientDisconnect):
        return TrunklineError(Reason.CLIENT_GONE, "The client left.")
    return errors.from_unknown(exc)


async def _body(request: Request) -> bytes:
    """The whole body. Raises TOO_LARGE as soon as it is known to be, RUN_EXPIRED when it does not come."""
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said) > MAX_BODY_BYTES:
        raise _too_large()
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise TrunklineError(Reason.RUN_EXPIRED, f"The body did not arrive within {BODY_S:g} s.") from None
    return bytes(data)


def _too_large() -> TrunklineError:
    return TrunklineError(Reason.TOO_LARGE, f"The body is larger than {MAX_BODY_BYTES} bytes.")


def _budget_ms(request: Request) -> int | None:
    said = request.headers.get("x-request-timeout-ms")
    if said is None:
        return None
    if not said.isdecimal() or not 0 < int(said[:20]) < 2**63:
        raise bad_fields([Violation("x-request-timeout-ms", "must be a whole number of milliseconds above 0")])
    return int(said)


def _trace_parent(request: Request) -> tuple[str, str]:
    return request.headers.get("traceparent", ""), request.headers.get("tracestate", "")


def _encode(kit: Kit, spec: inference_pb2.GenerationSpec, special: bool) -> list[int]:
    if spec.WhichOneof("input") == "prompt":
        return kit.tokenizer.encode(spec.prompt, special)
    return prompt.encode(kit, spec)


def _never() -> asyncio.Future[None]:
    """A whole answer is sent after its work: nobody can be slow to take it meanwhile."""
    return asyncio.get_running_loop().create_future()


async def _embedded(scope: AbstractAsyncContextManager[Embedding]) -> inference_pb2.EmbedResponse:
    async with scope as embedding:
        return await embedding.answer()


def _json(data: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), headers=headers, media_type=errors.JSON)


def _model(version: common_pb2.ModelVersion) -> dict[str, Any]:
    return {
        "id": version.model,
        "object": "model",
        "created": 0,
        "owned_by": "trunkline",
        "max_model_len": version.max_context,
        "version": version.version,
    }


@asynccontextmanager
async def _in_the_clients_words(
    start: Callable[[inference_pb2.GenerationSpec], AbstractAsyncContextManager[Generation]],
    spec: inference_pb2.GenerationSpec,
    rename: Rename,
) -> AsyncIterator[Generation]:
    """The generation's scope, whose refusals name fields as the client wrote them."""
    try:
        async with start(spec) as generation:
            yield generation
    except TrunklineError as exc:
        if not exc.violations:
            raise
        violations = [Violation(rename(item.field), item.description) for item in exc.violations]
        raise TrunklineError(exc.reason, exc.message, metadata=exc.metadata, violations=violations) from exc
