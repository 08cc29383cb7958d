from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from shared import logging as trunkline_logging
from shared.config import LogConfig
from shared.ids import Identity
from shared.logging import canonical, setup

ME = Identity("gateway", "g0", 1)


@pytest.fixture(autouse=True)
def _own_root() -> Iterator[None]:
    """Leaves the root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if isinstance(handler, trunkline_logging._Handing):
            handler.end()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("uvicorn.error", "uvicorn.access", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@contextmanager
def logged(config: LogConfig) -> Iterator[list[str]]:
    """The lines logged inside, once it is left."""
    lines: list[str] = []
    stream = io.StringIO()
    setup(config, ME, stream)
    yield lines
    (handler,) = logging.getLogger().handlers
    assert isinstance(handler, trunkline_logging._Handing)
    handler.end()
    lines += stream.getvalue().splitlines()


def test_a_line_is_json_with_who_when_and_the_events_fields() -> None:
    with logged(LogConfig()) as lines:
        canonical(
            logging.getLogger("trunkline.gateway"), "request", id="ab", ttft_ms=1.5, reason=None, error=ValueError("no")
        )
    (line,) = map(json.loads, lines)
    assert line.pop("at").endswith("Z")
    assert line == {
        "level": "info", "role": "gateway", "id": "ab", "logger": "trunkline.gateway", "event": "request",
        "ttft_ms": 1.5, "reason": None, "error": "no",
    }  # fmt: skip


def test_a_line_logged_inside_a_span_names_its_trace() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with logged(LogConfig()) as lines, tracer.start_as_current_span("x") as span:
        logging.getLogger("trunkline").warning("inside")
    assert json.loads(lines[0])["trace"] == f"{span.get_span_context().trace_id:032x}"


def test_an_exception_stays_on_one_line_of_json() -> None:
    with logged(LogConfig()) as lines:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logging.getLogger("trunkline").exception("it failed")
    (line,) = map(json.loads, lines)
    assert "ValueError: two\nlines" in line["exception"]


def test_plain_lines_are_for_people_and_levels_are_kept() -> None:
    with logged(LogConfig(level="warning", json=False)) as lines:
        logging.getLogger("trunkline").info("not wanted")
        canonical(logging.getLogger("trunkline"), "not wanted either", n=1)
        logging.getLogger("trunkline").warning("wanted %d", 7)
    (line,) = lines
    assert "WARNING g0 wanted 7" in line


def test_a_log_that_nobody_reads_holds_nobody_up_and_lost_lines_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trunkline_logging, "MAX_WAITING", 100)
    reader, writer = os.pipe()
    with open(writer, "w", closefd=True) as stream, open(reader) as read:
        setup(LogConfig(), ME, stream)
        before = trunkline_logging._lost._value.get()
        began = time.monotonic()
        for i in range(3000):
            logging.getLogger("trunkline").info("x" * 200 + str(i))
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler, trunkline_logging._Handing)
        handler.end()
        assert time.monotonic() - began < 4.0
        assert trunkline_logging._lost._value.get() > before + 1000
        got: list[Any] = []
        drain = threading.Thread(target=lambda: got.extend(read))
        drain.start()
        handler.end()
        stream.close()
        drain.join(5)
        assert [json.loads(line)["level"] for line in got] == ["info"] * len(got)
        assert len(got) > 50
