"""Runs a request's generations into its answer, for as long as its client is there.

Owns disconnects and the commit of a stream. The one rule: the generation's scope is left as soon as the client is gone,
whatever is being waited for; and a stream's headers go out with its first text, its end, or its first heartbeat, so
that what fails before is a plain HTTP error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol, TypeVar, cast

from starlette.types import Receive, Scope, Send

from gateway.http import errors
from gateway.http.core import Generation, Operation, Resumed
from gateway.http.forms import DONE, HEARTBEAT, ChoiceText, Chunks, Form, event, receipt_body, usage_body
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

_T = TypeVar("_T")

Scopes = Sequence[AbstractAsyncContextManager[Generation]]


class Part:
    """What one generation of an answer told beside its text."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.started = inference_pb2.Started()
        self.finished = inference_pb2.Finished()

    def extension(self) -> dict[str, Any]:
        """Ids and receipt."""
        return {
            "request_id": self.generation.id,
            "trace_id": self.generation.trace_id,
            "version": self.started.version,
            "receipt": receipt_body(self.finished.receipt),
        }


class Answer:
    """What whole and streamed answers share: the generations by prompt, ids, headers, usage.

    `choices` is per prompt; `answer_id` is what the client gets to quote where no generation was admitted.
    """

    def __init__(self, form: Form, choices: int, clock: Clock, answer_id: str) -> None:
        self._form = form
        self._choices = choices
        self._clock = clock
        self._answer_id = answer_id
        self._began = clock.monotonic()
        self._parts: dict[int, Part] = {}

    def begin(self, prompt: int, generation: Generation) -> None:
        """A prompt's generation was admitted."""
        self._parts[prompt] = Part(generation)

    async def take(self, prompt: int, response: inference_pb2.GenerateResponse) -> None:
        """An event of it."""
        match response.WhichOneof("event"):
            case "started":
                self._parts[prompt].started = response.started
            case "finished":
                self._parts[prompt].finished = response.finished

    def headers(self) -> dict[str, str]:
        """Response headers as of now."""
        made = {
            "x-request-id": self._answer_id,
            "openai-processing-ms": str(round((self._clock.monotonic() - self._began) * 1000)),
        }
        for part in list(self._parts.values())[:1]:
            first = part.generation
            made |= {"x-request-id": first.id, "x-trace-id": first.trace_id}
            made |= first.headroom.headers() if first.headroom else {}
        return made

    def head(self) -> tuple[str, int, str]:
        """(id, created in seconds, model)."""
        first = next(iter(self._parts.values()))
        response_id = self._form.id_prefix + first.generation.id
        return response_id, first.started.created_ms // 1000, first.started.model

    def usage(self) -> dict[str, Any]:
        """Over all prompts."""
        total = common_pb2.Usage()
        for part in self._parts.values():
            usage = part.finished.usage
            total.prompt_tokens += usage.prompt_tokens
            total.completion_tokens += usage.completion_tokens
            total.cached_tokens += usage.cached_tokens
        return usage_body(total)

    def extension(self) -> dict[str, Any]:
        """The field `trunkline`: ids and receipt, one per prompt if there are several."""
        parts = [part.extension() for _, part in sorted(self._parts.items())]
        return parts[0] if len(parts) == 1 else {"generations": parts}

    def index(self, prompt: int, choice: int) -> int:
        """Choices of several prompts are numbered on."""
        return prompt * self._choices + choice


class WholeAnswer(Answer):
    """One JSON body at the end."""

    def __init__(self, form: Form, choices: int, clock: Clock, answer_id: str) -> None:
        super().__init__(form, choices, clock, answer_id)
        self._texts: dict[int, ChoiceText] = {}

    def begin(self, prompt: int, generation: Generation) -> None:
        """A prompt's generation was admitted."""
        super().begin(prompt, generation)
        generation.whole = True

    async def take(self, prompt: int, response: inference_pb2.GenerateResponse) -> None:
        """An event; text is collected."""
        if response.WhichOneof("event") == "delta":
            index = self.index(prompt, response.delta.choice)
            self._texts.setdefault(index, ChoiceText()).take(response.delta)
        else:
            await super().take(prompt, response)

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        response_id, created_s, model = self.head()
        return {
            "id": response_id,
            "object": self._form.whole_object,
            "created": created_s,
            "model": model,
            "choices": [self._form.whole(index, choice) for index, choice in sorted(self._texts.items())],
            "usage": self.usage(),
            "trunkline": self.extension(),
        }


