"""`python -m trunkctl`, the same as the console script."""

import sys

from trunkctl.main import run

if __name__ == "__main__":
    sys.exit(run())
