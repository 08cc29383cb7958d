"""What command-line options have in common."""

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from gateway.http.forms import ChatForm, CompletionForm

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know itself, with its own usage, where argparse leaves that to the parser above it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Nothing unknown is left."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown


def whole(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number within these bounds."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not least <= int(text[:40]) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return read


port = whole(1, 65_535)


def positive(text: str) -> int:
    """A whole number from 1 up."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return number


def at_least_zero(what: str) -> Callable[[str], float]:
    """Reads a finite number from 0 up."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what} from 0 up")
        return value

    return read


seconds = at_least_zero("number of seconds")
temperature = at_least_zero("temperature")


def request_id(text: str) -> str:
    """A request's id, also as answers in OpenAI's shape show it: `chatcmpl-<id>`, `cmpl-<id>`."""
    return text.removeprefix(ChatForm.id_prefix).removeprefix(CompletionForm.id_prefix)
