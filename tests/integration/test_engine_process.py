"""The engine as the door sees it: a process behind a mailbox."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from shared.mailbox import Mailbox, MailboxClosed, socket_pair
from workers.engine import messages as m
from workers.engine.options import EngineOptions, to_arguments

DECODER = msgspec.msgpack.Decoder(m.FromEngine)


class Door:
    """The other end of an engine process."""

    def __init__(self, mailbox: Mailbox, process: subprocess.Popen[str]) -> None:
        self.mailbox = mailbox
        self.process = process
        self.heard: list[m.FromEngine] = []

    def say(self, message: m.ToEngine) -> None:
        self.mailbox.send(msgspec.msgpack.encode(message))

    def listen_until(self, wanted: Callable[[m.FromEngine], bool]) -> m.FromEngine:
        """The first message that is `wanted`; all before it are kept in `heard`."""
        while True:
            for frame in self.mailbox.recv_all(30.0):
                self.heard.append(DECODER.decode(frame))
            for message in self.heard:
                if wanted(message):
                    return message


@contextmanager
def engine(options: EngineOptions) -> Iterator[Door]:
    ours, theirs = socket_pair()
    arguments = [sys.executable, "-m", "workers.engine.process", *to_arguments(theirs.fileno(), options)]
    process = subprocess.Popen(arguments, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True)
    theirs.close()
    mailbox = Mailbox(ours)
    try:
        yield Door(mailbox, process)
    finally:
        mailbox.close()
        process.kill()
        process.communicate()


def is_end(message: m.FromEngine) -> bool:
    return isinstance(message, m.StepOut) and any(isinstance(event, m.Finished) for event in message.events)


def test_an_engine_says_what_it_is_runs_a_prompt_ticks_when_idle_and_ends_when_told(artefact_dir: Path) -> None:
    with engine(EngineOptions(model=str(artefact_dir), threads=1, kv_blocks=64, max_batch_tokens=32)) as door:
        ready = door.listen_until(lambda message: isinstance(message, m.Ready))
        assert isinstance(ready, m.Ready)
        assert (ready.block_size, ready.kv_blocks, ready.vocab_size, ready.hidden_size) == (16, 64, 49152, 576)
        assert any(isinstance(message, m.Progress) for message in door.heard)
        door.say(m.Admit(1, m.pack_tokens([504, 3575, 282, 4649, 314]), [m.ChoiceIn(0)], m.Sampling(), max_tokens=3))
        end = door.listen_until(is_end)
        assert isinstance(end, m.StepOut)
        assert end.load.kv_blocks_used == 0
        door.listen_until(lambda message: isinstance(message, m.Tick))
        steps = [message for message in door.heard if isinstance(message, m.StepOut)]
        assert [run.index for step in steps for run in step.runs] == [0, 1, 2]
        door.say(m.Shutdown())
        assert door.process.wait(timeout=10) == 0


def test_an_engine_ends_by_itself_when_its_door_dies(artefact_dir: Path) -> None:
    with engine(EngineOptions(model=str(artefact_dir), threads=1, kv_blocks=64, max_batch_tokens=32)) as door:
        door.listen_until(lambda message: isinstance(message, m.Ready))
        door.mailbox.close()
        assert door.process.wait(timeout=10) == 1


@pytest.mark.parametrize(
    ("options", "reason", "words"),
    [
        ({"memory_limit_mb": 600}, "MEMORY", ["MiB of memory are needed", "600 MiB are available"]),
        ({"kv_blocks": 10**7}, "MEMORY", ["cache of 160000000 tokens"]),
        ({"model": "/nowhere"}, "ARTEFACT", ["manifest.json", "missing"]),
        ({"device": "tpu"}, "DEVICE", ["'tpu'", "cpu, cuda"]),
        ({"max_seqs": 64, "max_batch_tokens": 32, "kv_blocks": 8}, "ENGINE", ["max_seqs 64"]),
    ],
)
def test_an_engine_that_cannot_start_says_why_and_exits_with_1(
    artefact_dir: Path, options: dict[str, object], reason: str, words: list[str]
) -> None:
    given = msgspec.structs.replace(EngineOptions(model=str(artefact_dir), threads=1), **options)
    with engine(given) as door:
        fault = door.listen_until(lambda message: isinstance(message, m.Fault))
        assert isinstance(fault, m.Fault)
        assert fault.reason == reason
        assert all(word in fault.message for word in words), fault.message
        with pytest.raises(MailboxClosed):
            door.mailbox.recv_all(10.0)
        assert door.process.wait(timeout=10) == 1
        assert door.process.stderr is not None
        assert ("Traceback" in door.process.stderr.read()) == (reason == "ENGINE")
