"""`python -m <service> --config FILE`: how every service starts.

The one rule: what stops a start is one sentence on stderr and exit code 1, never a traceback.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from shared.config import load
from shared.lifecycle import run

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)


def start(prog: str, description: str, config_type: type[ConfigT], main: Callable[[ConfigT], Awaitable[None]]) -> int:
    """Read the configuration named on the command line and run `main` with it; the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    path = parser.parse_args().config

    async def serve() -> None:
        await main(load(path, config_type))

    return run(serve)
