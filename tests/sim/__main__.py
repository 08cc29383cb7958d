"""`python -m tests.sim --seeds N [--first A]`: random worlds over all processors; `--seed N`: one, with its history.

The one rule: whatever fails prints the command that lives through it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterable, Sequence

from tests.sim.chance import lived, random_world
from tests.sim.scenarios import SCENARIOS, play

CHUNK = 25


def many(seeds: Sequence[int], processes: int) -> Iterable[tuple[int, str, str]]:
    """Live through them, in any order."""
    if processes == 1:
        yield from map(lived, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(lived, seeds, chunksize=CHUNK)


def _run_many(seeds: Sequence[int], processes: int) -> int:
    began, failed = time.monotonic(), []
    for done, (seed, _, why) in enumerate(many(seeds, processes), 1):
        if why:
            failed.append(seed)
            print(f"seed {seed} failed: {why[:500]}\n    python -m tests.sim --seed {seed}", flush=True)
        if done % 500 == 0:
            print(f"{done} of {len(seeds)} seeds, {len(failed)} failed", flush=True)
    took = time.monotonic() - began
    print(
        f"{len(seeds)} seeds in {took:.0f} s ({len(seeds) / took:.1f} a second), {len(failed)} failed", *sorted(failed)
    )
    return 1 if failed else 0


def _run_one(seed: int, log: str) -> int:
    from tests.sim import chance

    world, failed = None, 0
    try:
        world = random_world(seed, keep_log=True)
    except Exception:
        traceback.print_exc()
        world, failed = chance.last, 1
    if world is not None:
        for line in world.events:
            print(line)
        for client in world.clients:
            print(f"c{client.number} at {client.ask.gateway}: {client.outcome} {client.message}")
        with open(log, "w") as file:
            file.write("\n".join(world.lines))
        print(f"history of {len(world.lines)} lines in {log}")
    return failed


def _run_scenario(name: str) -> int:
    for label, scene in SCENARIOS[name].items():
        print(f"{name} {label}")
        play(scene)
    return 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=100, help="how many worlds")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--seed", type=int, help="only this one, and its history")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), metavar="NAME", help="a named one instead")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="one for each processor")
    parser.add_argument("--log", default="/dev/null", help="where the history of one seed goes")
    options = parser.parse_args()
    if options.scenario:
        return _run_scenario(options.scenario)
    if options.seed is not None:
        return _run_one(options.seed, options.log)
    return _run_many(range(options.first, options.first + options.seeds), options.processes)


if __name__ == "__main__":
    sys.exit(main())
