"""The real engine, scheduler and block pool with a model that is a hash and steps that take set times, and its keeper.

Owns the model's law: a token is a function of (salt, seed, choice, all ids before it), so that one lost, doubled or
foreign token changes everything after it. The one rule: an engine's step begins and ends at different moments, and what
it says is heard when it would be said.
"""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from shared.ids import Rng
from tests.fakes.mesh import EOS, TEXT_TOKENS, WIDTH
from tests.sim.loop import Process, SimLoop
from workers.door.execution import EngineBroken
from workers.engine import messages as m
from workers.engine.blocks import BlockPool
from workers.engine.engine import TICK_S, Engine, Vocabulary
from workers.engine.messages import Sampling
from workers.engine.sampler import Draw, Pick
from workers.engine.scheduler import Limits, Plan, Scheduler, Span
from workers.engine.step import Result
from workers.supervisor import MOST_PAUSE_S, PAUSE_S, SOUND_LIFE_S, WATCH_S, Send
from workers.worker import Worker

MARK: Final = 290  # as the first id of a prompt: the ids after it are the lengths of the choices
_VOCABULARY: Final = EOS + 1
_encode = msgspec.msgpack.Encoder().encode
_to_engine: Callable[[bytes], m.ToEngine] = msgspec.msgpack.Decoder(m.ToEngine).decode
_from_engine: Callable[[bytes], m.FromEngine] = msgspec.msgpack.Decoder(m.FromEngine).decode


def _start(salt: int, seed: int, choice: int) -> int:
    return zlib.crc32(b"%d|%d|%d" % (salt, seed, choice))


def _drawn(state: int, prompt: Sequence[int], choice: int, place: int) -> int:
    mixed = (state * 0x9E3779B1 ^ state >> 15) & 0xFFFFFFFF
    if prompt[0] == MARK:
        return EOS if place == prompt[1 + choice] else mixed % TEXT_TOKENS
    return EOS if mixed % 41 == 0 else (mixed >> 8) % TEXT_TOKENS


def token(salt: int, seed: int, choice: int, prompt: Sequence[int], output: Sequence[int]) -> int:
    """The token after `output`."""
    ids = np.array([*prompt, *output], np.int32).tobytes()
    return _drawn(zlib.crc32(ids, _start(salt, seed, choice)), prompt, choice, len(output))


def completion(salt: int, seed: int, choice: int, prompt: Sequence[int], most: int) -> tuple[list[int], bool]:
    """All ids of a choice, and whether an end of sequence came after them."""
    state = zlib.crc32(np.array(prompt, np.int32).tobytes(), _start(salt, seed, choice))
    ids: list[int] = []
    while len(ids) < most:
        drawn = _drawn(state, prompt, choice, len(ids))
        if drawn == EOS:
            return ids, True
        ids.append(drawn)
        state = zlib.crc32(np.array([drawn], np.int32).tobytes(), state)
    return ids, False


