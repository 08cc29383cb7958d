"""A network of processes on virtual time, with grpc.aio's surface at both ends: channels and calls here, servers there.

Owns connections and everything that can befall them: latency, stalls, resets, refusals, partitions, half-open ends,
duplicates. The one rule: bytes on one connection arrive in order or the connection breaks, as on TCP; whatever else
happens to a message is something that a process, a proxy or a kernel can do.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc
from opentelemetry import trace

from shared.channels import Channels, MeshChannel
from shared.clock import Clock
from shared.ids import Identity, Rng
from shared.interceptor import Around
from tests.sim.loop import PROCESS, Process, SimLoop

WINDOW_BYTES: Final = 64 * 1024  # of one call and direction, unread
CONNECT_S: Final = 1.0  # one attempt
KEEPALIVE_S: Final = 40.0  # after which a connection that nothing crosses is given up at both ends
BACKOFF_S: Final = (0.2, 5.0)
Code = grpc.StatusCode
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, Any], ...]]
UP, DOWN = "up", "down"  # from client to server, and back


@dataclass
class Weather:
    """What a pair of processes lives with. `cut`: nothing crosses, either way."""

    base_s: float = 0.0005
    jitter_s: float = 0.0005
    stall_p: float = 0.0  # of a message to be lost once and sent again
    cut: bool = False
    cut_at: float = 0.0


@dataclass(frozen=True)
class Passing:
    """A message about to leave. `kind`: call, message, status, cancel."""

    source: str
    target: str
    method: str
    kind: str
    data: bytes
    pipe: Pipe
    number: int  # of its call


@dataclass(frozen=True)
class Fate:
    """What becomes of it: `late_s` holds it (and it alone) back; `reset`: the connection breaks before it arrives, or
    right after; `copies`: where else it arrives, as (address, after seconds), answers unheard."""

    late_s: float = 0.0
    reset_before: bool = False
    reset_after: bool = False
    copies: tuple[tuple[str, float], ...] = ()


ARRIVES: Final = Fate()


class Net:
    """See the module. `tap` decides what becomes of each message."""

    def __init__(self, loop: SimLoop, rng: Rng, log: Callable[[str], None]) -> None:
        self.loop = loop
        self.rng = rng
        self.tap: Callable[[Passing], Fate] = lambda _passing: ARRIVES
        self.servers: dict[str, SimServer] = {}
        self.pipes: dict[Pipe, None] = {}
        self.stall_p = 0.0  # of pairs that are yet to meet
        self.numbers = itertools.count(1)
        self._log = log
        self._weather: dict[tuple[str, str], Weather] = {}

    def weather(self, one: str, other: str) -> Weather:
        """Of a pair of process names."""
        pair = (one, other) if one < other else (other, one)
        if pair not in self._weather:
            base_s, jitter_s = self.rng.uniform(0.0002, 0.002), self.rng.uniform(0.0, 0.002)
            self._weather[pair] = Weather(base_s, jitter_s, self.stall_p)
        return self._weather[pair]

    def cut(self, one: str, other: str) -> None:
        """Nothing crosses from now on."""
        weather = self.weather(one, other)
        weather.cut, weather.cut_at = True, self.loop.now

    def mend(self, one: str, other: str) -> None:
        """What waited crosses now."""
        weather = self.weather(one, other)
        if weather.cut:
            weather.cut = False
            for pipe in list(self.pipes):
                if pipe.joins(one, other):
                    pipe.flush()

    def reset(self, one: str, other: str) -> None:
        """Every connection between the two breaks."""
        for pipe in list(self.pipes):
            if pipe.joins(one, other):
                pipe.break_off("the connection was reset")

    def note(self, passing: Passing, what: str = "") -> None:
        """One line of the log."""
        self._log(
            f"{passing.source}>{passing.target} {passing.method.rpartition('/')[2]}#{passing.number} {passing.kind}"
            f" {len(passing.data)} {zlib.crc32(passing.data):08x}{what}"
        )


class Pipe:
    """One connection. `owner` is the client's process; `server` is set once it is open."""

    def __init__(self, net: Net, owner: Process, address: str, done: Callable[[Pipe, str], None]) -> None:
        self.net = net
        self.owner = owner
        self.address = address
        self.server: SimServer | None = None
        self.broken = ""
        self.calls: dict[int, ClientCall] = {}
        self.served: dict[int, ServerCall] = {}
        self._done: Callable[[Pipe, str], None] | None = done
        self._last = {UP: 0.0, DOWN: 0.0}
        self._held: dict[str, deque[Callable[[], None]]] = {UP: deque(), DOWN: deque()}
        net.pipes[self] = None
        net.loop.later(CONNECT_S, self._too_late)
        self.carry(UP, self._knock)

    @property
    def host(self) -> str:
        """The server's process, by name."""
        return self.address.partition(":")[0]

    def joins(self, one: str, other: str) -> bool:
        """It is between these two."""
        return {self.owner.name, self.host} == {one, other}

    # Setting up.

    def _knock(self) -> None:
        server = self.net.servers.get(self.address)
        if server is None or not server.process.alive:
            self.carry(DOWN, lambda: self._connected("Connection refused"))
        else:
            server.process.soon(self._accept, server)

    def _accept(self, server: SimServer) -> None:
        if self.broken or not server.open:
            self.carry(DOWN, lambda: self._connected("Connection refused"))
            return
        self.server = server
        server.pipes[self] = None
        self.carry(DOWN, lambda: self._connected(""))

    def _too_late(self) -> None:
        self._connected("Connection timed out")

    def _connected(self, why_not: str) -> None:
        done, self._done = self._done, None
        if done is not None:
            if why_not:
                self._forget(why_not)
            self.owner.soon(done, self, why_not)

    # Carrying.

    def carry(self, way: str, arrive: Callable[[], None], late_s: float = 0.0) -> None:
        """Let something arrive after what went before it; `late_s`: held back alone."""
        if self.broken:
            return
        net = self.net
        weather = net.weather(self.owner.name, self.host)
        at = net.loop.now + weather.base_s + net.rng.random() * weather.jitter_s
        if weather.stall_p and net.rng.random() < weather.stall_p:
            at += 0.2 + 0.4 * net.rng.random()
        at = max(at, self._last[way])
        self._last[way] = at
        net.loop.later(at + late_s - net.loop.now, self._arrives, way, arrive)

    def _arrives(self, way: str, arrive: Callable[[], None]) -> None:
        if self.broken:
            return
        if self._held[way] or self.net.weather(self.owner.name, self.host).cut:
            self._held[way].append(arrive)
            if len(self._held[way]) == 1:
                self.net.loop.later(KEEPALIVE_S, self._dead)
            return
        arrive()

    def _dead(self) -> None:
        weather = self.net.weather(self.owner.name, self.host)
        if weather.cut and self.net.loop.now - weather.cut_at >= KEEPALIVE_S - 1e-3:
            self.break_off("keepalive timed out")

    def flush(self) -> None:
        """What was held back goes on its way."""
        for way in (UP, DOWN):
            held, self._held[way] = self._held[way], deque()
            for arrive in held:
                self.carry(way, arrive)

    # Ends.

    def break_off(self, why: str, *, client: bool = True, server: bool = True) -> None:
        """It is reset; each end that is to hear of it does."""
        if self.broken:
            return
        self._forget(why)
        if self._done is not None:
            self._connected(why)
        if client:
            for call in list(self.calls.values()):
                call.ended((Code.UNAVAILABLE, why, ()))
        if server:
            for served in list(self.served.values()):
                served.hang_up()

    def _forget(self, why: str) -> None:
        self.broken = why
        self.net.pipes.pop(self, None)
        if self.server is not None:
            self.server.pipes.pop(self, None)

    def lose_client(self, *, silently: bool = False) -> None:
        """The client's process is gone."""
        if not silently:
            self.carry(UP, lambda: self.break_off("the client is gone", client=False))

    def lose_server(self, *, silently: bool = False) -> None:
        """The server's process is gone."""
        if not silently:
            self.carry(DOWN, lambda: self.break_off("Socket closed", server=False))

    def say(self, way: str, method: str, kind: str, number: int, data: bytes, arrive: Callable[[], None]) -> None:
        """A message on its way, as fate will."""
        if self.broken:
            return
        source, target = (self.owner.name, self.host) if way == UP else (self.host, self.owner.name)
        passing = Passing(source, target, method, kind, data, self, number)
        fate = self.net.tap(passing)
        if fate is ARRIVES:
            self.net.note(passing)
            self.carry(way, arrive)
            return
        self.net.note(passing, f" {fate}")
        for address, after_s in fate.copies:
            self.net.loop.later(after_s, self._copy, address, passing)
        if fate.reset_before:
            self.break_off("the connection was reset")
            return
        self.carry(way, arrive, fate.late_s)
        if fate.reset_after:
            self.carry(way, lambda: self.break_off("the connection was reset"))

    def _copy(self, address: str, passing: Passing) -> None:
        server = self.net.servers.get(address)
        if server is not None and server.process.alive and server.open:
            ghost = Pipe(self.net, self.owner, address, lambda _pipe, _why: None)
            ghost._forget("a ghost")
            call = ServerCall(server, ghost, next(self.net.numbers), passing.method, (), None)
            call.begin(passing.data)


