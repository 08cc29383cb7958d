"""`make bench-engine`: a named shape through the real engine on one GPU, every row of the targets.

Time per output token is (time of `tokens` new tokens − time of one) / (tokens − 1), all prompts queued at once; time to
first token is that of the whole batch; a workload's rate counts output tokens. Greedy, random prompts, nothing shared.
The engine is started as its own process starts it, with the mailbox replaced by calls. What was measured is written
after every row, so that a run that is cut off leaves what it had.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shared.clock import SYSTEM_CLOCK
from tests.bench import roofline
from tests.bench.facts import machine_facts, write_result
from tests.bench.targets import Case, Target, load, peer_values
from workers.engine import messages as m
from workers.engine.options import EngineOptions
from workers.engine.process import start
from workers.models.config import ModelConfig, read_config
from workers.models.loader import KERNEL_MODES
from workers.weights.manifest import MANIFEST
from workers.weights.random_model import SHAPES, make_random

RESULTS = Path(__file__).parent / "results" / "h200"
COLUMNS = ("value", "gate", "met", "stretch", "vLLM", "of floor")
PROMPT, TOKENS = 512, 257  # of a batch
BATCHES = (1, 8, 32, 128)
WORKLOADS = ("1000x128/128", "512x1024/128", "256x128/1024")
CONTEXT = 2048  # tokens of one sequence, at most
FIRST_RUNS, WHOLE_RUNS = 3, 2  # the best counts, as with the peers
GPU_MEMORY = 0.9  # share of what the weights leave
LIMIT_S = 240.0  # of one run: the machine has better things to do than to wait for a hang


class Peer(msgspec.Struct, frozen=True):
    """Another engine's value for the same row."""

    name: str
    value: float


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured value."""

    shape: str
    mode: str
    metric: str
    value: float
    tp: int
    pp: int
    batch: int | None = None
    workload: str | None = None
    peer: Peer | None = None

    @property
    def case(self) -> Case:
        """What was measured, as in the targets."""
        return self.shape, self.tp, self.batch or self.workload or "", self.metric


class Bench:
    """One started engine, and both ends of its mailbox."""

    def __init__(self, options: EngineOptions) -> None:
        self.ready: m.Ready
        self._frames: list[bytes] = []
        self._open: set[int] = set()
        self._next_key = 0
        self._rng = random.Random(0)
        self._engine = start(options, self, self, SYSTEM_CLOCK)  # says Ready

    def recv_all(self, timeout_s: float) -> list[bytes]:
        """As the engine reads its mailbox."""
        taken, self._frames = self._frames, []
        return taken

    def send(self, message: m.FromEngine) -> None:
        """As the engine speaks. Raises RuntimeError for a request that fails."""
        match message:
            case m.Ready():
                self.ready = message
            case m.StepOut():
                for event in message.events:
                    if isinstance(event, m.Failed):
                        raise RuntimeError(f"a request failed: {event.reason}: {event.message}")
                    if isinstance(event, m.Finished):
                        self._open.discard(event.key)

    def seconds(self, requests: int, prompt: int, tokens: int) -> float:
        """Wall time of `requests` that are queued at once, each with `prompt` random ids and `tokens` new ones."""
        vocabulary = self.ready.vocab_size
        keys = range(self._next_key, self._next_key + requests)
        self._next_key += requests
        self._open = set(keys)
        self._frames = [
            msgspec.msgpack.encode(
                m.Admit(
                    key,
                    m.pack_tokens(self._rng.randrange(5, vocabulary - 100) for _ in range(prompt)),
                    [m.ChoiceIn(0)],
                    m.Sampling(),
                    max_tokens=tokens,
                    min_tokens=tokens,
                    ignore_eos=True,
                )
            )
            for key in keys
        ]
        began = time.perf_counter()
        while self._open:
            self._engine.step()
            if time.perf_counter() - began > LIMIT_S:
                raise TimeoutError(f"{requests} × {prompt}/{tokens} took longer than {LIMIT_S:.0f} s")
        return time.perf_counter() - began


def batch_values(bench: Bench, batch: int, prompt: int, tokens: int) -> dict[str, float]:
    """ttft_ms and tpot_ms of one batch size."""
    first = min(bench.seconds(batch, prompt, 1) for _ in range(FIRST_RUNS))
    whole = min(bench.seconds(batch, prompt, tokens) for _ in range(WHOLE_RUNS))
    return {"ttft_ms": round(1e3 * first, 3), "tpot_ms": round(1e3 * (whole - first) / (tokens - 1), 4)}


def sizes(workload: str) -> tuple[int, int, int]:
    """Requests, input and output tokens of `requests x input / output`."""
    requests, _, lengths = workload.partition("x")
    prompt, _, tokens = lengths.partition("/")
    return int(requests), int(prompt), int(tokens)


class Report:
    """The rows so far, what they are held against, and the file they go to."""

    def __init__(self, args: argparse.Namespace, config: ModelConfig, ready: m.Ready, start_s: float) -> None:
        self._args, self._config, self._start_s = args, config, start_s
        self._table = load()
        # Another prompt or answer makes another row.
        usual = (args.prompt, args.tokens) == (PROMPT, TOKENS)
        self._targets = {each.case: each for each in self._table.engine if usual or each.workload}
        self._same_run: Mapping[Case, float] = peer_values(args.peer.read_text().splitlines()) if args.peer else {}
        self._machine = machine_facts()
        self._ready = ready
        self._rows: list[Row] = []
        _say("row".ljust(28) + "".join(name.rjust(12) for name in COLUMNS))

    def add(self, metric: str, value: float, *, batch: int | None = None, workload: str | None = None) -> None:
        """Prints a row and writes all of them."""
        args = self._args
        row = Row(
            shape=args.shape,
            mode=args.kernel_mode,
            metric=metric,
            value=value,
            tp=1,
            pp=1,
            batch=batch,
            workload=workload,
        )
        target = self._targets.get(row.case)
        if target:
            name = f"{self._table.peers['vllm']}, as given for {self._table.machine}"
            if measured := self._same_run.get(row.case):
                target, name = target.beside(measured), "vLLM, same machine"
            row = msgspec.structs.replace(row, peer=Peer(name, target.vllm))
        self._rows.append(row)
        _say(_line(row, target, self._share(row)))
        write_result(
            args.out,
            self._machine,
            f"python -m tests.bench.engine_gpu {shlex.join(sys.argv[1:])}",
            msgspec.to_builtins(self._rows),
            engine=msgspec.structs.asdict(self._ready),
            start_s=round(self._start_s, 1),
            prompt=args.prompt,
            tokens=args.tokens,
        )

    def _share(self, row: Row) -> float:
        """How much of what the machine could do at most was done."""
        args, config = self._args, self._config
        if row.workload:
            requests, prompt, tokens = sizes(row.workload)
            return row.value / (requests * tokens / roofline.workload_s(config, requests, prompt, tokens))
        assert row.batch is not None
        if row.metric == "tpot_ms":
            return roofline.tpot_ms(config, row.batch, args.prompt, args.tokens) / row.value
        return roofline.prefill(config, row.batch, args.prompt).ms() / row.value


def _line(row: Row, target: Target | None, share: float) -> str:
    cells = [f"{row.value:,.3f}", *["-"] * 4, f"{share:.1%}"]
    if target:
        met = "yes" if target.met(row.value) else "NO"
        cells[1:5] = f"{target.gate:,.3f}", met, f"{target.stretch:,.3f}", f"{target.vllm:,.3f}"
    return f"{row.shape} {row.batch or row.workload} {row.metric}".ljust(28) + "".join(cell.rjust(12) for cell in cells)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measures one shape in one kernel mode, prints a table, writes the JSON."""
    args = _arguments()
    if not (args.model / MANIFEST).exists():
        _say(f"making {args.model}")
        make_random(args.model, args.shape)
    options = EngineOptions(
        model=str(args.model),
        device=args.device,
        kernel_mode=args.kernel_mode,
        threads=args.threads,
        max_batch_tokens=args.max_batch_tokens,
        max_seqs=args.max_seqs,
        max_context=CONTEXT,
        kv_memory_fraction=GPU_MEMORY if args.device != "cpu" else EngineOptions(model="").kv_memory_fraction,
    )
    began = time.perf_counter()
    bench = Bench(options)
    ready, start_s = bench.ready, time.perf_counter() - began
    _say(f"{ready.path}, {ready.kv_blocks} blocks, started in {start_s:.1f} s")
    if ready.kernel_mode != args.kernel_mode:
        sys.exit(f"{args.kernel_mode} does not serve on this machine; {ready.kernel_mode} does")
    report = Report(args, read_config(args.model), ready, start_s)
    bench.seconds(4, 64, 8)  # warms up
    for batch in args.batches:
        for metric, value in batch_values(bench, batch, args.prompt, args.tokens).items():
            report.add(metric, value, batch=batch)
    for workload in args.workloads:
        requests, prompt, tokens = sizes(workload)
        rate = requests * tokens / bench.seconds(requests, prompt, tokens)
        report.add("out_tok_s", round(rate, 1), workload=workload)
    _say(f"rows in {args.out}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engine_gpu", description=main.__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--model", type=Path, help="artefact, made if it is absent (.trunkline/models/random-SHAPE)")
    parser.add_argument("--device", default="cuda", help="%(default)s")
    parser.add_argument("--kernel-mode", choices=KERNEL_MODES, default="fused", help="%(default)s")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="%(default)s")
    parser.add_argument("--workloads", nargs="*", default=WORKLOADS, help="requests x input / output; %(default)s")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a batch's prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="new tokens of a batch's answers (%(default)s)")
    parser.add_argument("--max-batch-tokens", type=int, default=8192, help="tokens of one step (%(default)s)")
    parser.add_argument("--max-seqs", type=int, default=1024, help="sequences that run at once (%(default)s)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (all)")
    parser.add_argument("--peer", type=Path, help="JSON lines of vLLM's rows on this machine, to be compared with")
    parser.add_argument("--out", type=Path, help=f"result ({RESULTS}/engine-SHAPE-MODE.json)")
    args = parser.parse_args()
    args.model = args.model or Path(".trunkline/models") / f"random-{args.shape}"
    args.out = args.out or RESULTS / f"engine-{args.shape}-{args.kernel_mode}.json"
    return args


if __name__ == "__main__":
    main()