def states(salt: int, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Hidden states [n, WIDTH], small whole numbers: their means are exact, whatever order they are summed in."""
    return ((np.array(ids)[:, None] >> np.arange(WIDTH) & 15) + salt).astype(np.float32)


@dataclass(frozen=True)
class Shape:
    """What an engine pretends to be, and how long its steps take."""

    blocks: int = 64
    max_seqs: int = 8
    max_batch_tokens: int = 64
    max_held: int = 64
    max_context: int = 512
    step_s: float = 0.01
    prefill_s: float = 0.0001  # more, per token
    load_s: float = 0.5
    overlap: bool = False  # the next step is launched before the one in flight is read

    def ready(self, artefact_hash: str, tokenizer_hash: str) -> m.Ready:
        """As the engine says it."""
        return m.Ready(artefact_hash, tokenizer_hash, "sim", "sim", _VOCABULARY, self.max_context, 16, self.blocks,
                       self.max_seqs, WIDTH, (EOS,))  # fmt: skip


class SimEngine:
    """One engine process: inbox, outbox, clock and runner of the real `Engine`. `salt` changes what it draws."""

    def __init__(self, process: Process, loop: SimLoop, shape: Shape, rng: Rng, salt: int,
                 hears: Callable[[bytes], None]) -> None:  # fmt: skip
        self.process = process
        self.salt = salt
        self.slow = 1.0  # times longer steps
        self.sleeping = False
        self.overlaps = shape.overlap
        self._loop = loop
        self._shape = shape
        self._rng = rng
        self._hears = hears
        self._inbox: deque[bytes] = deque()
        self._news: asyncio.Future[None] | None = None
        self._said: list[tuple[float, bytes]] = []
        self._offset = 0.0  # how far the step is ahead of the loop
        self._free_at = 0.0  # when the device has done what was launched
        self._cancelled: set[int] = set()
        self.scheduler = Scheduler(
            Limits(shape.max_batch_tokens, shape.max_seqs, shape.max_held, shape.max_context), BlockPool(shape.blocks)
        )
        self.engine = Engine(Vocabulary(_VOCABULARY, (EOS,)), self.scheduler, self, self, self, self)

    async def run(self, ready: m.Ready) -> None:
        """From its start to Shutdown."""
        await asyncio.sleep(self._shape.load_s * self._rng.uniform(0.8, 1.2))
        self._hears(_encode(ready))
        while self.engine.open:
            if not (self._inbox or self.engine.busy):
                await self._doze()
            self.engine.step()
            await self._speak()

    def tell(self, frame: bytes) -> None:
        """A frame of the door has arrived."""
        self._inbox.append(frame)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    @property
    def idle(self) -> bool:
        """It has nothing to do and knows of nothing."""
        return not (self._inbox or self.scheduler.requests)

    async def _doze(self) -> None:
        self._news = self._loop.create_future()
        self.sleeping = True
        try:
            async with asyncio.timeout(TICK_S):
                await self._news
        except TimeoutError:
            pass
        self.sleeping = False

    async def _speak(self) -> None:
        said, self._said = self._said, []
        ends, self._offset = self._offset, 0.0
        for after_s, frame in said:
            if after_s < ends:
                self._hears(frame)
        if ends:
            await asyncio.sleep(ends)
        for after_s, frame in said:
            if after_s >= ends:
                self._hears(frame)

    # What the engine works with.

    def receive(self, timeout_s: float) -> list[m.ToEngine]:
        """See `engine.Inbox`."""
        frames, self._inbox = self._inbox, deque()
        found = [_to_engine(frame) for frame in frames]
        self._cancelled |= {each.key for each in found if isinstance(each, m.Cancel)}
        return found

    def send(self, message: m.FromEngine) -> None:
        """See `engine.Outbox`."""
        self._said.append((self._offset, _encode(message)))

    def monotonic(self) -> float:
        return self._loop.now + self._offset

    def wall_ms(self) -> int:
        return round(self.monotonic() * 1000)

    def launch(self, plan: Plan, draws: Sequence[Draw]) -> SimStep:
        """The step takes its time. INV-12: nothing that the engine knows to be cancelled is in it."""
        keys = {span.sequence.request.key for span in plan.spans}
        assert not keys & self._cancelled, f"INV-12: a step for cancelled keys {keys & self._cancelled}"
        assert all(request.key not in self._cancelled for request in self.scheduler.requests.values())
        shape = self._shape
        took_s = shape.step_s + shape.prefill_s * plan.prefill_tokens
        self._free_at = max(self._free_at, self.monotonic()) + took_s * self.slow * self._rng.uniform(0.8, 1.25)
        return SimStep(self, plan, draws, self._free_at)

    def wait_until(self, moment: float) -> None:
        """What is said from now on is said then, or later."""
        self._offset = max(self._offset, moment - self._loop.now)


@dataclass(frozen=True)
class SimStep:
    """A step on the device of an engine. What it draws is settled when it is read: then the token before is known."""

    engine: SimEngine
    plan: Plan
    draws: Sequence[Draw]
    ends: float

    def result(self) -> Result:
        """See `step.Launched`."""
        self.engine.wait_until(self.ends)
        picks = [self._pick(row.tokens, draw) for row, draw in zip(self.plan.sampled, self.draws, strict=True)]
        return Result(picks, [self._hidden(span) for span in self.plan.encoded])

    def _hidden(self, span: Span) -> torch.Tensor:
        ids = span.sequence.tokens[span.start : span.start + span.count].tolist()
        return torch.from_numpy(states(self.engine.salt, ids))

    def _pick(self, tokens: npt.NDArray[np.int32], draw: Draw) -> Pick:
        known = dataclasses.replace(draw, tokens=tokens, pending=False)
        return Pick(self._draw(known), m.Logprob(-0.5) if draw.sampling.logprobs >= 0 else None)

    def _draw(self, draw: Draw) -> int:
        sampling: Sampling = draw.sampling
        state = zlib.crc32(draw.tokens.tobytes(), _start(self.engine.salt, sampling.seed, draw.choice))
        drawn = _drawn(state, draw.tokens, draw.choice, draw.position)
        return state % TEXT_TOKENS if drawn in draw.banned else drawn


class SimSupervisor:
    """Keeps an engine behind a door, as `workers.supervisor.Supervisor` does with real processes."""

    def __init__(self, door: Process, loop: SimLoop, worker: Worker, shape: Shape, rng: Rng,
                 ready: m.Ready, salt: Callable[[], int]) -> None:  # fmt: skip
        self.engine: SimEngine | None = None
        self.lives = 0
        self._door = door
        self._loop = loop
        self._worker = worker
        self._shape = shape
        self._rng = rng
        self._ready = ready
        self._salt = salt
        self._why = ""
        self._up = False
        self._ended = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """One engine after the other."""
        pause = PAUSE_S
        while not self._stopping:
            began = self._loop.now
            await self._live()
            pause = PAUSE_S if self._loop.now - began > SOUND_LIFE_S else min(2 * pause, MOST_PAUSE_S)
            await asyncio.sleep(pause)

    def stop(self) -> None:
        """The worker has drained."""
        self._stopping = True
        self.kill("the worker ended it")

    def kill(self, why: str = "it was killed") -> None:
        """End the engine now; the door hears of it a moment later."""
        if self.engine is not None and self.engine.process.alive:
            self.engine.process.kill()
            self._loop.later(0.001, self._door.soon, self._over, why)

    def _over(self, why: str) -> None:
        self._why = self._why or why
        self._ended.set()

    async def _live(self) -> None:
        self.lives += 1
        self._why, self._up = "", False
        self._ended = asyncio.Event()
        process = Process(self._loop, f"{self._door.name}.e")
        self._door.on_kill.append(process.kill)
        life = self._ended
        engine = SimEngine(process, self._loop, self._shape, self._rng, self._salt(),
                           lambda frame: self._deliver(life, frame))  # fmt: skip
        self.engine = engine
        process.spawn(self._guarded(engine))
        while not self._ended.is_set():
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._ended.wait()
            except TimeoutError:
                if self._up and self._worker.engine_stalled():
                    self.kill("the engine made no step while work waited")
        self.engine = None
        self._door.on_kill.remove(process.kill)
        if self._up:
            self._worker.engine_ended(self._why)

    async def _guarded(self, engine: SimEngine) -> None:
        try:
            await engine.run(self._ready)
        except Exception as error:
            self._loop.faults.append(error)
            self.kill(f"the engine failed: {error}")

    def _deliver(self, life: asyncio.Event, frame: bytes) -> None:
        self._loop.later(0.0001, self._door.soon, self._hear, life, frame)

    def _hear(self, life: asyncio.Event, frame: bytes) -> None:
        if life is not self._ended or self._why:
            return
        said = _from_engine(frame)
        try:
            if isinstance(said, m.Ready):
                assert self.engine is not None
                self._worker.engine_ready(said, self._sender(self.engine))
                self._up = True
            elif isinstance(said, (m.StepOut, m.Tick)):
                self._worker.engine_says(said)
        except EngineBroken as error:
            self._loop.faults.append(error)
            self.kill(f"the engine is broken: {error}")

    def _sender(self, engine: SimEngine) -> Send:
        def send(message: m.ToEngine) -> None:
            self._loop.later(0.0001, engine.tell, _encode(message))

        return send
