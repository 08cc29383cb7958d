"""`python -m tests.chaos --engine latency --requests 10000`: load and faults on a real mesh, and a scorecard.

The one rule: exits with 1 unless everything that the scorecard must show is shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.chaos.run import FORMULA, formula_run


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--engine", choices=("latency", "smollm2"), default="latency")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--out", type=Path, help="directory for the scorecard as JSON and as a plot")
    parser.add_argument("--home", type=Path, help="new directory of the mesh, kept with its logs (a temporary one)")
    options = parser.parse_args()
    changes = {
        "requests": options.requests,
        "rate": options.rate,
        "seed": options.seed,
        "faults": not options.no_faults,
    }
    settings = dataclasses.replace(FORMULA, **{name: value for name, value in changes.items() if value is not None})
    with tempfile.TemporaryDirectory() as directory:
        home = options.home or Path(directory) / "mesh"
        card = uvloop.run(formula_run(settings, home.absolute()))
    print(card.text())  # noqa: T201
    return 0 if card.passed else 1


if __name__ == "__main__":
    sys.exit(main())
