"""`trunkctl chat`: a conversation in the terminal, through the public API."""

import argparse
from contextlib import suppress

import grpc
from rich.console import Console

from trunkctl.client import Mesh, add_options, connect
from trunkctl.failure import explain
from trunkctl.generate import add_generation_options, spec_from, stream, summary, write
from trunkctl.options import Subparsers
from trunkline.inference.v1 import inference_pb2


def add_parser(subparsers: Subparsers) -> None:
    """Adds `chat`."""
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="A conversation. Ctrl-C breaks an answer off, /new begins anew, Ctrl-D or /exit ends.",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_generation_options(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reads lines and streams answers until the input ends."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with connect(args) as mesh:
        opening = spec_from(args, mesh.model(args.model))
        if args.system:
            opening.chat.messages.add(role="system", content=args.system)
        console.print(f"{opening.model}: Ctrl-C breaks an answer off, /new begins anew, Ctrl-D ends.", style="dim")
        _converse(mesh, opening, console)
    return 0


def _converse(mesh: Mesh, opening: inference_pb2.GenerationSpec, console: Console) -> None:
    talk = _copy(opening)
    while (line := _read(console)) is not None:
        if line == "/new":
            talk = _copy(opening)
        elif line:
            talk.chat.messages.add(role="user", content=line)
            _answer(mesh, talk, console)


def _answer(mesh: Mesh, talk: inference_pb2.GenerationSpec, console: Console) -> None:
    """Streams the next turn into the conversation; a turn that failed is taken back."""
    said: list[str] = []

    def show(text: str) -> None:
        said.append(text)
        write(text)

    try:
        answer = stream(mesh, talk, show)
        console.print(f"\n{summary(answer)}", style="dim")
    except KeyboardInterrupt:
        console.print("\n(broken off)", style="dim")
    except grpc.RpcError as error:
        console.print(explain(error, mesh.address), style="red", markup=False)
        del talk.chat.messages[-1]
        return
    talk.chat.messages.add(role="assistant", content="".join(said))


def _read(console: Console) -> str | None:
    """The next line, or None at the end."""
    with suppress(EOFError, KeyboardInterrupt):
        line = console.input("[bold cyan]> [/]").strip()
        return None if line == "/exit" else line
    return None


def _copy(spec: inference_pb2.GenerationSpec) -> inference_pb2.GenerationSpec:
    copy = inference_pb2.GenerationSpec()
    copy.CopyFrom(spec)
    return copy