class StreamAnswer(Answer):
    """Server-sent events. An ASGI application."""

    def __init__(
        self, form: Form, choices: int, clock: Clock, answer_id: str, scopes: Scopes, with_usage: bool
    ) -> None:
        super().__init__(form, choices, clock, answer_id)
        self._scopes = scopes
        self._with_usage = with_usage
        self._chunks: Chunks | None = None  # there once the stream is committed
        self._send: Send
        self._stuck: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()  # several prompts write to one stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. A failure before the first text is an HTTP error, after it an event."""
        self._send = send
        try:
            await while_present(receive, self._stream(), self._stuck)
        except TrunklineError as exc:
            if self._chunks is None:
                await errors.response(exc, self.headers())(scope, receive, send)
            elif exc.reason not in (Reason.CLIENT_GONE, Reason.SLOW_READER):
                await self._write(event(errors.body(exc)) + DONE, more=False)

    def begin(self, prompt: int, generation: Generation) -> None:
        """A prompt's generation was admitted; it says when the client has taken nothing for too long."""
        super().begin(prompt, generation)
        generation.on_stuck = self._give_up

    async def take(self, prompt: int, response: inference_pb2.GenerateResponse) -> None:
        """An event; text is written at once."""
        match response.WhichOneof("event"):
            case "delta":
                chunks = self._chunks or await self._commit()
                index = self.index(prompt, response.delta.choice)
                await self._write(chunks.delta(index, response.delta))
            case "heartbeat":
                if self._chunks is None:
                    await self._commit()
                await self._write(HEARTBEAT)
            case _:
                await super().take(prompt, response)

    def _give_up(self) -> None:
        if not self._stuck.done():
            self._stuck.set_result(None)

    async def _stream(self) -> None:
        try:
            await play(self._scopes, self)
        except TrunklineError:
            raise
        except Exception as exc:
            raise errors.from_unknown(exc) from exc
        chunks = await self._commit()
        last = chunks.usage(self.usage(), self.extension()) if self._with_usage else b""
        await self._write(last + DONE, more=False)

    async def _commit(self) -> Chunks:
        async with self._turn:
            if self._chunks is None:
                await self._send({"type": "http.response.start", "status": 200, "headers": self._raw_headers()})
                self._chunks = Chunks(self._form, *self.head(), self._with_usage, self._resumable)
                for prompt, part in self._parts.items():
                    for choice, chars in part.generation.opened.items():
                        self._chunks.go_on(self.index(prompt, choice), chars)
        return self._chunks

    @property
    def _resumable(self) -> bool:
        """A cursor names one generation."""
        return len(self._scopes) == 1 and all(part.generation.resumable for part in self._parts.values())

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        headers = self.headers() | {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def _write(self, data: bytes, more: bool = True) -> None:
        async with self._turn:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})


class ResumedAnswer(StreamAnswer):
    """The rest of a stream. What it began as decides its form."""

    def __init__(
        self,
        forms: Mapping[Operation, Form],
        clock: Clock,
        answer_id: str,
        scope: AbstractAsyncContextManager[Resumed],
        with_usage: bool,
    ) -> None:
        super().__init__(forms["chat"], 1, clock, answer_id, [scope], with_usage)
        self._forms = forms

    def begin(self, prompt: int, generation: Generation) -> None:
        """It is there."""
        self._form = self._forms[cast(Resumed, generation).operation]
        super().begin(prompt, generation)


class Player(Protocol):
    """What takes the events of an answer's generations."""

    def begin(self, prompt: int, generation: Generation) -> None:
        """A generation was admitted."""
        ...

    async def take(self, prompt: int, response: inference_pb2.GenerateResponse) -> None:
        """An event of it."""
        ...


async def play(scopes: Scopes, player: Player) -> None:
    """Run all generations to their ends; the first failure ends all."""
    if len(scopes) == 1:
        await _play(0, scopes[0], player)
        return
    try:
        async with asyncio.TaskGroup() as group:
            for prompt, scope in enumerate(scopes):
                group.create_task(_play(prompt, scope, player))
    except* Exception as failures:
        raise failures.exceptions[0] from None


async def _play(prompt: int, scope: AbstractAsyncContextManager[Generation], player: Player) -> None:
    async with scope as generation:
        player.begin(prompt, generation)
        async with aclosing(generation.events()) as events:
            async for response in events:
                await player.take(prompt, response)


async def while_present(receive: Receive, work: Coroutine[Any, Any, _T], stuck: asyncio.Future[None]) -> _T:
    """The result of `work`, which is cancelled when the client leaves (CLIENT_GONE) or is `stuck` (SLOW_READER)."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_leaves(receive))
    try:
        await asyncio.wait((working, leaving, stuck), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if leaving.done():
            raise TrunklineError(Reason.CLIENT_GONE, "The client left.")
        raise TrunklineError(Reason.SLOW_READER, "The client took nothing for too long.")
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leaves(receive: Receive) -> None:
    """Return once the client is gone. The body has been read, so all that can come is the disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
