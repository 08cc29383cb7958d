"""`trunkctl bench`: load on a live mesh, or on any server with OpenAI's completions, and what its users would feel."""

import argparse
import datetime
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from shared.clock import SYSTEM_CLOCK
from trunkctl import client
from trunkctl.bench.clients import Target
from trunkctl.bench.load import Pace
from trunkctl.bench.measures import Outcome, Report, Slo, measure
from trunkctl.bench.plot import draw
from trunkctl.bench.processes import Job, run_load
from trunkctl.bench.report import show
from trunkctl.bench.workload import Lengths, Mix, read_lengths
from trunkctl.failure import CommandError, unanswered
from trunkctl.home import Home, find_home
from trunkctl.options import Subparsers, positive, temperature, whole

DEFAULT_SECONDS = 30.0
FOREIGN_VOCAB = 30_000  # ids that any server's model has
ANSWER_S = 10.0


def add_parser(subparsers: Subparsers) -> None:
    """Adds `bench`."""
    parser = subparsers.add_parser(
        "bench",
        help="put load on a mesh and measure what its users feel",
        description="Closed loop (--concurrency) or open loop (--rate, Poisson: arrivals never wait for answers). "
        "The same seed gives the same requests to every server. A length is N tokens, or MEDIAN,SIGMA,MIN,MAX of a "
        "log-normal distribution.",
    )
    _add_pace(parser)
    _add_mix(parser)
    _add_target(parser)
    parser.add_argument(
        "--slo-ttft-ms", type=float, default=500.0, metavar="MS", help="goodput: first token (%(default)g)"
    )
    parser.add_argument(
        "--slo-itl-ms", type=float, default=50.0, metavar="MS", help="goodput: p99 of a request's pauses (%(default)g)"
    )
    parser.add_argument("--processes", type=positive, default=1, metavar="N", help="client processes (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here (SVG)")
    parser.set_defaults(run=run)


def _add_pace(parser: argparse.ArgumentParser) -> None:
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=positive, default=1, metavar="N", help="requests under way (%(default)s)")
    pace.add_argument("--rate", type=_above_zero, metavar="R", help="requests a second, at random times")
    parser.add_argument("--duration", type=_above_zero, metavar="S", help=f"seconds of load ({DEFAULT_SECONDS:g})")
    parser.add_argument("--requests", type=positive, metavar="N", help="requests in all (what --duration allows)")
    parser.add_argument(
        "--warm-up", type=whole(0, 10_000), default=2, metavar="N", help="requests of each process before (%(default)s)"
    )


def _add_mix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-length", type=_lengths, default=Lengths(128), metavar="LENGTH", help="tokens (128)")
    parser.add_argument("--output-length", type=_lengths, default=Lengths(128), metavar="LENGTH", help="tokens (128)")
    parser.add_argument("--text", action="store_true", help="prompts as text, a word about a token (token ids)")
    parser.add_argument("--vocab", type=positive, metavar="N", help="ids are below this (the model's, else 30000)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of arrivals, lengths and prompts (%(default)s)"
    )
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (%(default)g)")
    parser.add_argument("--stop-early", action="store_true", help="let answers end before the length asked for")


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--protocol", choices=("grpc", "openai-http"), default="grpc", help="(%(default)s)")
    parser.add_argument(
        "--address",
        action="append",
        metavar="ADDRESS",
        help="HOST:PORT of a gateway, or URL; repeatable, then taken in turns (the local mesh)",
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file with the API key (TRUNKLINE_API_KEY, the local key)"
    )
    parser.add_argument("--model", metavar="NAME", help="model to use (the only one served)")
    parser.add_argument(
        "--timeout", type=_above_zero, default=600.0, metavar="S", help="seconds for one request (%(default)g)"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the load; exit code 1 where nothing was completed."""
    console = Console(highlight=False)
    target, vocab = _target(args)
    mix = Mix(args.seed, args.prompt_length, args.output_length, args.vocab or vocab, args.text)
    seconds = args.duration or (None if args.requests else DEFAULT_SECONDS)
    pace = Pace(args.rate, args.concurrency, seconds, args.requests)
    title = _title(target, pace)
    with console.status(title):
        results = run_load(Job(target, mix, pace, args.warm_up), args.processes)
    outcomes = sorted((o for result in results for o in result.outcomes), key=lambda outcome: outcome.number)
    offered = seconds if args.requests is None else None
    report = measure(outcomes, [result.health for result in results], Slo(args.slo_ttft_ms, args.slo_itl_ms), offered)
    console.print(title, style="dim", soft_wrap=True)
    show(report, console)
    _keep(args, title, report, outcomes, {"mix": mix, "pace": pace, "target": target.addresses})
    return 0 if report.completed else 1


def _keep(
    args: argparse.Namespace, title: str, report: Report, outcomes: list[Outcome], settings: dict[str, Any]
) -> None:
    if args.json is not None:
        date = datetime.datetime.fromtimestamp(SYSTEM_CLOCK.wall_ms() / 1000, datetime.UTC).isoformat("T", "seconds")
        whole = {"date": date, "load": title, "settings": settings, "report": report}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n")
    if args.plot is not None:
        args.plot.write_text(draw(title, outcomes))


def _title(target: Target, pace: Pace) -> str:
    how = f"{pace.concurrency} at a time" if pace.rate is None else f"{pace.rate:g} requests/s"
    seconds = "" if pace.seconds is None else f", {pace.seconds:g} s"
    count = "" if pace.count is None else f", {pace.count} requests"
    return f"{target.model} at {', '.join(target.addresses)} ({target.protocol}): {how}{seconds}{count}"


def _target(args: argparse.Namespace) -> tuple[Target, int]:
    """Whom to ask, and the size of the model's vocabulary."""
    home = find_home(args.home)
    plan = client.local_plan(home)
    if args.protocol == "grpc":
        addresses = args.address or [plan.grpc if plan else client.DEFAULT_ADDRESS]
        key = client.read_key(home, args.api_key_file)
        model, vocab = _mesh_model(addresses[0], key, args.model)
    else:
        addresses = args.address or [f"http://{plan.http if plan else '127.0.0.1:8000'}"]
        addresses = [address.removesuffix("/").removesuffix("/v1") for address in addresses]
        key = _key_if_any(home, args.api_key_file)
        model, vocab = args.model or _only_model(addresses[0], key), FOREIGN_VOCAB
    target = Target(
        protocol=args.protocol,
        addresses=tuple(addresses),
        key=key,
        model=model,
        timeout_s=args.timeout,
        temperature=args.temperature,
        ignore_eos=not args.stop_early,
    )
    return target, vocab


def _mesh_model(address: str, key: str, asked: str | None) -> tuple[str, int]:
    with client.open_mesh(address, key) as mesh:
        name = mesh.model(asked)
        versions = mesh.versions(name)
    return name, min((version.vocab_size for version in versions), default=FOREIGN_VOCAB)


def _only_model(address: str, key: str) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{address}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as said:
            names = [model["id"] for model in msgspec.json.decode(said.read())["data"]]
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        raise CommandError(unanswered(address)) from error
    if len(names) != 1:
        raise CommandError(f"--model must name one of: {', '.join(names)}" if names else "the server has no model")
    return str(names[0])


def _key_if_any(home: Home, file: Path | None) -> str:
    """Other servers may need none."""
    try:
        return client.read_key(home, file)
    except CommandError:
        if file is not None:
            raise
        return ""


def _lengths(text: str) -> Lengths:
    try:
        return read_lengths(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
