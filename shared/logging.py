"""Logs: one line an event, JSON or plain, to stderr; one canonical line per request.

The one rule: no prompt text and no token ids, at any level.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from shared.config import LogConfig
from shared.ids import Identity

_FIELDS: Final = "trunkline_fields"
_encoder: Final = msgspec.json.Encoder(enc_hook=str)


def setup(config: LogConfig, identity: Identity) -> None:
    """Log to stderr from now on, with the process's role and id in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(identity) if config.json else _PlainFormatter(identity))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for noisy in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def canonical(logger: logging.Logger, event: str, **fields: Any) -> None:
    """Log an event with its fields: the one line of a request, or of a change of state."""
    logger.info(event, extra={_FIELDS: fields})


def _when(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _JsonFormatter(logging.Formatter):
    def __init__(self, identity: Identity) -> None:
        super().__init__()
        self._who = {"role": identity.role, "id": identity.id}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {"at": _when(record), "level": record.levelname.lower(), **self._who}
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
