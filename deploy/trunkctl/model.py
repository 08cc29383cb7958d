"""`trunkctl model fetch|convert|random|verify|list|plan`: artefacts, the form in which workers read models."""

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from trunkctl.failure import CommandError
from trunkctl.home import Home, find_home
from trunkctl.options import Subparsers, positive

if TYPE_CHECKING:
    from workers.weights.manifest import Manifest

DEFAULT_MODEL = "smollm2-135m-instruct"
UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


# Read when torch is loaded, which is later: its idle threads shall sleep. Spinning beside a busy process they make of
# seconds of work minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def add_parser(subparsers: Subparsers) -> None:
    """Adds `model`."""
    parser = subparsers.add_parser("model", help="fetch, convert, check, list and plan models")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    fetch = commands.add_parser("fetch", help=f"fetch and convert {DEFAULT_MODEL} (nothing to do if it is there)")
    fetch.set_defaults(run=run_fetch)
    _add_convert(commands)
    _add_random(commands)
    verify = commands.add_parser("verify", help="check every byte, then replay the golden vectors")
    verify.add_argument("model", help="name under the runtime directory, or a path")
    verify.add_argument("--kernel-mode", choices=("fused", "standard"), default="fused", help="%(default)s")
    verify.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="%(default)s")
    verify.set_defaults(run=run_verify)
    commands.add_parser("list", help="list the models of this machine").set_defaults(run=run_list)
    _add_plan(commands)


def _add_convert(commands: Subparsers) -> None:
    convert = commands.add_parser("convert", help="make an artefact from a GGUF file or a Hugging Face directory")
    convert.add_argument("source", type=Path, help="a .gguf file, or a directory with safetensors")
    convert.add_argument("--name", help="name of the model (the source's own)")
    convert.add_argument("--output", type=Path, help="artefact directory (models/NAME in the runtime directory)")
    convert.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="as stored (%(default)s)")
    convert.set_defaults(run=run_convert)


def _add_random(commands: Subparsers) -> None:
    made = commands.add_parser("random", help="make a bf16 artefact of a named shape with random weights, to measure")
    made.add_argument("--shape", choices=("8b", "1b", "135m"), required=True, help="Llama-3.1-8B, 3.2-1B, SmolLM2-135M")
    made.add_argument("--layers", type=positive, help="layers (the shape's own number)")
    made.add_argument("--seed", type=int, default=0, help="the same seed makes the same weights (%(default)s)")
    made.add_argument("--name", help="name of the model (random-SHAPE)")
    made.add_argument("--output", type=Path, help="artefact directory (models/NAME in the runtime directory)")
    made.set_defaults(run=run_random)


def _add_plan(commands: Subparsers) -> None:
    plan = commands.add_parser("plan", help="memory per rank, cached tokens and concurrency, before loading anything")
    plan.add_argument("model", help="name under the runtime directory, or a path")
    plan.add_argument("--memory", type=byte_count, required=True, help="per rank, such as 2G or 80G")
    plan.add_argument("--context", type=positive, help="tokens per sequence (the model's limit)")
    plan.add_argument("--precision", choices=("fp32", "bf16"), help="as served (as stored)")
    plan.add_argument("--tp", type=positive, default=1, help="tensor-parallel degree (%(default)s)")
    plan.add_argument("--pp", type=positive, default=1, help="pipeline-parallel degree (%(default)s)")
    plan.set_defaults(run=run_plan)


def byte_count(text: str) -> int:
    """`512M`, `2G`, `1.5G` or plain bytes."""
    shift = UNITS.get(text[-1:].upper(), 0)
    try:
        count = float(text[:-1] if shift else text) * (1 << shift)
    except ValueError:
        count = 0
    if not 1 <= count < 1 << 60:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory such as 512M or 80G")
    return int(count)


