"""`python -m gateway --config FILE`: one gateway. Exits with 1 and one sentence where it cannot start."""

from __future__ import annotations

import argparse
import sys

from gateway.app import main
from gateway.config import GatewayConfig
from shared.config import ConfigError, load
from shared.lifecycle import run


def start() -> int:
    """Read the configuration and serve; the exit code."""
    parser = argparse.ArgumentParser(prog="gateway", description="A Trunkline gateway.")
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    path = parser.parse_args().config
    try:
        config = load(path, GatewayConfig)
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return run(lambda: main(config))


if __name__ == "__main__":
    sys.exit(start())
