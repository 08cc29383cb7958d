"""The engine process: loads a model, says Ready, and runs the loop until its door is gone.

Owns start-up, its order and its failures. The one rule: whatever goes wrong is said as one `Fault` and ends in exit 1;
the door never has to guess.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from shared.clock import SYSTEM_CLOCK, Clock
from shared.mailbox import Mailbox, MailboxClosed
from workers.engine import messages as m
from workers.engine.accelerator import DeviceError, check_device, is_device_failure
from workers.engine.batch import BLOCK_SIZE, KVCache
from workers.engine.blocks import BlockPool
from workers.engine.device import CudaDevice
from workers.engine.engine import Engine, Outbox, Vocabulary
from workers.engine.gpu_runner import GpuRunner
from workers.engine.memory import TooLittleMemoryError, available_bytes, footprint, plan_blocks
from workers.engine.options import EngineOptions, from_arguments
from workers.engine.runner import Runner
from workers.engine.scheduler import Limits, Scheduler
from workers.engine.step import StepRunner
from workers.models.config import ConfigError
from workers.models.loader import Model, load_model
from workers.weights.load import check_texts
from workers.weights.manifest import ArtefactError, read_manifest

PROGRESS_S = 0.25

_log = logging.getLogger(__name__)


class MailboxInbox:
    """The door's messages."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._decoder: msgspec.msgpack.Decoder[m.ToEngine] = msgspec.msgpack.Decoder(m.ToEngine)

    def receive(self, timeout_s: float) -> list[m.ToEngine]:
        """See `engine.Inbox`. Raises MailboxClosed."""
        return [self._decoder.decode(frame) for frame in self._mailbox.recv_all(timeout_s)]


class MailboxOutbox:
    """What the door hears."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: m.FromEngine) -> None:
        """See `engine.Outbox`. Raises MailboxClosed."""
        self._mailbox.send(self._encoder.encode(message))


class ProgressReport:
    """Start-up progress, at most one message per stage and quarter second."""

    def __init__(self, outbox: Outbox, clock: Clock) -> None:
        self._outbox = outbox
        self._clock = clock
        self._stage = ""
        self._said_at = 0.0

    def __call__(self, stage: str, fraction: float) -> None:
        """Says it, unless the same stage was said a moment ago."""
        now = self._clock.monotonic()
        if stage != self._stage or now - self._said_at >= PROGRESS_S:
            self._outbox.send(m.Progress(stage, fraction))
            self._stage, self._said_at = stage, now


def main(arguments: Sequence[str]) -> int:
    """Runs the engine behind the mailbox named in `arguments`; the exit status."""
    fd, options = from_arguments(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches the whole group; the door decides
    mailbox = Mailbox(socket.socket(fileno=fd))
    outbox = MailboxOutbox(mailbox)
    torch.set_num_interop_threads(1)
    try:
        engine = start(options, mailbox, outbox, SYSTEM_CLOCK)
        engine.run()
    except MailboxClosed:
        _log.info("the door is gone; the engine ends")
        return 1
    except Exception as error:
        return _fault(mailbox, outbox, error)
    return 0


def start(options: EngineOptions, mailbox: Mailbox, outbox: Outbox, clock: Clock) -> Engine:
    """Loads, checks and warms the model, says Ready, and answers with the engine."""
    progress = ProgressReport(outbox, clock)
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    check_device(options.device)
    limits, blocks = _plan(options)
    progress("load", 0.0)
    model = load_model(
        Path(options.model),
        kernel_mode=options.kernel_mode,
        threads=threads,
        device=options.device,
        progress=progress,
    )
    config = model.config
    blocks = _blocks_beside(model, options, limits, blocks)
    cache = KVCache.zeros(config.layers, blocks, config.kv_heads, config.head_dim, model.dtype, model.device)
    progress("warm up", 0.0)
    runner = _runner(model, cache, limits, clock)
    vocabulary = Vocabulary(config.vocab_size, config.eos_token_ids)
    scheduler = Scheduler(limits, BlockPool(blocks))
    engine = Engine(vocabulary, scheduler, runner, clock, MailboxInbox(mailbox), outbox)
    gc.collect()
    gc.freeze()  # what start-up left is never looked at again
    outbox.send(_ready(model, limits, blocks))
    return engine


def _runner(model: Model, cache: KVCache, limits: Limits, clock: Clock) -> StepRunner:
    """What runs the steps, warm. On a GPU our kernels run ahead of the host; anything else is waited for."""
    plain = Runner(model, cache)
    plain.warm_up(min(limits.max_batch_tokens, cache.blocks * BLOCK_SIZE))
    if model.device.type != "cuda" or model.kernel_mode != "fused":
        return plain
    runner = GpuRunner(model, cache, limits, model.config.vocab_size, CudaDevice(model.device, clock))
    runner.record()
    return runner


def _blocks_beside(model: Model, options: EngineOptions, limits: Limits, planned: int) -> int:
    """KV blocks beside a loaded model: on a GPU, where what is free can be measured, the plan is made again."""
    if model.device.type != "cuda" or options.memory_limit_mb:
        return planned
    torch.cuda.empty_cache()  # what loading needed and no longer does
    size = footprint(model.config, options, model.manifest.precision)
    return plan_blocks(replace(size, weights=0), options, limits.max_context, available_bytes(options))


def _plan(options: EngineOptions) -> tuple[Limits, int]:
    """Bounds and KV blocks, before anything large is touched."""
    directory = Path(options.model)
    manifest = read_manifest(directory)
    config = check_texts(directory, manifest)
    context = min(options.max_context or config.max_context, config.max_context)
    limits = Limits(
        options.max_batch_tokens, options.max_seqs, options.max_held, context, itl_slo_ms=options.itl_slo_ms
    )
    precision = "fp32" if options.device == "cpu" else manifest.precision
    size = footprint(config, options, precision)
    return limits, plan_blocks(size, options, context, available_bytes(options))


def _ready(model: Model, limits: Limits, blocks: int) -> m.Ready:
    return m.Ready(
        artefact_hash=model.manifest.artefact_hash,
        tokenizer_hash=model.manifest.tokenizer_hash,
        kernel_mode=model.kernel_mode,
        path=model.path,
        vocab_size=model.config.vocab_size,
        max_context=limits.max_context,
        block_size=BLOCK_SIZE,
        kv_blocks=blocks,
        max_seqs=limits.max_seqs,
        hidden_size=model.config.hidden_size,
        eos_token_ids=model.config.eos_token_ids,
    )


def _fault(mailbox: Mailbox, outbox: Outbox, error: Exception) -> int:
    match error:
        case TooLittleMemoryError():
            fault = m.Fault("MEMORY", str(error))
        case ArtefactError() | ConfigError():
            fault = m.Fault("ARTEFACT", str(error))
        case torch.OutOfMemoryError():
            fault = m.Fault("MEMORY", f"the GPU's memory did not suffice: {str(error).splitlines()[0]}")
        case DeviceError():
            fault = m.Fault("DEVICE", str(error))
        case _ if is_device_failure(error):
            _log.error("the GPU failed", exc_info=error)
            fault = m.Fault("DEVICE", f"the GPU failed: {str(error).splitlines()[0]}")
        case _:
            _log.error("the engine cannot go on", exc_info=error)
            fault = m.Fault("ENGINE", f"{type(error).__name__}: {error}")
    try:
        outbox.send(fault)
        mailbox.recv_all(0.0)  # lets what the socket did not take at once go out
    except MailboxClosed:
        _log.info("the door is gone and did not hear why")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
