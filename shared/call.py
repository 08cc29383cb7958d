"""The call being served, kept beside the task: its deadline, its span, and whether it has already cost work.

The one rule: tasks started while serving share it; nothing outside a call has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import INVALID_SPAN, Span

from shared.clock import SYSTEM_CLOCK, Clock
from shared.wire import Version


@dataclass(slots=True)
class Call:
    """One call. `deadline` is a point of its clock's monotonic time, None without one."""

    deadline: float | None = None
    clock: Clock = SYSTEM_CLOCK
    span: Span = INVALID_SPAN
    work_done: bool = False
    peer: Version | None = None  # the protocol that the caller speaks, where it says so


_CALL: Final[ContextVar[Call | None]] = ContextVar("trunkline_call", default=None)


def current() -> Call | None:
    """The call this task serves, if any."""
    return _CALL.get()


def begin(call: Call) -> None:
    """Make `call` the current one of this task and of those it starts."""
    _CALL.set(call)


def remaining_s() -> float | None:
    """Seconds left of the current call's budget (never below 0); None without a deadline."""
    call = _CALL.get()
    if call is None or call.deadline is None:
        return None
    return max(0.0, call.deadline - call.clock.monotonic())


def mark_work_done() -> None:
    """Note that the current call has cost engine work: a transport must not retry it by itself."""
    call = _CALL.get()
    if call is not None:
        call.work_done = True


@contextmanager
def budget(seconds: float | None, clock: Clock = SYSTEM_CLOCK) -> Iterator[Call]:
    """A call with this many seconds left, for what does not come in by gRPC (the HTTP faces)."""
    call = Call(None if seconds is None else clock.monotonic() + seconds, clock)
    token = _CALL.set(call)
    try:
        yield call
    finally:
        _CALL.reset(token)
