"""A load's client on OpenAI's completions over HTTP, for this mesh and for other servers.

Owns its connections: one per request under way, kept for the next. The one rule: a piece is reported from inside the
protocol's callback, so that no task switch is counted as the server's time.
"""

import asyncio
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from trunkctl.bench.clients import Arrived, Failed, Target
from trunkctl.bench.workload import Request

_MOST_ERROR_BYTES = 64 << 10


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None

    @property
    def tokens(self) -> int:
        """As many as it names; a server that names none is taken to send one by one."""
        return len(self.token_ids) if self.token_ids is not None else int(bool(self.text))


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_read: msgspec.json.Decoder[_Chunk] = msgspec.json.Decoder(_Chunk)
_encode = msgspec.json.Encoder().encode


class Answer:
    """What one response says, as it comes. Raises Failed from `take` where an event or the body is an error."""

    def __init__(self, arrived: Arrived) -> None:
        self.status = 0
        self.told = 0
        self._arrived = arrived
        self._rest = b""

    def take(self, data: bytes) -> None:
        """A piece of the body; several events or a part of one."""
        self._rest += data
        if self.status != 200:
            self._rest = self._rest[:_MOST_ERROR_BYTES]
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(line[6:])

    def end(self) -> None:
        """The body is complete."""
        if self.status != 200:
            raise Failed(f"HTTP {self.status}{_said(self._rest)}")

    def _event(self, data: bytes) -> None:
        chunk = _read.decode(data)
        if chunk.error is not None:
            raise Failed(str(chunk.error.code or chunk.error.type or "error event"))
        if chunk.usage is not None:
            self.told = chunk.usage.completion_tokens
        count = sum(choice.tokens for choice in chunk.choices)
        if count:
            self._arrived(count)


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = True
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Sends a request and returns when `answer` is whole. Raises Failed."""
        assert self._transport is not None
        self._answer, self._done = answer, asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        """Ends it; the server sees a client that left."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # As a protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not one by class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except Exception as error:  # of the parser, or what it wraps of ours
            self._fail(_failure(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(Failed("connection lost"))

    # As what the parser calls.

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.take(data)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._answer is not None and self._done is not None and not self._done.done():
            self._answer.end()
            self._done.set_result(None)

    def _fail(self, why: Failed) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(why)


class HttpClient:
    """See `clients.Client`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: dict[str, list[Connection]] = {address: [] for address in target.addresses}

    async def stream(self, request: Request, arrived: Arrived) -> int:
        """POSTs one completion."""
        address = self._target.addresses[request.number % len(self._target.addresses)]
        answer = Answer(arrived)
        try:
            async with asyncio.timeout(self._target.timeout_s):
                connection = await self._connection(address)
                await connection.exchange(self._message(address, request), answer)
        except TimeoutError:
            raise Failed("timeout") from None
        except OSError as error:
            raise Failed(f"connect: {type(error).__name__}") from error
        if connection.reusable:
            self._idle[address].append(connection)
        return answer.told

    async def close(self) -> None:
        """Closes the connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()

    async def _connection(self, address: str) -> Connection:
        idle = self._idle[address]
        while idle:
            if (kept := idle.pop()).reusable:
                return kept
        url = urlsplit(address)
        secure = url.scheme == "https"
        port = url.port or (443 if secure else 80)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, url.hostname or "", port, ssl=secure or None)
        return connection

    def _message(self, address: str, request: Request) -> bytes:
        url = urlsplit(address)
        body = _encode(self._body(request))
        headers = [
            f"POST {url.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"Host: {url.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {self._target.key}"] if self._target.key else []),
        ]
        return "\r\n".join([*headers, "", ""]).encode() + body

    def _body(self, request: Request) -> dict[str, Any]:
        target, count = self._target, request.max_tokens
        lengths = {"min_tokens": count, "ignore_eos": True} if target.ignore_eos else {}
        return {
            "model": target.model,
            "prompt": request.prompt,
            "max_tokens": count,
            "temperature": target.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **lengths,
        }


def _said(body: bytes) -> str:
    try:
        error = _read.decode(body).error
    except msgspec.DecodeError:
        return ""
    name = error and (error.code or error.type)
    return f" {name}" if name else ""


def _failure(error: BaseException) -> Failed:
    """The Failed that a callback raised, which the parser wraps, or what the parser says."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Failed):
            return cause
        cause = cause.__context__
    return Failed(f"not HTTP: {type(error).__name__}")
