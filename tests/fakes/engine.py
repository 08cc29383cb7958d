"""An engine without a model: a real process behind a mailbox, with tokens from a formula and steps that take set times.

`Formula` is the engine's state machine and knows no time; `main` gives it a process and a latency model. A request's
tokens depend on prompt, seed, choice and position alone, so that any engine of this kind continues any other's.
Selected by `engine: {module: tests.fakes.engine, flags: {step-ms: 5}}` in a worker's configuration.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from shared.clock import SYSTEM_CLOCK, Clock
from shared.mailbox import Mailbox, MailboxClosed
from workers.engine import messages as m
from workers.engine.options import EngineOptions, from_arguments
from workers.weights.manifest import CONFIG, read_manifest

BLOCK = 16
TICK_S = 0.25

_log = logging.getLogger(__name__)


def token(prompt: bytes, seed: int, choice: int, position: int, vocab_size: int) -> int:
    """The token at `position` of a choice's output."""
    return drawn(zlib.crc32(prompt), seed, choice, position, vocab_size)


def drawn(prompt_crc: int, seed: int, choice: int, position: int, vocab_size: int) -> int:
    """The same, of a prompt with this checksum: a long one is read once."""
    return zlib.crc32(b"|%d|%d|%d" % (seed, choice, position), prompt_crc) % vocab_size


def vector(data: bytes, width: int) -> bytes:
    """The embedding of an input, float32 little-endian."""
    return np.sin(np.arange(1, width + 1) * (1 + zlib.crc32(data) % 1000)).astype("<f4").tobytes()


@dataclass(frozen=True, slots=True)
class Shape:
    """What it pretends to be."""

    vocab_size: int = 1000
    max_context: int = 512
    hidden_size: int = 8
    kv_blocks: int = 256
    max_seqs: int = 8
    max_batch_tokens: int = 64
    eos_token_ids: tuple[int, ...] = (0,)


