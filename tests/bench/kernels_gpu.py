"""`make bench-kernels`: each CUDA call at the sizes of the named shapes: that it is right, then how long it takes.

Time is that of a graph of many calls over data that is never in the L2, divided by the calls; floor is the bytes that
must be read at the memory's speed, or the FLOPs at the tensor cores'; beside it stands torch (cuBLAS, SDPA) in the same
run. What was measured is written after every group.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch.nn import functional

from tests.bench import roofline
from tests.bench.facts import machine_facts, write_result
from trunkline_kernels.cuda import rows as rowwise
from trunkline_kernels.cuda.attention import (
    AttentionDecodeArgs,
    AttentionPrefillArgs,
    attention_decode,
    attention_prefill,
)
from trunkline_kernels.cuda.door import PDL, arguments, prepare
from trunkline_kernels.cuda.linear import SKINNY_ROWS, WORKSPACE_BYTES, Plan, linear

RESULTS = Path(__file__).parent / "results" / "h200"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = ((1, 640), (8, 640), (32, 640), (128, 640), (1, 8192), (32, 4096))  # sequences, tokens of each
PROMPTS = ((1, 512), (8, 512), (1, 2048), (1, 8192))
ROTATED_BYTES = 300_000_000  # several times the L2
REPLAYS = 15
CLOSE = 3e-2  # relative error, of bf16 results in another order

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """What kernels see of a model."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(columns, inner) of each weight."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (qkv, self.hidden), "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner),
            "head": (self.vocabulary, self.hidden),
        }  # fmt: skip


SHAPES = {
    "8b": Shape(4096, 14336, 32, 8, 128, 128256),
    "1b": Shape(2048, 8192, 32, 8, 64, 128256),
    "135m": Shape(576, 1536, 9, 3, 64, 49152),
}


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured call."""

    shape: str
    op: str
    batch: int
    context: int = 0
    mode: str  # which way of ours
    metric: str = "us"
    value: float
    of_floor: float  # 1 = at the roof
    torch_us: float | None = None


def address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def time_us(calls: Sequence[Call]) -> float:
    """Median microseconds of one of the calls, replayed as one graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times) / len(calls)


