"""`trunkctl generate`: one generation through the public API, streamed to the terminal."""

import argparse
import sys
from collections.abc import Callable, Iterable

from rich.console import Console

from trunkctl.client import Mesh, add_options, connect
from trunkctl.failure import CommandError
from trunkctl.options import Subparsers, temperature, whole
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2


def add_parser(subparsers: Subparsers) -> None:
    """Adds `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="generate from a prompt and stream the text",
        description="Generates from a prompt and streams the text to standard output; usage goes to standard error.",
    )
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument("--chat", action="store_true", help="send it as a user's message, through the chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it (implies --chat)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable")
    parser.add_argument("--quiet", action="store_true", help="print no usage")
    add_generation_options(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def add_generation_options(parser: argparse.ArgumentParser) -> None:
    """What to draw and how much of it."""
    parser.add_argument("--model", metavar="NAME", help="model to use (the only one served)")
    parser.add_argument(
        "--max-tokens", type=whole(1, 2**32 - 1), metavar="N", help="most tokens to generate (what the context leaves)"
    )
    parser.add_argument("--temperature", type=temperature, metavar="T", help="softmax temperature, 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the smallest set with this probability")
    parser.add_argument("--top-k", type=whole(-1, 2**31 - 1), metavar="K", help="keep the K likeliest tokens")
    parser.add_argument("--seed", type=whole(0, 2**64 - 1), metavar="N", help="seed; the same seed draws the same text")


def run(args: argparse.Namespace) -> int:
    """Streams one answer."""
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with connect(args) as mesh:
        spec = spec_from(args, mesh.model(args.model))
        spec.stop.extend(args.stop)
        if args.chat or args.system:
            if args.system:
                spec.chat.messages.add(role="system", content=args.system)
            spec.chat.messages.add(role="user", content=text)
        else:
            spec.prompt = text
        answer = stream(mesh, spec, write)
    write("\n")
    if not args.quiet:
        Console(stderr=True, highlight=False, soft_wrap=True).print(summary(answer), style="dim")
    return 0


def spec_from(args: argparse.Namespace, model: str) -> inference_pb2.GenerationSpec:
    """The generation that the options describe, without its prompt; what is not given stays unset."""
    sampling = common_pb2.Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed)
    return inference_pb2.GenerationSpec(model=model, max_tokens=args.max_tokens, sampling=sampling)


class Answer:
    """What a finished stream said."""

    def __init__(self, started: inference_pb2.Started) -> None:
        self.started = started
        self.finished = inference_pb2.Finished()
        self.text = ""


def stream(mesh: Mesh, spec: inference_pb2.GenerationSpec, show: Callable[[str], None]) -> Answer:
    """Runs one generation and hands each piece of text to `show`. Raises grpc.RpcError; cancels when interrupted."""
    call = mesh.stub.Generate(inference_pb2.GenerateRequest(spec=spec), metadata=mesh.metadata)
    try:
        return _collect(call, show)
    finally:
        call.cancel()


def _collect(events: Iterable[inference_pb2.GenerateResponse], show: Callable[[str], None]) -> Answer:
    answer = None
    for event in events:
        if event.HasField("started"):
            answer = Answer(event.started)
        elif answer is not None and event.HasField("delta"):
            answer.text += event.delta.text
            show(event.delta.text)
        elif answer is not None and event.HasField("finished"):
            answer.finished = event.finished
    if answer is None:
        raise CommandError("the stream ended before it began")
    return answer


def summary(answer: Answer) -> str:
    """One line: how much, how fast, and the id to look it up by."""
    usage, receipt = answer.finished.usage, answer.finished.receipt
    rate = f", {1000 * (usage.completion_tokens - 1) / receipt.decode_ms:.1f} tokens/s" if receipt.decode_ms else ""
    return (
        f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {receipt.total_ms:.0f} ms{rate}"
        f" · request {answer.started.request_id}"
    )


def write(text: str) -> None:
    """Puts a piece of an answer on standard output at once, as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()
