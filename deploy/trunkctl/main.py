"""The command line: every command, and what becomes of a failure — one line on stderr and an exit code.

0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from shared.errors import StartError
from trunkctl import bench, chat, generate, keys, mesh, model, request, trace
from trunkctl.failure import CommandError
from trunkctl.options import Parser

INTERRUPTED = 130


def run(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background job is born ignoring it
    try:
        code: int = args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush does not complain
        return 1
    except UnicodeError:
        return _fail("the text is not valid UTF-8")
    except (CommandError, StartError, OSError) as error:
        return _fail(str(error))
    return code


def _fail(text: str) -> int:
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"trunkctl: {text}", style="red", markup=False)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="trunkctl", description="Runs a Trunkline mesh here, and talks to any.")
    parser.add_argument("--home", metavar="DIR", help="runtime directory (TRUNKLINE_HOME, .trunkline)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for command in (mesh, model, generate, chat, trace, request, keys, bench):
        command.add_parser(commands)
    return parser