class SimChannel:
    """grpc.aio.Channel: one connection at a time, made at first use and again after it broke."""

    def __init__(self, net: Net, process: Process, address: str) -> None:
        self._net = net
        self._process = process
        self._address = address
        self._pipe: Pipe | None = None
        self._open = False
        self._waiting: list[ClientCall] = []
        self._ready: list[asyncio.Future[None]] = []
        self._backoff_s = BACKOFF_S[0]
        self._aside_until = 0.0
        self._why = ""
        self._closed = False

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return _Method(self, method, request_serializer, response_deserializer, _Unary)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return _Method(self, method, request_serializer, response_deserializer, _Stream)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return _Method(self, method, request_serializer, response_deserializer, _Stream)

    async def channel_ready(self) -> None:
        """Return once connected, however long that takes."""
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if not self._connected:
            future = self._net.loop.create_future()
            self._ready.append(future)
            self._connect()
            await future

    async def close(self, grace: float | None = None) -> None:
        """Cancel its calls."""
        self._closed = True
        pipe, self._pipe = self._pipe, None
        for call in list(self._waiting):
            call.cancel()
        if pipe is not None:
            for call in list(pipe.calls.values()):
                call.cancel()
            pipe.carry(UP, lambda: pipe.break_off("closed"))

    @property
    def _connected(self) -> bool:
        return self._pipe is not None and self._open and not self._pipe.broken

    def start(self, call: ClientCall) -> None:
        """A call begins: now, when connected, or never."""
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if self._connected:
            assert self._pipe is not None
            call.launch(self._pipe)
        elif self._net.loop.now < self._aside_until and not call.patient:
            call.ended((Code.UNAVAILABLE, f"failed to connect to all addresses; last error: {self._why}", ()))
        else:
            self._waiting.append(call)
            self._connect()

    def _connect(self) -> None:
        if self._closed or (self._pipe is not None and not self._pipe.broken):
            return
        self._open = False
        wait_s = max(0.0, self._aside_until - self._net.loop.now)
        if wait_s:
            self._net.loop.call_later(wait_s, self._connect)
            return
        self._pipe = Pipe(self._net, self._process, self._address, self._result)

    def _result(self, pipe: Pipe, why_not: str) -> None:
        if pipe is not self._pipe:
            return
        waiting, self._waiting = self._waiting, []
        if not why_not:
            self._open, self._backoff_s = True, BACKOFF_S[0]
            ready, self._ready = self._ready, []
            for future in ready:
                if not future.done():
                    future.set_result(None)
            for call in waiting:
                call.launch(pipe)
            return
        self._why = why_not
        self._aside_until = self._net.loop.now + self._backoff_s * self._net.rng.uniform(0.8, 1.2)
        self._backoff_s = min(BACKOFF_S[1], 1.6 * self._backoff_s)
        self._waiting = [call for call in waiting if call.patient and not call.done()]
        for call in waiting:
            if not call.patient:
                call.ended((Code.UNAVAILABLE, f"failed to connect to all addresses; last error: {why_not}", ()))
        self._ready = [future for future in self._ready if not future.done()]
        if self._waiting or self._ready:
            self._connect()