def run_fetch(args: argparse.Namespace) -> int:
    """Leaves a whole artefact behind, or the reason why not."""
    home = find_home(args.home)
    target = home.models / DEFAULT_MODEL
    from workers.weights.convert import convert
    from workers.weights.fetch import fetch_smollm2
    from workers.weights.manifest import ArtefactError, check_sizes

    try:
        check_sizes(target)
    except ArtefactError:
        with _bars() as bar, _refusals():
            convert(fetch_smollm2(home.root / "cache", bar), target, progress=bar)
    _out().print(f"{DEFAULT_MODEL} is in {target}")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Writes the artefact as a whole or not at all."""
    from workers.weights.convert import convert

    name = args.name or args.source.resolve().stem.lower()
    target = args.output or find_home(args.home).models / name
    with _bars() as bar, _refusals():
        manifest = convert(args.source, target, precision=args.precision, name=name, progress=bar)
    return _made(manifest, target)


def run_random(args: argparse.Namespace) -> int:
    """Writes the artefact as a whole or not at all."""
    from workers.weights.random_model import make_random

    name = args.name or f"random-{args.shape}"
    target = args.output or find_home(args.home).models / name
    with _bars() as bar, _refusals():
        manifest = make_random(target, args.shape, layers=args.layers or 0, seed=args.seed, name=name, progress=bar)
    return _made(manifest, target)


def run_verify(args: argparse.Namespace) -> int:
    """Exit code 1 if anything is not as converted, or the live kernels answer otherwise than transformers did.

    A model of random weights has no answers to compare: then only its bytes and the kernels' own check count.
    """
    from workers.models.loader import load_model
    from workers.weights.golden import load_golden
    from workers.weights.manifest import GOLDEN
    from workers.weights.replay import replay

    directory = _directory(args)
    with _bars() as bar, _refusals():
        model = load_model(directory, kernel_mode=args.kernel_mode, threads=args.threads, progress=bar)
        golden = GOLDEN in {entry.name for entry in model.manifest.files}
        result = replay(model, load_golden(directory / GOLDEN), bar) if golden else None
    found = (
        f"{result.positions} positions, {result.clear} clear, {result.differing} differ, "
        f"largest relative logit error {result.max_error:.1e}"
        if result
        else "every byte is as written; there are no golden vectors"
    )
    _out().print(f"{model.manifest.name} on {model.path}: {found}")
    if model.kernel_mode != args.kernel_mode:
        raise CommandError(f"{args.kernel_mode} does not serve on this machine; {model.kernel_mode} does")
    if result and not result.passed:
        raise CommandError(f"{model.manifest.name} does not answer as its golden vectors say")
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Lists the artefacts of the runtime directory, damaged ones too."""
    from workers.weights.manifest import ArtefactError, read_manifest

    table = Table(box=None, header_style="dim")
    for name in ("name", "architecture", "parameters", "precision", "size", "artefact"):
        table.add_column(name)
    for directory in _artefacts(find_home(args.home)):
        try:
            table.add_row(directory.name, *_facts(read_manifest(directory)))
        except ArtefactError as error:
            table.add_row(directory.name, f"[red]{error}[/red]")
    _out().print(table)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Prints what each rank holds and what is left for the cache."""
    from workers.models.config import read_config
    from workers.weights.manifest import read_manifest
    from workers.weights.plan import plan_memory

    with _refusals():
        directory = _directory(args)
        plan = plan_memory(
            read_config(directory),
            precision=args.precision or read_manifest(directory).precision,
            memory=args.memory,
            context=args.context or 0,
            tensor_parallel=args.tp,
            pipeline_parallel=args.pp,
        )
    categories = sorted({category for rank in plan.ranks for category in rank.weights})
    table = Table("pp", "tp", *categories, "weights", "KV per token", box=None, header_style="dim")
    for rank in plan.ranks:
        amounts = [rank.weights.get(category, 0) for category in categories]
        cells = map(amount, [*amounts, rank.weight_bytes, rank.kv_bytes_per_token])
        table.add_row(str(rank.pipeline), str(rank.tensor), *cells)
    _out().print(table)
    _out().print(f"{plan.kv_tokens} tokens fit in the cache: {plan.concurrency} sequences of full length at once")
    return 0


def amount(count: int) -> str:
    """Bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _made(manifest: "Manifest", target: Path) -> int:
    _out().print(
        f"{manifest.name} is in {target}\nartefact {manifest.artefact_hash}\ntokenizer {manifest.tokenizer_hash}"
    )
    return 0


def _directory(args: argparse.Namespace) -> Path:
    named: Path = find_home(args.home).models / args.model
    return named if named.is_dir() else Path(args.model)


def _artefacts(home: Home) -> list[Path]:
    if not home.models.is_dir():
        return []
    return sorted(path for path in home.models.iterdir() if path.is_dir() and not path.name.startswith("."))


def _facts(manifest: "Manifest") -> tuple[str, ...]:
    size = sum(entry.size for entry in manifest.files)
    return (
        manifest.architecture,
        f"{manifest.parameters / 1e6:.1f} M",
        manifest.precision,
        amount(size),
        manifest.artefact_hash[:12],
    )


def _out() -> Console:
    # A table is never cut: what follows it in a pipe wants whole names.
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=200)


class _Refusals:
    """Turns what is wrong with a model into the one line a command ends with."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # ArtefactError, ConfigError, GGUFError and SourceError are ValueErrors that speak to people.
        if isinstance(error, ValueError | OSError):
            raise CommandError(str(error)) from error


def _refusals() -> AbstractContextManager[None]:
    return _Refusals()


class _Bars:
    """A bar per stage on stderr; quiet where nobody can see bars."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Callable[[str, float], None]:
        self._progress.start()
        return self._move

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def _move(self, stage: str, fraction: float) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=1.0)
        self._progress.update(self._tasks[stage], completed=fraction)


def _bars() -> AbstractContextManager[Callable[[str, float], None]]:
    return _Bars()
