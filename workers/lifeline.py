"""Runs a module as `python -m` does, in a process that does not outlive its parent.

    python -m workers.lifeline <pid of the parent> <module> [arguments]

Owns that promise alone. The one rule: the kernel keeps it (SIGKILL when the parent ends), so that it holds whatever the
module is doing, be it deep inside a step.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on this process ends when its parent does; at once if that is no longer `parent`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(f"process {parent} ended before its engine began")


def main(arguments: list[str]) -> None:
    """See the module."""
    parent, module, *rest = arguments
    die_with(int(parent))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