class _Method:
    """One method of a channel, as stubs make it."""

    def __init__(self, channel: SimChannel, method: str, serialize: Any, deserialize: Any, kind: type) -> None:
        self._channel = channel
        self._method = method
        self._serialize = serialize
        self._deserialize = deserialize
        self._kind = kind

    def __call__(self, request: Any = None, *, timeout: float | None = None, metadata: Any = None,
                 wait_for_ready: bool = False) -> Any:  # fmt: skip
        pairs = tuple(metadata or ())
        call: ClientCall = self._kind(
            self._channel, self._method, self._serialize, self._deserialize, pairs, timeout, bool(wait_for_ready)
        )
        call.begin(request)
        return call


class ClientCall:
    """One call at its caller."""

    def __init__(self, channel: SimChannel, method: str, serialize: Any, deserialize: Any, metadata: Any,
                 timeout: float | None, patient: bool) -> None:  # fmt: skip
        self.patient = patient
        self._net = channel._net
        self._channel = channel
        self._method = method
        self._deserialize = deserialize
        self._metadata = metadata
        self._pipe: Pipe | None = None
        self._number = next(self._net.numbers)
        self._request: bytes | None = None
        self._early: list[bytes] = []
        self._inbox: deque[bytes] = deque()
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._unread = 0
        self._status: Status | None = None
        self._cancelled = False
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = None if timeout is None else self._net.loop.now + timeout

    def begin(self, request: Any) -> None:
        if request is not None:
            self._request = _bytes(request)
        if self._deadline is not None:
            self._timer = self._net.loop.call_at(self._deadline, self._expire)
        self._channel.start(self)

    def launch(self, pipe: Pipe) -> None:
        """The connection is there."""
        if self.done():
            return
        self._pipe = pipe
        pipe.calls[self._number] = self
        data, method, number, metadata = self._request, self._method, self._number, self._metadata
        deadline = self._deadline

        def arrive() -> None:
            server = pipe.server
            if server is not None and server.process.alive:
                ServerCall(server, pipe, number, method, metadata, deadline).begin(data)

        pipe.say(UP, method, "call", number, data or b"", arrive)
        early, self._early = self._early, []
        for message in early:
            self._send(message)

    def _send(self, data: bytes) -> None:
        pipe, number = self._pipe, self._number
        if pipe is None:
            self._early.append(data)
            return

        def arrive() -> None:
            served = pipe.served.get(number)
            if served is not None:
                served.hears(data)

        self._unread += len(data) + 16
        pipe.say(UP, self._method, "message", number, data, arrive)

    def read_by_peer(self, size: int) -> None:
        """The peer has taken bytes: there is room for more."""
        self._unread -= size
        if self._room is not None and not self._room.done() and self._unread < WINDOW_BYTES:
            self._room.set_result(None)

    def hears(self, data: bytes) -> None:
        """A message has arrived."""
        if self._status is None:
            self._inbox.append(data)
            self._wake()

    def ended(self, status: Status) -> None:
        """Its status has arrived, or what stands for it."""
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        if self._pipe is not None:
            self._pipe.calls.pop(self._number, None)
        self._wake()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def cancel(self) -> bool:
        """Break it off."""
        if self._status is not None:
            return False
        self._cancelled = True
        self._tell_cancel()
        self._inbox.clear()
        self.ended((Code.CANCELLED, "Locally cancelled by application!", ()))
        return True

    def cancelled(self) -> bool:
        return self._cancelled

    def done(self) -> bool:
        return self._status is not None

    def _expire(self) -> None:
        if self._status is None:
            self._tell_cancel()
            self.ended((Code.DEADLINE_EXCEEDED, "Deadline Exceeded", ()))

    def _tell_cancel(self) -> None:
        pipe, number = self._pipe, self._number
        if pipe is None:
            return

        def arrive() -> None:
            served = pipe.served.get(number)
            if served is not None:
                served.hang_up()

        pipe.say(UP, self._method, "cancel", number, b"", arrive)

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def _next(self) -> bytes | None:
        """The next message; None at the end. Raises as grpc.aio does."""
        while not self._inbox:
            if self._status is not None:
                if self._cancelled:
                    raise asyncio.CancelledError
                code, details, trailers = self._status
                if code is Code.OK:
                    return None
                raise grpc.aio.AioRpcError(code, cast(Any, ()), cast(Any, trailers), details)
            self._news = self._net.loop.create_future()
            try:
                await self._news
            except asyncio.CancelledError:
                self.cancel()
                raise
        data = self._inbox.popleft()
        self._tell_read(len(data) + 16)
        return data

    def _tell_read(self, size: int) -> None:
        pipe, number = self._pipe, self._number
        if pipe is None:
            return

        def arrive() -> None:
            served = pipe.served.get(number)
            if served is not None:
                served.read_by_peer(size)

        pipe.carry(UP, arrive)