def check(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Ends the run where a result is wrong: its time means nothing."""
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    if not error < CLOSE:
        raise SystemExit(f"{what} is wrong: relative error {error:.1e}")


def products(name: str, shape: Shape) -> Iterator[Row]:
    """Every weight at every number of rows: ours up to SKINNY_ROWS, and by a plan."""
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for op, (columns, inner) in shape.products.items():
        size = 2 * columns * inner
        weights = [random(columns, inner) for _ in range(2 + ROTATED_BYTES // size)]
        torch.cuda.synchronize()  # kernels read weights ahead of the stream
        for count in ROWS:
            x, out = random(count, inner), torch.empty(count, columns, dtype=torch.bfloat16, device="cuda")
            theirs = time_us([partial(torch.mm, x, w.T, out=out) for w in weights])
            expected = out.clone()
            plans = {"cublaslt": Plan(count, columns, inner), **({"skinny": None} if count <= SKINNY_ROWS else {})}
            for mode, plan in plans.items():
                out.fill_(torch.nan)
                took = time_us([partial(_product, x, weight, out, plan, workspace) for weight in weights])
                check(f"{op} with {count} rows, {mode}", out, expected)
                floor = 1e6 * size / roofline.H200.bytes_s
                yield Row(shape=name, op=op, batch=count, mode=mode, value=took, of_floor=floor / took, torch_us=theirs)


def _product(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, plan: Plan | None, workspace: torch.Tensor
) -> None:
    linear(
        address(x), address(weight), None, address(out), rows=len(x), columns=out.shape[1], inner=x.shape[1],
        stream=stream(), flags=PDL, plan=plan, workspace=address(workspace),
    )  # fmt: skip


def row_operators(name: str, shape: Shape) -> Iterator[Row]:
    """The small calls between the products, at decode sizes: launch and dependency are what they cost."""
    for count in (1, 128):
        x, delta, out = random(count, shape.hidden), random(count, shape.hidden), random(count, shape.hidden)
        weight, gate_up, inner = random(shape.hidden), random(count, 2 * shape.inner), random(count, shape.inner)

        norm = partial(_norm, x, delta, weight, out)
        swiglu = partial(_swiglu, gate_up, inner)
        for op, call, size in (("add_rms_norm", norm, 8 * x.numel()), ("swiglu", swiglu, 6 * inner.numel())):
            took = time_us([call] * 50)
            yield Row(
                shape=name, op=op, batch=count, mode="pdl", value=took,
                of_floor=1e6 * size / roofline.H200.bytes_s / took,
            )  # fmt: skip
        gate, up = gate_up.chunk(2, dim=-1)
        check("swiglu", inner, functional.silu(gate) * up)


def _norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    rowwise.add_rms_norm(
        address(x), address(delta), address(weight), address(out), rows=len(x), width=x.shape[1], eps=1e-5,
        stream=stream(), flags=PDL,
    )  # fmt: skip


def _swiglu(gate_up: torch.Tensor, inner: torch.Tensor) -> None:
    rowwise.swiglu(address(gate_up), address(inner), rows=len(inner), width=inner.shape[1], stream=stream(), flags=PDL)


def decodes(name: str, shape: Shape) -> Iterator[Row]:
    """Decode attention over splits and stages."""
    for spans, context in CONTEXTS:
        width = context // 16
        pages, size = spans * width, 4 * spans * context * shape.kv_heads * shape.head_dim
        pools = [_pools(shape, pages) for _ in range(2 + ROTATED_BYTES // size)]
        table = torch.randperm(pages, device="cuda").int().view(spans, width).contiguous()
        q = random(spans, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        lens, out = torch.full((spans,), context, device="cuda").int(), random(spans, shape.heads * shape.head_dim)
        fields = _attention_fields(shape, q, lens, table, out, pages)
        expected = _reference(shape, q[0], *pools[-1], table[0])
        for splits in (1, 2, 4, 8):
            for stages in (2, 3, 4):
                calls = [
                    arguments(
                        AttentionDecodeArgs, PDL, **fields, keys=address(k), values=address(v), splits=splits,
                        stages=stages,
                    )
                    for k, v in pools
                ]  # fmt: skip
                out.fill_(torch.nan)
                took = time_us([partial(_decode, args) for args in calls])
                check(f"decode attention, {spans} × {context}, {splits}/{stages}", out[0], expected)
                yield Row(
                    shape=name, op="attention_decode", batch=spans, context=context, mode=f"splits {splits}, {stages}",
                    value=took, of_floor=1e6 * size / roofline.H200.bytes_s / took,
                )  # fmt: skip


def prefills(name: str, shape: Shape) -> Iterator[Row]:
    """Prefill attention beside torch's on contiguous keys and values."""
    for spans, context in PROMPTS:
        width, tokens = context // 16, spans * context
        pages = spans * width
        pools = _pools(shape, pages)
        table = torch.randperm(pages, device="cuda").int().view(spans, width).contiguous()
        q = random(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        lens, out = torch.full((spans,), context, device="cuda").int(), random(tokens, shape.heads * shape.head_dim)
        starts = (torch.arange(spans + 1, device="cuda") * context).int()
        args = arguments(
            AttentionPrefillArgs, PDL, **_attention_fields(shape, q, lens, table, out, pages), keys=address(pools[0]),
            values=address(pools[1]), query_starts=address(starts), rows=tokens,
        )  # fmt: skip
        out.fill_(torch.nan)
        took = time_us([partial(_prefill, args)] * 4)
        check(f"prefill attention, {spans} × {context}", out[-1], _reference(shape, q[-1], *pools, table[-1]))
        wide = [random(spans, shape.heads, context, shape.head_dim) for _ in range(3)]
        theirs = time_us([partial(functional.scaled_dot_product_attention, *wide, is_causal=True)] * 4)
        flops = 2 * spans * shape.heads * shape.head_dim * context * (context + 1)
        yield Row(
            shape=name, op="attention_prefill", batch=spans, context=context, mode="mma", value=took, torch_us=theirs,
            of_floor=1e6 * flops / roofline.H200.flop_s / took,
        )  # fmt: skip


def _decode(args: AttentionDecodeArgs) -> None:
    attention_decode(args, stream())  # which stream is current changes with the capture


def _prefill(args: AttentionPrefillArgs) -> None:
    attention_prefill(args, stream())


def _pools(shape: Shape, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = (pages, shape.kv_heads, 16, shape.head_dim)
    return random(*size), random(*size)


def _attention_fields(
    shape: Shape, q: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, out: torch.Tensor, pages: int
) -> dict[str, int | float]:
    return {
        "q": address(q), "context_lens": address(lens), "block_tables": address(table), "out": address(out),
        "q_stride": q.shape[1], "spans": len(lens), "table_width": table.shape[1], "pages": pages,
        "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "scale": shape.head_dim**-0.5,
    }  # fmt: skip


def _reference(
    shape: Shape, row: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """One query that sees its whole sequence, in fp32: [heads · head_dim]."""
    group = shape.heads // shape.kv_heads
    q = row[: shape.heads * shape.head_dim].float().view(shape.heads, 1, shape.head_dim)
    k, v = (pool[table.long()].transpose(0, 1).flatten(1, 2).float() for pool in (keys, values))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    return functional.scaled_dot_product_attention(q, k, v).flatten()


GROUPS = {"products": products, "rows": row_operators, "decode": decodes, "prefill": prefills}


def main(given: Sequence[str] | None = None) -> int:
    """Measures; exit status 1 where a result was wrong."""
    parser = argparse.ArgumentParser(prog="tests.bench.kernels_gpu", description="CUDA calls: right, and how fast.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.json", metavar="FILE")
    args = parser.parse_args(given)
    machine, command = machine_facts(), shlex.join(["python -m tests.bench.kernels_gpu", *(given or sys.argv[1:])])
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    prepare()
    torch.manual_seed(0)
    rows: list[Row] = []
    for group in args.groups:
        for name in args.shapes:
            for row in GROUPS[group](name, SHAPES[name]):
                rows.append(row)
                sys.stdout.write(_line(row) + "\n")
            sys.stdout.flush()
            write_result(args.out, machine, command, [msgspec.to_builtins(row) for row in rows])
    return 0


def _line(row: Row) -> str:
    size = f"{row.batch} × {row.context}" if row.context else f"{row.batch}"
    beside = f"   torch {row.torch_us:8.1f}" if row.torch_us else ""
    return f"{row.shape:5} {row.op:18} {size:>10} {row.mode:12} {row.value:8.1f} us  {row.of_floor:4.0%}{beside}"


if __name__ == "__main__":
    sys.exit(main())
