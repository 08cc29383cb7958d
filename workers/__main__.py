"""`python -m workers --config FILE`: one worker. Exits with 1 and one sentence where it cannot start."""

from __future__ import annotations

import sys

from shared.start import start
from workers.app import main
from workers.config import WorkerConfig

if __name__ == "__main__":
    sys.exit(start("workers", "A Trunkline worker: a door and its engine.", WorkerConfig, main))