class _Unary(ClientCall):
    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        data = await self._next()
        assert data is not None, "a unary call ended without an answer"
        return self._deserialize(data)


class _Stream(ClientCall):
    def __aiter__(self) -> AsyncIterator[Any]:
        return self._messages()

    async def _messages(self) -> AsyncIterator[Any]:
        while (data := await self._next()) is not None:
            yield self._deserialize(data)

    async def read(self) -> Any:
        """The next message, or EOF."""
        data = await self._next()
        return cast(Any, grpc.aio).EOF if data is None else self._deserialize(data)

    async def write(self, message: Any) -> None:
        """Send one, when there is room."""
        while self._unread >= WINDOW_BYTES and self._status is None:
            self._room = self._net.loop.create_future()
            try:
                await self._room
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._status is not None:
            if self._cancelled:
                raise asyncio.CancelledError
            raise asyncio.InvalidStateError("RPC already finished.")
        self._send(_bytes(message))


class SimServer:
    """grpc.aio.Server of one process at one address, with our scope around its handlers."""

    def __init__(self, net: Net, process: Process, address: str, clock: Clock, *, public: bool) -> None:
        self.net = net
        self.process = process
        self.address = address
        self.open = True
        self.pipes: dict[Pipe, None] = {}
        self.handlers: dict[str, Any] = {}
        self._around = Around(trace.NoOpTracer(), clock, public=public)
        net.servers[address] = self
        process.on_kill.append(self._killed)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are used."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            self.handlers[method] = self._scoped(method, handler)

    def close(self) -> None:
        """It takes no more; what runs is cut off."""
        self.open = False
        if self.net.servers.get(self.address) is self:
            del self.net.servers[self.address]
        for pipe in list(self.pipes):
            pipe.carry(DOWN, lambda pipe=pipe: pipe.break_off("Socket closed"))  # type: ignore[misc]

    def _scoped(self, method: str, handler: Any) -> Any:
        async def continuation(_details: Any) -> Any:
            return handler

        details = cast(Any, _Details(method))
        asking = self._around.intercept_service(continuation, details)
        try:
            asking.send(None)
        except StopIteration as found:
            return found.value
        raise AssertionError("the interceptor waits for something")

    def _killed(self) -> None:
        self.open = False
        for pipe in list(self.pipes):
            pipe.lose_server()


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: tuple[Any, ...] = ()


