"""What a fresh mesh shows: a first answer through its public API, where its time went, and how to go on."""

import json
import os
import shlex

from rich.console import Console

from shared.clock import Clock
from trunkctl.client import open_mesh, read_key
from trunkctl.generate import stream, summary, write
from trunkctl.home import Home
from trunkctl.plan import Plan
from trunkctl.trace import draw, open_store, settled_spans
from trunkline.common.v1 import common_pb2
from trunkline.inference.v1 import inference_pb2

MAX_TOKENS = 64


def ask(home: Home, plan: Plan, prompt: str, clock: Clock, console: Console) -> None:
    """Streams one greedy answer to the terminal and draws its waterfall. Raises CommandError."""
    spec = inference_pb2.GenerationSpec(
        model=plan.model, max_tokens=MAX_TOKENS, sampling=common_pb2.Sampling(temperature=0.0)
    )
    spec.chat.messages.add(role="user", content=prompt)
    console.print(f"\n[bold cyan]>[/] {prompt}")
    with open_mesh(plan.grpc, read_key(home, None)) as mesh:
        answer = stream(mesh, spec, write)
    console.print(f"\n[dim]{summary(answer)}[/]\n", soft_wrap=True)
    trace_id = answer.started.trace_id
    draw(console, settled_spans(open_store(plan.redis_url), trace_id, clock), answer.finished.receipt)


def addresses(home: Home, plan: Plan, console: Console) -> None:
    """Where the mesh answers, and what to try next."""
    key = os.path.relpath(home.dev_key)
    where = {"HTTP": f"http://{plan.http}/v1", "gRPC": plan.grpc, "API key": key, "logs": os.path.relpath(home.logs)}
    console.print()
    for name, value in where.items():
        console.print(f"[dim]{name:<8}[/]{value}", soft_wrap=True)
    body = json.dumps({"model": plan.model, "messages": [{"role": "user", "content": "Hello"}], "stream": True})
    console.print(
        f"\ncurl -N http://{plan.http}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'  -H "authorization: Bearer $(cat {shlex.quote(key)})" \\\n  -d {shlex.quote(body)}',
        soft_wrap=True,
        markup=False,
    )
