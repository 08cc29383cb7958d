"""`python -m gateway --config FILE`: one gateway. Exits with 1 and one sentence where it cannot start."""

from __future__ import annotations

import sys

from gateway.app import main
from gateway.config import GatewayConfig
from shared.start import start

if __name__ == "__main__":
    sys.exit(start("gateway", "A Trunkline gateway.", GatewayConfig, main))
