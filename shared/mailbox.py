"""Frames between two processes over an AF_UNIX stream socket pair: u32 little-endian length, then that many bytes.

Owns framing, back-pressure and the sight of the other side's death. The one rule: neither side ever waits for the other
without a bound: `AsyncMailbox.send` raises MailboxFull, `Mailbox.send` waits only while its backlog is over the limit.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_FRAME: Final = 64 << 20
MAX_BACKLOG: Final = 64 << 20

_HEADER: Final = struct.Struct("<I")
_READ_BYTES: Final = 256 << 10
_READS_PER_TURN: Final = 16  # bounds one turn of the loop to 4 MiB read
_SOCKET_BUFFER: Final = 1 << 20


class MailboxClosed(Exception):
    """The other side is gone, or sent what is no frame; nothing more comes or goes."""


class MailboxFull(Exception):
    """The other side does not read: the frame was not taken."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, with buffers that hold some engine steps. Pass one to a child by `pass_fds`."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return pair


class Framer:
    """Cuts a byte stream into frames, wherever it was split. Holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The frames that `data` completes. Raises MailboxClosed for a length over MAX_FRAME."""
        buffer = self._buffer
        buffer += data
        frames = []
        start, end = 0, len(buffer)
        while end - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise MailboxClosed(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            stop = start + _HEADER.size + length
            if stop > end:
                break
            frames.append(bytes(memoryview(buffer)[start + _HEADER.size : stop]))
            start = stop
        del buffer[:start]
        return frames


class _Outbox:
    """Bytes that wait for the socket, in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._parts: deque[memoryview] = deque()
        self.size = 0

    def put(self, data: bytes) -> None:
        if len(data) > MAX_FRAME:
            raise ValueError(f"a frame of {len(data)} bytes is over the limit of {MAX_FRAME}")
        # One part per small frame: joining costs less than a second buffer in the system call.
        header = _HEADER.pack(len(data))
        parts = (header + data,) if len(data) < _READ_BYTES else (header, data)
        for part in parts:
            self._parts.append(memoryview(part))
            self.size += len(part)

    def flush(self) -> bool:
        """Write what the socket takes now; True when nothing is left. Raises MailboxClosed."""
        parts = self._parts
        while parts:
            try:
                sent = self._sock.sendmsg([parts[i] for i in range(min(len(parts), 64))])
            except BlockingIOError:
                return False
            except OSError as exc:
                raise MailboxClosed("the other side closed") from exc
            self.size -= sent
            while parts and sent >= len(parts[0]):
                sent -= len(parts.popleft())
            if sent:
                parts[0] = parts[0][sent:]
        return True


class Mailbox:
    """The synchronous end, for a process without an event loop. One thread uses it."""

    def __init__(self, sock: socket.socket, *, max_backlog: int = MAX_BACKLOG) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._max_backlog = max_backlog
        self._framer = Framer()
        self._outbox = _Outbox(sock)
        self._poll = select.poll()
        self._chunk = memoryview(bytearray(_READ_BYTES))

    def fileno(self) -> int:
        """The descriptor, to poll it together with others."""
        return self._sock.fileno()

    def send(self, data: bytes) -> None:
        """Send one frame. Waits only while more than `max_backlog` bytes wait. Raises MailboxClosed."""
        self._outbox.put(data)
        self._outbox.flush()
        while self._outbox.size > self._max_backlog:
            self._wait(select.POLLOUT, math.inf)
            self._outbox.flush()

    def recv_all(self, timeout_s: float) -> list[bytes]:
        """All frames that are there; waits up to `timeout_s` seconds for the first, and sends the backlog meanwhile.

        Empty after the time, or earlier when part of the backlog went out. Raises MailboxClosed once the other side is
        gone and everything it sent was read.
        """
        frames, ended = self._read()
        if not frames and not ended:
            events = select.POLLIN if self._outbox.flush() else select.POLLIN | select.POLLOUT
            self._wait(events, timeout_s)
            if self._outbox.size:
                self._outbox.flush()
            frames, ended = self._read()
        if ended and not frames:
            raise MailboxClosed("the other side closed")
        return frames

    def close(self) -> None:
        """Close the socket; what waits to be sent is dropped."""
        self._sock.close()

    def _wait(self, events: int, timeout_s: float) -> None:
        self._poll.register(self._sock, events)
        self._poll.poll(None if timeout_s == math.inf else math.ceil(timeout_s * 1000))

    def _read(self) -> tuple[list[bytes], bool]:
        frames: list[bytes] = []
        for _ in range(_READS_PER_TURN):
            try:
                count = self._sock.recv_into(self._chunk)
            except BlockingIOError:
                return frames, False
            except OSError:
                return frames, True
            if not count:
                return frames, True
            frames += self._framer.feed(self._chunk[:count])
        return frames, False


class AsyncMailbox:
    """The end on an event loop. `on_frame` runs on the loop for each frame; it must not block.

    `on_close` runs once, when the other side is gone or `on_frame` raised; not after our own `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[bytes], None],
        on_close: Callable[[], None],
        *,
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_frame = on_frame
        self._on_close = on_close
        self._max_backlog = max_backlog
        self._framer = Framer()
        self._outbox = _Outbox(sock)
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._writing = False
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        on_frame: Callable[[bytes], None],
        on_close: Callable[[], None],
        *,
        max_backlog: int = MAX_BACKLOG,
    ) -> AsyncMailbox:
        """A mailbox on the running loop."""
        return cls(sock, on_frame, on_close, max_backlog=max_backlog)

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent."""
        return self._outbox.size

    def send(self, data: bytes) -> None:
        """Send one frame without waiting. Raises MailboxFull (frame not taken) or MailboxClosed."""
        if self.closed:
            raise MailboxClosed("the mailbox is closed")
        if self._outbox.size + len(data) > self._max_backlog:
            raise MailboxFull(f"{self._outbox.size} bytes wait to be sent")
        self._outbox.put(data)
        if not self._writing:
            self._writable()

    def close(self) -> None:
        """Close the socket; what waits to be sent is dropped. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._writing:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()

    def _readable(self) -> None:
        try:
            self._take_turn()
        except MailboxClosed:
            self._fail()
        except Exception:
            # A frame that cannot be handled leaves both sides with different ideas: better to end than to go on.
            self._fail()
            raise

    def _take_turn(self) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                count = self._sock.recv_into(self._chunk)
            except BlockingIOError:
                return
            except OSError as exc:
                raise MailboxClosed("the other side closed") from exc
            if not count:
                raise MailboxClosed("the other side closed")
            for frame in self._framer.feed(self._chunk[:count]):
                self._on_frame(frame)
                if self.closed:
                    return

    def _writable(self) -> None:
        try:
            empty = self._outbox.flush()
        except MailboxClosed:
            # The reader sees the end too, after what the other side still sent; it reports it.
            self._stop_writing()
            return
        if empty:
            self._stop_writing()
        elif not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _fail(self) -> None:
        if not self.closed:
            self.close()
            self._on_close()
