"""What happens around every handler: span, deadline, protocol check, and the way errors leave.

Own, because the stock interceptors record a cancelled stream as OK and an error's exception twice. The one rule:
handlers are coroutines or async generators that raise TrunklineError; the text of any other exception never leaves.
Health and reflection pass through untouched.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import grpc
from grpc_status import rpc_status
from opentelemetry import trace
from opentelemetry.context import attach
from prometheus_client import Counter

from shared import call, channels, errors, wire
from shared.clock import Clock
from shared.errors import Reason, TrunklineError
from shared.tracing import extract

_log = logging.getLogger(__name__)

_BARE: Final = ("grpc.health.", "grpc.reflection.")
_SERVER_ERRORS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"

_broken = Counter(
    "trunkline_calls_broken_total", "Calls whose connection died under a read or a write, by method.", ["method"]
)


Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


if TYPE_CHECKING:
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor  # generic for the type checker only


class Around(_Interceptor):
    """The interceptor of every Trunkline server. A public one starts traces and steers the client's retries; an
    internal one checks the protocol and continues traces only."""

    def __init__(self, tracer: trace.Tracer, clock: Clock, *, public: bool) -> None:
        self._tracer = tracer
        self._clock = clock
        self._public = public

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Put our scope around the handler."""
        handler = cast("Handler | None", await continuation(handler_call_details))
        method = str(handler_call_details.method).removeprefix("/")
        # None: the method is not known here, which grpc answers itself.
        if handler is None or method.startswith(_BARE):
            return cast("Handler", handler)
        return _rebuilt(handler, self._answer(handler, method))

    def _answer(self, handler: Handler, method: str) -> Callable[..., Awaitable[Any]]:
        serve = cast("Callable[..., Any]", _behaviour(handler))
        streams = bool(handler.response_streaming)

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with self._scope(method, context):
                result = serve(request, context)
                return await (_send(result, context) if streams else result)

        return answer

    @asynccontextmanager
    async def _scope(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
        metadata = channels.read(context.invocation_metadata())
        span = self._start_span(method, metadata)
        this = call.Call(self._deadline(context), self._clock, span)
        # The call's task is its own: nothing needs to be put back afterwards.
        call.begin(this)
        attach(trace.set_span_in_context(span))
        code = "OK"
        try:
            this.peer = self._peer(metadata)
            yield
            code = _set_code(context)
        except TrunklineError as exc:
            code = exc.row.code.name
            _record(span, exc.reason.value, exc.message)
            await self._refuse(exc, context, this)
        except asyncio.CancelledError:
            code = "DEADLINE_EXCEEDED" if call.remaining_s() == 0.0 else "CANCELLED"
            span.set_attribute("error.type", code)
            raise
        except grpc.aio.AbortError:
            code = _set_code(context)
            span.set_attribute("error.type", code)
            raise
        except Exception as exc:
            if _connection_died(exc):
                code = "CANCELLED"
                span.set_attribute("error.type", code)
                _broken.labels(method).inc()
                raise asyncio.CancelledError from None  # which grpc takes in silence: there is nobody to answer
            code = "INTERNAL"
            stack = "".join(traceback.format_tb(exc.__traceback__))
            _record(span, type(exc).__name__, "", stack)
            _log.exception("%s failed", method)
            await self._refuse(TrunklineError(Reason.INTERNAL, "internal error"), context, this)
        finally:
            span.set_attribute("rpc.response.status_code", code)
            if code in _SERVER_ERRORS:
                span.set_status(trace.StatusCode.ERROR)
            span.end()

    def _start_span(self, method: str, metadata: Any) -> trace.Span:
        traceparent = metadata.get("traceparent", "")
        if not self._public and not traceparent:
            # Between services only requests are traced, not the standing streams and polls.
            return trace.INVALID_SPAN
        return self._tracer.start_span(
            method,
            context=extract(traceparent, metadata.get("tracestate", "")),
            kind=trace.SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
        )

    def _deadline(self, context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
        remaining = cast("float | None", context.time_remaining())
        return None if remaining is None else self._clock.monotonic() + remaining

    def _peer(self, metadata: Any) -> wire.Version | None:
        """What the caller speaks; None if that is no concern here. Raises PROTOCOL_MISMATCH."""
        spoken = metadata.get(channels.PROTOCOL_KEY)
        if self._public or spoken is None:  # tools that come by reflection speak no version
            return None
        peer = wire.spoken(spoken)
        if peer is None or peer.major != wire.PROTOCOL.major:
            raise TrunklineError(
                Reason.PROTOCOL_MISMATCH,
                f"protocol {spoken[:16]} is spoken, {wire.PROTOCOL_TEXT} is understood",
                metadata={"protocol": wire.PROTOCOL_TEXT},
            )
        return peer

    async def _refuse(
        self, error: TrunklineError, context: grpc.aio.ServicerContext[Any, Any], this: call.Call
    ) -> None:
        status = cast(Any, rpc_status.to_status(errors.to_status(error)))
        trailers = tuple(status.trailing_metadata)
        if self._public:
            trailers += _pushback(error, this.work_done)
        await context.abort(status.code, status.details, trailers)


def _connection_died(exc: BaseException) -> bool:
    """Whether this, or all that it gathers, is grpc's word on a call whose connection is gone."""
    if isinstance(exc, BaseExceptionGroup):
        return all(_connection_died(each) for each in exc.exceptions)
    return isinstance(exc, grpc.aio.InternalError)


def _pushback(error: TrunklineError, work_done: bool) -> tuple[tuple[str, str], ...]:
    """What to tell the client's transport: do not retry (-1), or retry after so many milliseconds."""
    if work_done or not error.row.retryable:
        return ((_PUSHBACK_KEY, "-1"),)
    if error.retry_after_s is not None:
        return ((_PUSHBACK_KEY, str(round(error.retry_after_s * 1000))),)
    return ()


def _record(span: trace.Span, type_: str, message: str, stack: str = "") -> None:
    span.set_attribute("error.type", type_)
    attributes = {"exception.type": type_, "exception.message": message, "exception.stacktrace": stack}
    span.add_event("exception", {key: value for key, value in attributes.items() if value})


def _set_code(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Name of the code the handler left in the context; OK without one."""
    code = cast(Any, context).code()
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((status.name for status in grpc.StatusCode if status.value[0] == code), "OK")


async def _send(responses: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Write what a handler yields. Unlike grpc's own loop it closes the generator before the call ends, cancelled or
    not: a handler's `finally` has run when the span ends."""
    if not hasattr(responses, "__aiter__"):
        await responses  # the handler writes by itself
        return
    async with aclosing(responses):
        async for response in responses:
            await context.write(response)


def _behaviour(handler: Handler) -> object:
    any_ = cast(Any, handler)
    return any_.unary_unary or any_.unary_stream or any_.stream_unary or any_.stream_stream


def _rebuilt(handler: Handler, answer: Callable[..., Awaitable[Any]]) -> Handler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(
        cast(Any, answer),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
