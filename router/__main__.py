"""`python -m router --config FILE`: one router. Exits with 1 and one sentence where it cannot start."""

from __future__ import annotations

import sys

from router.app import main
from router.config import RouterConfig
from shared.start import start

if __name__ == "__main__":
    sys.exit(start("router", "A Trunkline router.", RouterConfig, main))
