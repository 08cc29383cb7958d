"""`python -m tests.chaos --engine latency --requests 10000`: load and faults on a real mesh, and a scorecard.

The one rule: exits with 1 unless everything that the scorecard must show is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.bench.facts import machine_facts
from tests.chaos.plot import svg
from tests.chaos.run import ENGINES, Settings, run
from tests.chaos.scorecard import Scorecard

MODELS = Path(".trunkline/models")


def main() -> int:
    """See the module."""
    options = _options()
    given = {name: getattr(options, name) for name in ("requests", "rate", "seed", "only")}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = dataclasses.replace(ENGINES[options.engine], faults=not options.no_faults, **changes)
    machine = machine_facts()
    with tempfile.TemporaryDirectory() as directory:
        home = options.home or Path(directory) / "mesh"
        card = uvloop.run(run(settings, home.absolute(), MODELS.absolute()))
    print(card.text())  # noqa: T201
    if options.out:
        _write(card, settings, machine, options.out)
    if not card.passed:
        print(f"the same load and strikes again, with logs: {_command(settings)} --home DIR")  # noqa: T201
    return 0 if card.passed else 1


def _command(settings: Settings) -> str:
    only = f" --only {settings.only!r}" if settings.only else ""
    return (
        f"python -m tests.chaos --engine {settings.engine} --requests {settings.requests} --seed {settings.seed}{only}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="latency")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seed", type=int, help="of load and faults")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--only", help="strikes whose label begins like this: `kill redis`, `stalled to store`")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--out", type=Path, help="directory for the scorecard as JSON and as a plot")
    parser.add_argument("--home", type=Path, help="new directory of the mesh, kept with its logs (a temporary one)")
    return parser.parse_args()


def _write(card: Scorecard, settings: Settings, machine: dict[str, object], out: Path) -> None:
    facts = {"machine": machine, "command": _command(settings), "settings": dataclasses.asdict(settings)}
    numbers = {**facts, **card.summary(), "by_strike": card.by_kind(), "blows": card.log()}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"chaos-{settings.engine}.json").write_text(json.dumps(numbers, indent=1) + "\n")
    title = f"chaos, {settings.engine} engine: {len(card.stories)} requests, {len(card.blows)} strikes"
    (out / f"chaos-{settings.engine}.svg").write_text(svg(card, title))


if __name__ == "__main__":
    sys.exit(main())
