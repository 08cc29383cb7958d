"""Logs: one line an event, JSON or plain, to stderr; one canonical line per request.

The one rule: no prompt text and no token ids, at any level. Lines are written by a thread of their own behind a bounded
queue: who reads the log, or has stopped reading it, holds no event loop up; lines past the bound are counted and lost.
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec
from opentelemetry import trace
from prometheus_client import Counter

from shared.config import LogConfig
from shared.ids import Identity

MAX_WAITING: Final = 10_000
EXIT_S: Final = 1.0
_FIELDS: Final = "trunkline_fields"
_encoder: Final = msgspec.json.Encoder(enc_hook=str)
_lost: Final = Counter("trunkline_log_lines_lost_total", "Log lines given up because nobody took them.")


def setup(config: LogConfig, identity: Identity, stream: TextIO | None = None) -> None:
    """Log to stderr (or `stream`) from now on, with the process's role and id in every line."""
    formatter = _JsonFormatter(identity) if config.json else _PlainFormatter(identity)
    root = logging.getLogger()
    root.handlers[:] = [_Handing(formatter, stream or sys.stderr)]
    root.setLevel(config.level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # Spans that cannot be exported are counted (shared.tracing); the exporter would log each failure.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def canonical(logger: logging.Logger, event: str, **fields: Any) -> None:
    """Log an event with its fields: the one line of a request, or of a change of state."""
    logger.info(event, extra={_FIELDS: fields})


class _Handing(logging.Handler):
    """Makes the line on the thread that logs; a thread of its own writes it."""

    def __init__(self, formatter: logging.Formatter, stream: TextIO) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def emit(self, record: logging.LogRecord) -> None:
        """Hand a line over; past the bound it is lost."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            _lost.inc()

    def end(self) -> None:
        """Write what waits, for at most EXIT_S: at the exit of a process whose log nobody takes, lines are lost."""
        try:
            self._lines.put(None, timeout=EXIT_S)
        except queue.Full:
            return
        self._thread.join(EXIT_S)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            self._stream.write(line + "\n")
            if self._lines.empty():
                self._stream.flush()


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _JsonFormatter(logging.Formatter):
    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._who = {"role": identity.role, "id": identity.id}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"at": _when(record), "level": record.levelname.lower(), **self._who}
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace"] = f"{context.trace_id:032x}"
        line |= {"logger": record.name, "event": record.getMessage(), **getattr(record, _FIELDS, {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encoder.encode(line).decode()


class _PlainFormatter(logging.Formatter):
    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._who = identity.id

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, _FIELDS, {}).items())
        text = f"{_when(record)} {record.levelname:<7} {self._who} {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text
