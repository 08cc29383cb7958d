"""`python -m tests.bench.mesh [--only NAME...] [--out DIR]`: measures, prints one table, writes `mesh-rows.json`.

The one rule: the kept result is of one run, with its machine and date. What only some measures found is written where
--out says, or not at all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.facts import machine_facts
from tests.bench.mesh import cancelling, edge, hop, large, latency, limiting, resting, routing, saturated
from tests.bench.mesh.row import Row

MEASURES: dict[str, Callable[[Path], list[Row]]] = {
    "latency": latency.measure,
    "hop": hop.measure,
    "edge": edge.measure,
    "saturated": saturated.measure,
    "routing": routing.measure,
    "large": large.measure,
    "cancelling": cancelling.measure,
    "limiting": limiting.measure,
    "resting": resting.measure,
}
ELSEWHERE = {
    "worker killed: surviving and duplicated tokens": "make chaos",
    "rolling restart: failed requests": "tests/e2e/test_rolling.py",
}
RESULTS = Path(__file__).parent.parent / "results" / "cpu"
FILE = "mesh-rows.json"


def main() -> int:
    """Measures; exit code 1 where something could not be measured, 0 whatever the figures are."""
    args = _arguments(sys.argv[1:])
    facts = machine_facts()
    rows = [row for name in args.only for row in _measured(name, MEASURES[name])]
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / FILE).write_text(json.dumps(_whole(facts, rows), indent=2, ensure_ascii=False) + "\n")
    _show(rows)
    return int(any(row.value is None for row in rows))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.mesh", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=MEASURES, default=list(MEASURES), metavar="NAME", help=", ".join(MEASURES)
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"where the JSON goes ({RESULTS}; with --only nowhere)")
    args = parser.parse_args(argv)
    if args.out is None and set(args.only) == set(MEASURES):
        args.out = RESULTS
    return args


def _measured(name: str, measure: Callable[[Path], list[Row]]) -> list[Row]:
    """One measure, in a directory of its own; one that breaks is a row that says so, and the others are measured."""
    home = Path(tempfile.mkdtemp(prefix=f"trunkline-bench-{name}-"))
    sys.stderr.write(f"{name} (load {os.getloadavg()[0]:.2f})\n")
    try:
        return measure(home)
    except Exception as exc:
        return [Row(name, "", None, remark=f"did not run: {type(exc).__name__}: {str(exc)[-400:]}")]
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _whole(facts: dict[str, object], rows: Sequence[Row]) -> dict[str, object]:
    return {
        "machine": facts,
        "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"),
        "command": " ".join(["python -m tests.bench.mesh", *sys.argv[1:]]),
        "rows": [{**asdict(row), "met": row.met} for row in rows],
    }


def _show(rows: Sequence[Row]) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in ("measure", "target", "value", "met", "load", "remark"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.line(), style="red" if row.met is False else None)
    for measure, where in ELSEWHERE.items():
        table.add_row(measure, "", "", "", "", f"see {where}", style="dim")
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    sys.exit(main())