class ServerCall:
    """One call at its server; also the handler's context."""

    def __init__(self, server: SimServer, pipe: Pipe, number: int, method: str, metadata: Any,
                 deadline: float | None) -> None:  # fmt: skip
        self._server = server
        self._pipe = pipe
        self._number = number
        self._method = method
        self._metadata = metadata
        self._deadline = deadline
        self._handler = server.handlers[method]
        self._inbox: deque[bytes] = deque()
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._unread = 0
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._hung_up = False
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailers: tuple[Any, ...] = ()

    def begin(self, request: bytes | None) -> None:
        """The call has arrived; it starts when its process runs."""
        self._pipe.served[self._number] = self
        self._server.process.soon(self._start, request)

    def _start(self, request: bytes | None) -> None:
        if not self._hung_up:
            self._task = self._server.net.loop.create_task(self._serve(request))

    def hears(self, data: bytes) -> None:
        """A message of the request stream."""
        self._inbox.append(data)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def hang_up(self) -> None:
        """The client has broken it off, or the connection did."""
        if not self._hung_up and not self._over:
            self._hung_up = True
            self._pipe.served.pop(self._number, None)
            self._server.process.soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def read_by_peer(self, size: int) -> None:
        """The client has taken bytes."""
        self._unread -= size
        if self._room is not None and not self._room.done() and self._unread < WINDOW_BYTES:
            self._room.set_result(None)

    async def _serve(self, request: bytes | None) -> None:
        handler = self._handler
        status: Status = (Code.OK, "", ())
        try:
            parse = handler.request_deserializer
            given = self._requests(parse) if handler.request_streaming else parse(request)
            behaviour = handler.unary_unary or handler.unary_stream or handler.stream_stream
            answer = await behaviour(given, self)
            if not handler.response_streaming:
                self._reply(_bytes(answer))
        except grpc.aio.AbortError:
            assert self._code is not None
            status = (self._code, self._details, self._trailers)
        except asyncio.CancelledError:
            status = (Code.CANCELLED, "", ())
        except Exception as error:
            self._server.net.loop.faults.append(error)
            status = (Code.UNKNOWN, f"Unexpected {type(error)}", ())
        self._finish(status)

    async def _requests(self, parse: Any) -> AsyncIterator[Any]:
        while True:
            while not self._inbox:
                self._news = self._server.net.loop.create_future()
                await self._news
            data = self._inbox.popleft()
            self._tell_read(len(data) + 16)
            yield parse(data)

    def _tell_read(self, size: int) -> None:
        pipe, number = self._pipe, self._number

        def arrive() -> None:
            call = pipe.calls.get(number)
            if call is not None:
                call.read_by_peer(size)

        pipe.carry(DOWN, arrive)

    def _reply(self, data: bytes) -> None:
        pipe, number = self._pipe, self._number

        def arrive() -> None:
            call = pipe.calls.get(number)
            if call is not None:
                call.hears(data)

        self._unread += len(data) + 16
        pipe.say(DOWN, self._method, "message", number, data, arrive)

    def _finish(self, status: Status) -> None:
        self._over = True
        pipe, number = self._pipe, self._number
        pipe.served.pop(number, None)
        if self._hung_up:
            return

        def arrive() -> None:
            call = pipe.calls.get(number)
            if call is not None:
                call.ended(status)

        pipe.say(DOWN, self._method, "status", number, status[0].name.encode(), arrive)

    # The context that handlers see.

    async def write(self, message: Any) -> None:
        """Send one message, when there is room."""
        while self._unread >= WINDOW_BYTES:
            self._room = self._server.net.loop.create_future()
            await self._room
        self._reply(_bytes(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End it with an error."""
        self._code, self._details, self._trailers = code, details, tuple(trailing_metadata)
        raise grpc.aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._server.net.loop.now)

    def code(self) -> Any:
        return self._code if self._code is not None else 0


class SimChannels(Channels):
    """The real ones, whose channels lead into the simulated network."""

    def __init__(self, net: Net, process: Process, identity: Identity) -> None:
        super().__init__(identity, trace.NoOpTracer(), ())
        self._net = net
        self._process = process

    def get(self, address: str, lane: str = "") -> Any:
        """The channel to `address`; made at first use."""
        channel = self._channels.get((address, lane))
        if channel is None:
            plain = cast(Any, SimChannel(self._net, self._process, address))
            channel = self._channels[address, lane] = MeshChannel(plain, self._base)
        return channel


def _bytes(message: Any) -> bytes:
    return cast(bytes, message.SerializeToString(deterministic=True))


def kill(net: Net, process: Process, *, silently: bool = False) -> None:
    """End a process; `silently`: its peers do not hear of it, as when its machine goes."""
    for pipe in list(net.pipes):
        if pipe.owner is process:
            pipe.lose_client(silently=silently)
        elif silently and pipe.server is not None and pipe.server.process is process:
            pipe.server.pipes.pop(pipe, None)
            pipe.server = None
            net.loop.later(KEEPALIVE_S, pipe.break_off, "keepalive timed out")
    process.kill()


__all__ = ["PROCESS", "Fate", "Net", "Passing", "SimChannel", "SimChannels", "SimServer", "Weather", "kill"]
