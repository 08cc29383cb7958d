"""An event loop on virtual time that runs several processes: when nothing is ready it jumps to the next timer.

Owns time, order, and which process a callback belongs to. The one rule: everything a process starts inherits its
context, so a stopped process is one whose callbacks are kept back, and a killed one whose callbacks never run. A loop
with nothing ready and no timer is a deadlock and raises, with the tasks that wait.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

START_S: Final = 1000.0
TICKS: Final = 1_000_000  # moments a second
ROUNDS: Final = 50  # of callbacks take a tick: whoever waits for the last rounding error of a sum gets there
SPIN: Final = 20_000  # rounds at one moment before it counts as a livelock

PROCESS: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar("process", default=None)


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set, or time does not move."""


class Process:
    """One life of a simulated process: a gate in front of its callbacks."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.on_kill: list[Callable[[], None]] = []  # run by the world, as the kernel cleans up
        self._loop = loop
        self._kept: list[events.Handle] = []
        self._context = contextvars.Context()
        self._context.run(PROCESS.set, self)
        loop.processes.append(self)

    @property
    def runs(self) -> bool:
        """Its callbacks run now."""
        return self.alive and not self.stopped

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        return self._loop.create_task(work, context=self._context.copy())

    def soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """A callback of this process."""
        self._loop.call_soon(callback, *args, context=self._context)

    def keep(self, handle: events.Handle) -> None:
        """A callback that is due while it does not run."""
        self._kept.append(handle)

    def stop(self) -> None:
        """As by SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """As by SIGCONT: what became due meanwhile runs now, in that order."""
        if self.stopped:
            self.stopped = False
            if self.alive:
                self.release()

    def release(self) -> None:
        """What was kept back runs."""
        self._loop.ready.extend(self._kept)
        self._kept.clear()

    def kill(self) -> None:
        """As by SIGKILL."""
        if self.alive:
            self.alive = False
            for callback in self.on_kill:
                callback()


class _Task(asyncio.Task[Any]):
    """Hashes by number: sets of tasks have the same order in every run."""

    def __init__(self, coro: Any, *, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    def __init__(self, *, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(**kwargs)

    def __hash__(self) -> int:
        return self._number


class SimLoop(base_events.BaseEventLoop):
    """See the module. `quiescent` is called whenever nothing is ready, before time moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START_S
        self.ready: deque[events.Handle] = deque()
        self.turns = 0
        self.quiescent: Callable[[], None] = lambda: None
        self.faults: list[BaseException | str] = []  # what nobody caught
        self.processes: list[Process] = []  # every life there was
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._numbers = itertools.count()
        self._spins = 0
        self._nobody = contextvars.Context()
        self.set_exception_handler(self._uncaught)

    def time(self) -> float:
        """Seconds of virtual time."""
        return self.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> events.Handle:  # type: ignore[override]
        """Run it in this moment, in order."""
        handle = events.Handle(callback, args, self, context)
        self.ready.append(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> events.Handle:  # type: ignore[override]
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> events.TimerHandle:  # type: ignore[override]
        """Run it after so many seconds."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> events.TimerHandle:  # type: ignore[override]
        """Run it then; equal times in the order of asking."""
        when = (
            math.ceil(when * TICKS) / TICKS
        )  # never early by a rounding error: who asks for `due - now` may rely on it
        timer = events.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        """Something that no process does: a wire, a kernel, fate."""
        self.call_at(self.now + delay_s, callback, *args, context=self._nobody)

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        """It is skipped when its time comes."""

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:  # type: ignore[override]
        """A task of the process that makes it, whatever context it asks for."""
        if context is not None and context.get(PROCESS) is None:
            context.run(PROCESS.set, PROCESS.get())
        task = _Task(coro, number=next(self._numbers), loop=self, name=name or "task", context=context)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # those of a killed process stay where they were
        return task

    def create_future(self) -> asyncio.Future[Any]:
        """A future."""
        return _Future(number=next(self._numbers), loop=self)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """What would run on a thread takes no time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        if not self.ready:
            self.quiescent()
        if not self.ready:
            self._jump()
        ready = self.ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is None or process.runs:
                self.turns += 1
                handle._run()
            else:
                process.keep(handle)
        self._spins += 1
        if self._spins % ROUNDS == 0:
            self.now += 1 / TICKS
            self._due()
        if self._spins > SPIN:
            raise Deadlock(f"time stands still at {self.now:.6f}\n{[*self.ready][:20]}\n{self.tasks()}")

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            if self._stopping:  # type: ignore[attr-defined]
                return
            raise Deadlock(f"nothing will ever happen after {self.now:.6f}\n{self.tasks()}")
        when = timers[0][0]
        if when > self.now:
            self.now, self._spins = when, 0
        self._due()

    def _due(self) -> None:
        timers = self._timers
        while timers and timers[0][0] <= self.now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                self.ready.append(timer)

    def revive(self) -> None:
        """The end of the world: every process runs, so that its tasks can end."""
        for process in self.processes:
            process.alive, process.stopped = True, False
            process.release()

    def tasks(self) -> str:
        """Who waits where."""
        lines = []
        for task in asyncio.all_tasks(self):
            frames = task.get_stack(limit=1)
            where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "?"
            process = task.get_context().get(PROCESS) if hasattr(task, "get_context") else None
            lines.append(f"{process.name if process else '-'}: {task.get_coro().__qualname__} at {where}")  # type: ignore[union-attr]
        return "\n".join(sorted(lines))

    def _uncaught(self, _loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.faults.append(error if error is not None else str(context.get("message")))

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector."""