@dataclass(slots=True, eq=False)
class Line:
    """One choice, or one input of an encode."""

    index: int
    length: int  # prompt and output tokens so far
    output: int  # output tokens so far
    computed: int = 0
    done: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.computed // BLOCK)

    @property
    def decodes(self) -> bool:
        return self.computed > 0 and self.length - self.computed == 1


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    spec: m.Admit | m.Encode
    lines: list[Line]
    stops: frozenset[int] = frozenset()
    arrived: float = 0.0
    prompt_crc: int = 0
    paused: bool = False
    scheduled: float | None = None
    first_token: float | None = None
    steps: int = 0
    begun: bool = False  # it came with tokens

    @property
    def key(self) -> int:
        return self.spec.key


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a step takes."""

    step_ms: float = 5.0  # any step
    sequence_us: float = 0.0  # more for each sequence that decodes
    prefill_us: float = 0.0  # more for each token of a prefill

    def step_s(self, prefill_tokens: int, decode_tokens: int) -> float:
        """Seconds."""
        return self.step_ms / 1e3 + (self.sequence_us * decode_tokens + self.prefill_us * prefill_tokens) / 1e6


@dataclass(slots=True)
class Formula:
    """The state machine: `take` messages, then `step`. First come, first served; no preemption.

    `now` is set by whoever keeps time, before either; a step's outputs come at its end, `pace` later.
    """

    shape: Shape
    pace: Pace
    now: float = 0.0  # seconds
    steps: int = 0
    longest_ms: float = 0.0
    jobs: dict[int, Job] = field(default_factory=dict)
    _ends: float = 0.0
    _events: list[m.Event] = field(default_factory=list)
    _runs: list[m.Run] = field(default_factory=list)

    def take(self, message: m.ToEngine) -> None:
        """One message of the door."""
        match message:
            case m.Admit():
                self.jobs[message.key] = self._generation(message)
            case m.Encode():
                lines = [Line(i, len(data) // 4, 0) for i, data in enumerate(message.inputs)]
                self.jobs[message.key] = Job(message, lines, arrived=self.now)
            case m.Cancel(key):
                self.jobs.pop(key, None)
                self._events.append(m.Freed(key, self.steps))
            case m.StopChoice(key, choice):
                self._stop(key, choice)
            case m.Pause(key, paused):
                if key in self.jobs:
                    self.jobs[key].paused = paused

    @property
    def runnable(self) -> bool:
        """A step is due."""
        return any(not job.paused for job in self.jobs.values())

    def step(self) -> m.StepOut | None:
        """One step of what is due; None if nothing is, and nothing was said."""
        batch = list(self._batch())
        decodes = sum(line.decodes for _, line in batch)
        prefills = sum(self._count(line) for _, line in batch) - decodes
        took_s = self.pace.step_s(prefills, decodes) if batch else 0.0
        self._ends = self.now + took_s
        self.steps += bool(batch)
        self.longest_ms = max(self.longest_ms, took_s * 1e3)
        for job, line in batch:
            self._advance(job, line)
        if not (batch or self._runs or self._events):
            return None
        return self._said(took_s * 1e3, prefills, decodes)

    def before_step(self) -> m.StepOut | None:
        """What is to be said now, not after another step: of those who were cancelled."""
        return self._said(0.0, 0, 0) if self._runs or self._events else None

    def _said(self, took_ms: float, prefills: int, decodes: int) -> m.StepOut:
        runs, self._runs = self._runs, []
        events, self._events = self._events, []
        return m.StepOut(self.steps, took_ms, runs, events, self.load(), prefills, decodes)

    def load(self) -> m.Load:
        """Absolute load."""
        lines = [line for job in self.jobs.values() for line in job.lines if not line.done]
        running = [line for line in lines if line.computed]
        used = sum(line.blocks for line in running)
        return m.Load(
            running=len(running),
            waiting=len(lines) - len(running),
            queued_prefill_tokens=sum(line.length - line.computed for line in lines),
            kv_blocks_free=max(0, self.shape.kv_blocks - used),
            kv_blocks_cached=0,
            kv_blocks_used=used,
            oldest_waiting_ms=0.0,
            max_step_ms=self.longest_ms,
            preemptions=0,
        )

    def _generation(self, spec: m.Admit) -> Job:
        prompt = len(spec.prompt) // 4
        lines = [Line(c.index, prompt + len(c.emitted) // 4, len(c.emitted) // 4) for c in spec.choices]
        ends = () if spec.ignore_eos else self.shape.eos_token_ids
        begun = any(line.output for line in lines)
        stops = frozenset((*ends, *spec.stop_token_ids))
        return Job(spec, lines, stops, self.now, prompt_crc=zlib.crc32(spec.prompt), begun=begun)

    def _batch(self) -> Iterator[tuple[Job, Line]]:
        """Lines of this step: all that decode, then prefills inside the budget: under way or begun elsewhere first."""
        lines = [(job, line) for job in self.jobs.values() if not job.paused for line in job.lines if not line.done]
        decoding = [(job, line) for job, line in lines if line.decodes]
        yield from decoding
        room = self.shape.max_seqs - len(decoding)
        budget = self.shape.max_batch_tokens - len(decoding)
        for job, line in sorted(lines, key=lambda each: not (each[1].computed or each[0].begun)):
            if room > 0 and budget > 0 and not line.decodes:
                room, budget = room - 1, budget - (line.length - line.computed)
                yield job, line

    def _advance(self, job: Job, line: Line) -> None:
        if job.scheduled is None:
            job.scheduled = self.now
            self._events.append(m.Scheduled(job.key, (self.now - job.arrived) * 1e3, 0))
        line.computed += self._count(line)
        job.steps += 1
        if line.computed == line.length:
            self._produce(job, line)

    def _count(self, line: Line) -> int:
        return min(line.length - line.computed, self.shape.max_batch_tokens)

    def _produce(self, job: Job, line: Line) -> None:
        if isinstance(job.spec, m.Encode):
            data = vector(job.spec.inputs[line.index], self.shape.hidden_size)
            line.done = True
            last = all(each.done for each in job.lines)
            self._events.append(
                m.Encoded(
                    job.key, line.index, self.shape.hidden_size, data, len(job.spec.inputs[line.index]) // 4, last
                )
            )
            if last:
                del self.jobs[job.key]
            return
        spec = job.spec
        job.first_token = self._ends if job.first_token is None else job.first_token
        next_ = drawn(job.prompt_crc, spec.sampling.seed, line.index, line.output, self.shape.vocab_size)
        if next_ in job.stops and line.output >= spec.min_tokens:
            self._end(job, line, m.Run(job.key, line.index, line.output, (), m.Finish.STOP, next_))
            return
        index = line.output
        line.output += 1
        line.length += 1
        full = line.output == spec.max_tokens or line.length == self.shape.max_context
        run = m.Run(
            job.key, line.index, index, (next_,), m.Finish.LENGTH if full else m.Finish.NONE, -1, _logprobs(spec, next_)
        )
        if full:
            self._end(job, line, run)
        else:
            self._runs.append(run)

    def _stop(self, key: int, choice: int) -> None:
        job = self.jobs.get(key)
        for line in job.lines if job else ():
            if line.index == choice and not line.done:
                assert job is not None
                self._end(job, line, m.Run(key, choice, line.output, (), m.Finish.STOP))

    def _end(self, job: Job, line: Line, run: m.Run) -> None:
        line.done = True
        self._runs.append(run)
        if all(each.done for each in job.lines):
            self._events.append(self._finished(job))
            del self.jobs[job.key]

    def _finished(self, job: Job) -> m.Finished:
        scheduled = self.now if job.scheduled is None else job.scheduled
        first = self._ends if job.first_token is None else job.first_token
        waited, prefilled, decoded = scheduled - job.arrived, first - scheduled, self._ends - first
        return m.Finished(job.key, waited * 1e3, prefilled * 1e3, decoded * 1e3, job.steps, 0, 0)


def _logprobs(spec: m.Admit, drawn: int) -> Sequence[m.Logprob]:
    count = spec.sampling.logprobs
    if count < 0:
        return ()
    return (m.Logprob(-0.5, [drawn + i for i in range(count)], [-0.5 - i for i in range(count)]),)


class Loop:
    """Runs a formula at a pace behind a mailbox."""

    def __init__(self, formula: Formula, mailbox: Mailbox, clock: Clock) -> None:
        self._formula = formula
        self._mailbox = mailbox
        self._clock = clock
        self._decoder: msgspec.msgpack.Decoder[m.ToEngine] = msgspec.msgpack.Decoder(m.ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._open = True

    def say(self, message: m.FromEngine) -> None:
        """To the door."""
        self._mailbox.send(self._encoder.encode(message))

    def run(self) -> None:
        """Until Shutdown, or until the door is gone."""
        while self._open:
            self._hear(0.0 if self._formula.runnable else TICK_S)
            if (said := self._formula.before_step()) is not None:
                self.say(said)
            began = self._clock.monotonic()
            step = self._formula.step()
            if step is None:
                self.say(m.Tick(self._formula.steps, self._formula.load()))
            else:
                self._pass(began + step.duration_ms / 1e3)
                self.say(step)

    def _hear(self, timeout_s: float) -> None:
        frames = self._mailbox.recv_all(timeout_s)
        self._formula.now = self._clock.monotonic()
        for frame in frames:
            message = self._decoder.decode(frame)
            if isinstance(message, m.Shutdown):
                self._open = False
            else:
                self._formula.take(message)

    def _pass(self, until: float) -> None:
        """A device at work: nothing is heard meanwhile."""
        left = until - self._clock.monotonic()
        if left > 0:
            time.sleep(left)


def main(arguments: Sequence[str]) -> int:
    """Runs the engine behind the mailbox named in `arguments`."""
    parser = argparse.ArgumentParser()
    for flag, default in (("--step-ms", 5.0), ("--sequence-us", 0.0), ("--prefill-us", 0.0), ("--start-ms", 0.0)):
        parser.add_argument(flag, type=float, default=default)
    parser.add_argument("--fault-if", type=Path, help="ends with what this file says, where it exists")
    flags, rest = parser.parse_known_args(arguments)
    fd, options = from_arguments(rest)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pace = Pace(flags.step_ms, flags.sequence_us, flags.prefill_us)
    loop = Loop(Formula(_shape(options), pace), Mailbox(socket.socket(fileno=fd)), SYSTEM_CLOCK)
    try:
        loop.say(m.Progress("load", 0.0))
        time.sleep(flags.start_ms / 1e3)
        if flags.fault_if is not None and flags.fault_if.exists():
            loop.say(m.Fault("ENGINE", flags.fault_if.read_text()))
            return 1
        loop.say(_ready(options))
        loop.run()
    except MailboxClosed:
        _log.info("the door is gone")
    return 0


def _shape(options: EngineOptions) -> Shape:
    config = json.loads((Path(options.model) / CONFIG).read_bytes())
    context = config["max_position_embeddings"]
    eos = config["eos_token_id"]
    return Shape(
        vocab_size=config["vocab_size"],
        max_context=min(options.max_context or context, context),
        hidden_size=config["hidden_size"],
        kv_blocks=options.kv_blocks or 4096,
        max_seqs=options.max_seqs,
        max_batch_tokens=options.max_batch_tokens,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _ready(options: EngineOptions) -> m.Ready:
    manifest, shape = read_manifest(Path(options.model)), _shape(options)
    return m.Ready(
        artefact_hash=manifest.artefact_hash,
        tokenizer_hash=manifest.tokenizer_hash,
        kernel_mode=options.kernel_mode,
        path="fake",
        vocab_size=shape.vocab_size,
        max_context=shape.max_context,
        block_size=BLOCK,
        kv_blocks=shape.kv_blocks,
        max_seqs=shape.max_seqs,
        hidden_size=shape.hidden_size,
        eos_token_ids=shape.eos_token_ids,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
