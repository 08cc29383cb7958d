"""The operation routes /health, /ready and /metrics: routers and workers serve them alone, gateways beside their API.

The one rule: /health says that the process lives and costs nothing; /ready says that it takes work.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared import metrics
from shared.lifecycle import Lifecycle
from shared.ports import address_of, listen

_GRACE_S: Final = 5
_STOP_S: Final = 2.0


def routes(lifecycle: Lifecycle) -> list[Route]:
    """The three routes."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(request: Request) -> Response:
        body = {"ready": lifecycle.ready, "detail": lifecycle.detail}
        return JSONResponse(body, status_code=200 if lifecycle.ready else 503)

    async def exposition(request: Request) -> Response:
        return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE)

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", exposition)]


def leaving(app: ASGIApp, lifecycle: Lifecycle) -> ASGIApp:
    """The app; while the process drains every answer ends its connection, so that balancers find another process for
    what comes next."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start" and lifecycle.draining:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, tell)

    return serve


class HttpServer:
    """A uvicorn server inside this loop that leaves signals alone. `address` is the real host:port."""

    def __init__(self, app: ASGIApp, address: str) -> None:
        """Raises PortTaken."""
        self._socket = listen(address)
        self.address = address_of(self._socket)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_GRACE_S
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve in the background."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Take no more connections and finish what is answered, for a bounded time."""
        self._server.should_exit = True
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=_GRACE_S + _STOP_S)
            if not done:
                self._task.cancel()
                await asyncio.wait([self._task], timeout=_STOP_S)
        self._socket.close()


class _Server(uvicorn.Server):
    def capture_signals(self):  # type: ignore[no-untyped-def]
        """Signals belong to the lifecycle."""
        return contextlib.nullcontext()


def serve_ops(address: str, lifecycle: Lifecycle) -> HttpServer:
    """Serve the operation routes at `address`. Raises PortTaken."""
    server = HttpServer(Starlette(routes=routes(lifecycle)), address)
    server.start()
    return server
