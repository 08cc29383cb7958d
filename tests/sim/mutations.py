"""All mutations: `python -m tests.sim.mutations` makes each, and prints what it breaks and which scenario notices.

The one rule: the answer is 1 if one was not noticed.
"""

from __future__ import annotations

import argparse

from tests.sim import broken_takeover, broken_wire
from tests.sim.mutation import MUTATIONS, Mutation


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutations")
    parser.add_argument("--how", action="store_true", help="also print how it was noticed")
    options = parser.parse_args()
    missed = 0
    print(f"{'rule':<12} {'mutation':<52} noticed by")
    for mutation in sorted(MUTATIONS, key=_place):
        noticed = mutation.noticed()
        missed += noticed is None
        print(f"{mutation.rule:<12} {mutation.name:<52} {noticed.scenario if noticed else 'NOBODY'}", flush=True)
        if noticed and options.how:
            print(f"{'':<12} {noticed.how}")
    print(f"{len(MUTATIONS)} mutations, {missed} not noticed")
    return 1 if missed else 0


def _place(mutation: Mutation) -> tuple[int, str]:
    """Rules in their order, then words."""
    return (int(mutation.rule), "") if mutation.rule.isdigit() else (99, mutation.rule)


__all__ = ["MUTATIONS", "Mutation", "broken_takeover", "broken_wire"]


if __name__ == "__main__":
    raise SystemExit(main())
