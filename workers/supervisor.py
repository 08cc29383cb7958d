"""Keeps an engine behind the door: starts it, watches it move, ends it when it does not, starts the next one.

Owns the engine process. The one rule: an engine that ends before the first was ever ready ends the worker with its
reason; later ones are replaced, after a growing pause.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from shared.clock import Clock
from shared.errors import StartError
from shared.logging import canonical
from shared.mailbox import AsyncMailbox, MailboxClosed, MailboxFull, socket_pair
from workers.door.execution import EngineBroken
from workers.engine import messages as m

WATCH_S = 0.1
SHUTDOWN_S = 5.0
PAUSE_S = 0.2
MOST_PAUSE_S = 10.0
SOUND_LIFE_S = 60.0  # an engine that lived so long starts the pauses afresh
LAST_WORDS_S = 1.0

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], m.FromEngine] = msgspec.msgpack.Decoder(m.FromEngine).decode

Send = Callable[[m.ToEngine], None]


@dataclass(frozen=True, slots=True)
class Program:
    """How an engine is started: `arguments` answers the command line of `module` for the mailbox's descriptor."""

    module: str
    arguments: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]


class User(Protocol):
    """Whom the engine serves. `engine_ready` and `engine_says` raise EngineBroken at what cannot be."""

    def engine_starts(self, stage: str, fraction: float) -> None:
        """It is on its way."""
        ...

    def engine_ready(self, ready: m.Ready, send: Send) -> None:
        """It takes work, by `send`."""
        ...

    def engine_says(self, said: m.StepOut | m.Tick) -> None:
        """It produced something."""
        ...

    def engine_stalled(self) -> bool:
        """It should move, and does not."""
        ...

    def engine_ended(self, why: str) -> None:
        """It was ready, and is gone."""
        ...


class Life:
    """One engine process, from its start to its end."""

    def __init__(self, user: User) -> None:
        self.ready = False
        self.why = ""  # it has to end, or has ended
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None
        self._mailbox: AsyncMailbox | None = None
        self._silent = asyncio.Event()  # nothing more will be heard

    async def run(self, program: Program) -> None:
        """Starts it and waits for its end, however that comes; cancelled, it kills it."""
        ours, theirs = socket_pair()
        with theirs:
            self._process = _start(program, theirs.fileno())
        self._mailbox = AsyncMailbox(ours, self._hear, self._silent.set)
        try:
            status = await _exit(self._process)
            async with asyncio.timeout(LAST_WORDS_S):
                await self._silent.wait()
            self.end(_said(status))
        except TimeoutError:
            self.end("its mailbox outlived it")
        finally:
            self.end("the worker ended it")
            self._mailbox.close()
            await self._reap()
            if self.ready:
                self._user.engine_ended(self.why)

    def end(self, why: str) -> None:
        """Kills it if it lives; the first reason stays."""
        self.why = self.why or why
        if self._process is not None:
            self._process.kill()  # does nothing where its end is known

    async def _reap(self) -> None:
        """A killed process is gone in no time; one that the kernel holds is left to it."""
        assert self._process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await _exit(self._process)

    def send(self, message: m.ToEngine) -> None:
        """To the engine. One that reads nothing is ended."""
        assert self._mailbox is not None
        try:
            self._mailbox.send(_encode(message))
        except MailboxFull:
            self.end("the engine reads nothing")
        except MailboxClosed:
            pass  # its end is on the way, and takes the request with it

    def watch(self) -> None:
        """Ends it if it does not move."""
        if self.ready and not self.why and self._user.engine_stalled():
            self.end("the engine made no step while work waited")

    def _hear(self, frame: bytes) -> None:
        if self.why:
            return  # what it still said is not believed
        try:
            self._take(_decode(frame))
        except (EngineBroken, msgspec.MsgspecError) as error:
            self.end(f"the engine is broken: {error}")

    def _take(self, said: m.FromEngine) -> None:
        match said:
            case m.StepOut() | m.Tick():
                self._user.engine_says(said)
            case m.Progress(stage, fraction):
                self._user.engine_starts(stage, fraction)
            case m.Ready():
                self._user.engine_ready(said, self.send)
                self.ready = True
            case m.Fault():
                self.end(said.message)


class Supervisor:
    """See the module."""

    def __init__(self, program: Program, user: User, clock: Clock) -> None:
        self.restarts = 0
        self._program = program
        self._user = user
        self._clock = clock
        self._life: Life | None = None
        self._stopping = False
        self._was_ready = False

    async def run(self) -> None:
        """One engine after the other, until `stop`. Raises StartError if the first one cannot start."""
        pause = PAUSE_S
        while not self._stopping:
            began = self._clock.monotonic()
            why = await self._live()
            if self._stopping:
                return
            if not self._was_ready:
                raise StartError(why)
            pause = PAUSE_S if self._clock.monotonic() - began > SOUND_LIFE_S else min(2 * pause, MOST_PAUSE_S)
            self.restarts += 1
            canonical(_log, "engine ended", why=why, restarts=self.restarts, pause_s=pause)
            await asyncio.sleep(pause)

    async def stop(self) -> None:
        """Lets the engine end after its step, or ends it after a few seconds. `run` then returns."""
        self._stopping = True
        life = self._life
        if life is not None and life.ready:
            life.send(m.Shutdown())
            for _ in range(int(SHUTDOWN_S / WATCH_S)):
                if self._life is None:
                    return
                await asyncio.sleep(WATCH_S)
        if life is not None:
            life.end("the worker ended it")

    async def _live(self) -> str:
        """One life; why it ended."""
        life = self._life = Life(self._user)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(life))
            try:
                await life.run(self._program)
            finally:
                watching.cancel()
                self._life = None
        self._was_ready = self._was_ready or life.ready
        return life.why

    async def _watch(self, life: Life) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            life.watch()


def _start(program: Program, fd: int) -> subprocess.Popen[bytes]:
    """The process, with its mailbox at `fd`. Plain Popen starts it by vfork: an event loop's own way forks this process
    with its gRPC threads, which gRPC notices and complains of."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "workers.lifeline", str(os.getpid())),
            *(program.module, *program.arguments(fd)),
        ],
        pass_fds=(fd,),
        env={**os.environ, **program.environment},
        stdin=subprocess.DEVNULL,
    )


async def _exit(process: subprocess.Popen[bytes]) -> int:
    """Waits for its end; the status."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    if process.poll() is None:
        fd = os.pidfd_open(process.pid)
        try:
            loop.add_reader(fd, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    return process.wait()


def _said(status: int) -> str:
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"the engine {how}"
