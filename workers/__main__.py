"""`python -m workers --config FILE`: one worker. Exits with 1 and one sentence where it cannot start."""

from __future__ import annotations

import argparse
import sys

from shared.config import ConfigError, load
from shared.lifecycle import run
from workers.app import main
from workers.config import WorkerConfig


def start() -> int:
    """Read the configuration and serve; the exit code."""
    parser = argparse.ArgumentParser(prog="workers", description="A Trunkline worker: a door and its engine.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    path = parser.parse_args().config
    try:
        config = load(path, WorkerConfig)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return run(lambda: main(config))


if __name__ == "__main__":
    sys.exit(start())
