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
    where = b"%b|%d|%d|%d" % (prompt, seed, choice, position)
    return zlib.crc32(where) % vocab_size


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
    paused: bool = False
    scheduled: bool = False
    steps: int = 0

    @property
    def key(self) -> int:
        return self.spec.key


@dataclass(slots=True)
class Formula:
    """The state machine: `take` messages, then `step`. First come, first served; no preemption."""

    shape: Shape
    steps: int = 0
    prefilled: int = 0  # tokens of the last step
    decoded: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    _events: list[m.Event] = field(default_factory=list)
    _runs: list[m.Run] = field(default_factory=list)

    def take(self, message: m.ToEngine) -> None:
        """One message of the door."""
        match message:
            case m.Admit():
                self.jobs[message.key] = self._generation(message)
            case m.Encode():
                lines = [Line(i, len(data) // 4, 0) for i, data in enumerate(message.inputs)]
                self.jobs[message.key] = Job(message, lines)
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
        self.prefilled = self.decoded = 0
        if self.runnable:
            self.steps += 1
            for job, line in list(self._batch()):
                self._advance(job, line)  # a step's plan is made before any of it runs
        if not (self._runs or self._events or self.prefilled):
            return None
        runs, self._runs = self._runs, []
        events, self._events = self._events, []
        return m.StepOut(self.steps, 0.0, runs, events, self.load(), self.prefilled, self.decoded)

    def load(self, max_step_ms: float = 0.0) -> m.Load:
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
            max_step_ms=max_step_ms,
            preemptions=0,
        )

    def _generation(self, spec: m.Admit) -> Job:
        prompt = len(spec.prompt) // 4
        lines = [Line(c.index, prompt + len(c.emitted) // 4, len(c.emitted) // 4) for c in spec.choices]
        ends = () if spec.ignore_eos else self.shape.eos_token_ids
        return Job(spec, lines, frozenset((*ends, *spec.stop_token_ids)))

    def _batch(self) -> Iterator[tuple[Job, Line]]:
        """Lines of this step: all that decode, then prefills inside the budget."""
        lines = [(job, line) for job in self.jobs.values() if not job.paused for line in job.lines if not line.done]
        decoding = [(job, line) for job, line in lines if line.decodes]
        yield from decoding
        room = self.shape.max_seqs - len(decoding)
        budget = self.shape.max_batch_tokens - len(decoding)
        for job, line in lines:
            if room > 0 and budget > 0 and not line.decodes:
                room, budget = room - 1, budget - (line.length - line.computed)
                yield job, line

    def _advance(self, job: Job, line: Line) -> None:
        if not job.scheduled:
            job.scheduled = True
            self._events.append(m.Scheduled(job.key, 0.0, 0))
        count = min(line.length - line.computed, self.shape.max_batch_tokens)
        if line.decodes:
            self.decoded += count
        else:
            self.prefilled += count
        line.computed += count
        job.steps += 1
        if line.computed == line.length:
            self._produce(job, line)

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
        drawn = token(spec.prompt, spec.sampling.seed, line.index, line.output, self.shape.vocab_size)
        if drawn in job.stops and line.output >= spec.min_tokens:
            self._end(job, line, m.Run(job.key, line.index, line.output, (), m.Finish.STOP, drawn))
            return
        index = line.output
        line.output += 1
        line.length += 1
        full = line.output == spec.max_tokens or line.length == self.shape.max_context
        run = m.Run(
            job.key, line.index, index, (drawn,), m.Finish.LENGTH if full else m.Finish.NONE, -1, _logprobs(spec, drawn)
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
            self._events.append(m.Finished(job.key, 1.0, 2.0, 3.0, job.steps, 0, 0))
            del self.jobs[job.key]


def _logprobs(spec: m.Admit, drawn: int) -> Sequence[m.Logprob]:
    count = spec.sampling.logprobs
    if count < 0:
        return ()
    return (m.Logprob(-0.5, [drawn + i for i in range(count)], [-0.5 - i for i in range(count)]),)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in milliseconds, and what goes wrong."""

    start_ms: float = 0.0
    step_ms: float = 5.0  # of any step
    sequence_us: float = 0.0  # more for each sequence that decodes
    prefill_us: float = 0.0  # more for each token of a prefill
    fault: str = ""  # ends with this instead of starting

    def step_s(self, step: m.StepOut) -> float:
        """Seconds that `step` takes."""
        micros = self.sequence_us * step.decode_tokens + self.prefill_us * step.prefill_tokens
        return self.step_ms / 1e3 + micros / 1e6


class Loop:
    """Runs a formula at a pace behind a mailbox."""

    def __init__(self, formula: Formula, pace: Pace, mailbox: Mailbox, clock: Clock) -> None:
        self._formula = formula
        self._pace = pace
        self._mailbox = mailbox
        self._clock = clock
        self._decoder: msgspec.msgpack.Decoder[m.ToEngine] = msgspec.msgpack.Decoder(m.ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._longest_ms = 0.0
        self._open = True

    def say(self, message: m.FromEngine) -> None:
        """To the door."""
        self._mailbox.send(self._encoder.encode(message))

    def run(self) -> None:
        """Until Shutdown, or until the door is gone."""
        while self._open:
            self._hear(0.0 if self._formula.runnable else TICK_S)
            began = self._clock.monotonic()
            step = self._formula.step()
            if step is None:
                self.say(m.Tick(self._formula.steps, self._formula.load(self._longest_ms)))
                continue
            if step.prefill_tokens or step.decode_tokens:
                self._pass(began + self._pace.step_s(step))
            took_ms = (self._clock.monotonic() - began) * 1e3
            self._longest_ms = max(self._longest_ms, took_ms)
            load = msgspec.structs.replace(step.load, max_step_ms=self._longest_ms)
            self.say(msgspec.structs.replace(step, duration_ms=took_ms, load=load))

    def _hear(self, timeout_s: float) -> None:
        for frame in self._mailbox.recv_all(timeout_s):
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
    for name, default in (("start-ms", 0.0), ("step-ms", 5.0), ("sequence-us", 0.0), ("prefill-us", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--fault", default="")
    pace_flags, rest = parser.parse_known_args(arguments)
    fd, options = from_arguments(rest)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mailbox = Mailbox(socket.socket(fileno=fd))
    loop = Loop(Formula(_shape(options)), pace := Pace(**vars(pace_flags)), mailbox, SYSTEM_CLOCK)
    loop.say(m.Progress("load", 0.0))
    time.sleep(pace.start_ms / 1e3)
    if pace.fault:
        loop.say(m.Fault("ENGINE", pace.fault))
        return 1
    loop.say(_ready(options))
    try:
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
