"""`python -m router --config FILE`: one router. Exits with 1 and one sentence where it cannot start."""

from __future__ import annotations

import argparse
import sys

from router.app import main
from router.config import RouterConfig
from shared.config import ConfigError, load
from shared.lifecycle import run


def start() -> int:
    """Read the configuration and serve; the exit code."""
    parser = argparse.ArgumentParser(prog="router", description="A Trunkline router.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    path = parser.parse_args().config
    try:
        config = load(path, RouterConfig)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return run(lambda: main(config))


if __name__ == "__main__":
    sys.exit(start())
