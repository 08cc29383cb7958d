"""`make bench`, first half: the engine by itself on the CPU, decode, prefill and memory, for each kernel mode.

Every mode runs in a process of its own, so that its peak memory is its own. Numbers are medians of several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shared.clock import SYSTEM_CLOCK
from tests.bench.facts import machine_facts, write_result
from workers.app import SPINS
from workers.engine import messages as m
from workers.engine.batch import KVCache
from workers.engine.blocks import BlockPool
from workers.engine.engine import Engine, Vocabulary
from workers.engine.options import EngineOptions
from workers.engine.runner import Runner
from workers.engine.sampler import Draw, sample
from workers.engine.scheduler import Limits, Scheduler
from workers.models.loader import load_model

RESULT = Path(__file__).parent / "results" / "cpu" / "engine.json"
MODES = ("fused", "standard")
BLOCKS = 128
DECODE_TOKENS = 48
GATES = {"decode_1_tok_s": 15.0, "decode_8_tok_s": 100.0}  # the first version's row of the targets


class Bench:
    """One loaded engine."""

    def __init__(self, model_dir: Path, mode: str, threads: int) -> None:
        model = load_model(model_dir, kernel_mode=mode, threads=threads)
        if model.kernel_mode != mode:
            sys.exit(f"{mode} does not serve on this machine")
        config = model.config
        self.path, self.vocab_size = model.path, config.vocab_size
        self._vocabulary = Vocabulary(config.vocab_size, config.eos_token_ids)
        self._runner = Runner(
            model, KVCache.zeros(config.layers, BLOCKS, config.kv_heads, config.head_dim, model.dtype, model.device)
        )
        self._rng = random.Random(0)
        self.sent: list[m.FromEngine] = []
        self._queue: list[m.ToEngine] = []

    def receive(self, timeout_s: float) -> list[m.ToEngine]:
        taken, self._queue = self._queue, []
        return taken

    def send(self, message: m.FromEngine) -> None:
        self.sent.append(message)

    def steps(
        self, requests: int, prompt: int, tokens: int, batch_tokens: int, sampling: m.Sampling
    ) -> list[m.StepOut]:
        """Runs `requests` equal requests on an empty pool; what each step said."""
        scheduler = Scheduler(Limits(batch_tokens, 16, 64, 2048), BlockPool(BLOCKS))
        engine = Engine(self._vocabulary, scheduler, self._runner, SYSTEM_CLOCK, self, self)
        self.sent.clear()
        for key in range(requests):
            ids = m.pack_tokens(self._rng.randrange(100, self.vocab_size) for _ in range(prompt))
            self._queue.append(m.Admit(key, ids, [m.ChoiceIn(0)], sampling, tokens, ignore_eos=True))
        while engine.step():
            pass
        return [message for message in self.sent if isinstance(message, m.StepOut) and message.duration_ms]


def decode_rate(steps: list[m.StepOut]) -> float:
    """Tokens per second over the steps that only decode, without the first."""
    pure = [step for step in steps if step.decode_tokens and not step.prefill_tokens][1:]
    return sum(step.decode_tokens for step in pure) / sum(step.duration_ms for step in pure) * 1e3


def prefill_rate(steps: list[m.StepOut]) -> float:
    """Tokens per second over the steps that prefill."""
    chunks = [step for step in steps if step.prefill_tokens]
    return sum(step.prefill_tokens for step in chunks) / sum(step.duration_ms for step in chunks) * 1e3


def sampler_ms(vocab_size: int, sampling: m.Sampling) -> float:
    """Milliseconds to draw eight tokens from peaked random scores."""
    logits = 2 * torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(0))
    logits[:, ::1000] += 9
    tokens = torch.arange(300, dtype=torch.int32).numpy()
    draws = [Draw(sampling, tokens, 100, row) for row in range(8)]
    began = time.perf_counter()
    for _ in range(10):
        sample(logits, draws)
    return (time.perf_counter() - began) * 100


def measure(model_dir: Path, mode: str, threads: int, runs: int) -> dict[str, object]:
    """All numbers of one mode, in this process."""
    bench = Bench(model_dir, mode, threads)
    loaded_mib = _peak_mib()
    chunk = EngineOptions(model="").max_batch_tokens
    greedy, full = m.Sampling(), m.Sampling(temperature=0.8, top_p=0.9)

    def median(measured: Callable[[], float]) -> float:
        measured()  # warms up
        return round(statistics.median(measured() for _ in range(runs)), 2)

    def decoding(requests: int, sampling: m.Sampling) -> Callable[[], float]:
        return lambda: decode_rate(bench.steps(requests, 16, DECODE_TOKENS, chunk, sampling))

    def prefilling(batch_tokens: int) -> list[m.StepOut]:
        return bench.steps(1, 512, 1, batch_tokens, greedy)

    return {
        "kernel_mode": mode,
        "path": bench.path,
        "threads": threads,
        "decode_1_tok_s": median(decoding(1, greedy)),
        "decode_8_tok_s": median(decoding(8, greedy)),
        "decode_8_sampled_tok_s": median(decoding(8, full)),
        "prefill_512_tok_s": median(lambda: prefill_rate(prefilling(512))),
        "prefill_512_chunked_tok_s": median(lambda: prefill_rate(prefilling(chunk))),
        "longest_chunk_ms": median(lambda: max(step.duration_ms for step in prefilling(chunk))),
        "sample_8_greedy_ms": median(lambda: sampler_ms(bench.vocab_size, greedy)),
        "sample_8_top_p_ms": median(lambda: sampler_ms(bench.vocab_size, full)),
        "loaded_rss_mib": loaded_mib,
        "peak_rss_mib": _peak_mib(),
    }


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Measures each mode in a process of its own, prints a table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".trunkline/models/smollm2-135m-instruct"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mode", choices=MODES, help="measure this one here and print its JSON")
    args = parser.parse_args()
    if args.mode:
        sys.stdout.write(json.dumps(measure(args.model, args.mode, args.threads, args.runs)))
        return
    facts = machine_facts()
    rows = [_in_a_process(args.model, mode, args.threads, args.runs) for mode in MODES]
    write_result(RESULT, facts, "make bench", rows, gates=GATES)
    for key in rows[0]:
        gate = f"   gate ≥ {GATES[key]:g}" if key in GATES else ""
        sys.stdout.write(f"{key:<28}" + "".join(f"{row[key]!s:>20}" for row in rows) + gate + "\n")


def _in_a_process(model: Path, mode: str, threads: int, runs: int) -> dict[str, object]:
    command = [sys.executable, "-m", "tests.bench.engine_cpu", f"--model={model}", f"--mode={mode}"]
    environment = {**os.environ, "GOMP_SPINCOUNT": SPINS}  # as a worker starts its engine
    done = subprocess.run(
        [*command, f"--threads={threads}", f"--runs={runs}"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        sys.exit(done.stderr)
    row: dict[str, object] = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    main()
