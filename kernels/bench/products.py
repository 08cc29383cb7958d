"""Time of a product on a GPU: ours, by a plan, and torch's, as kernels of one graph whose weights are never in the L2.

    PYTHONPATH=.:kernels/python python3 kernels/bench/products.py

One line per shape and number of rows: microseconds a product, and of ours what part of the memory's speed that is.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch

from trunkline_kernels.cuda.library import PDL, prepare
from trunkline_kernels.cuda.linear import SKINNY_ROWS, WORKSPACE_BYTES, Plan, linear

SHAPES = [  # (columns, inner): the products of 8B, 1B and 135M Llamas
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    *((960, 576), (576, 576), (3072, 576), (576, 1536)),
]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
ROTATED_BYTES = 300_000_000  # several times the L2
MEMORY_BYTES_PER_US = 4.3e6
REPLAYS = 20


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def time_us(run: Callable[[], None]) -> float:
    """Median time of a graph of `run`, in microseconds."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def measure(columns: int, inner: int) -> None:
    """Every number of rows for one shape."""
    bytes_each = 2 * columns * inner
    weights = [torch.randn(columns, inner, device="cuda").bfloat16() for _ in range(2 + ROTATED_BYTES // bytes_each)]
    torch.cuda.synchronize()  # kernels read weights ahead of the stream
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for rows in ROWS:
        x = torch.randn(rows, inner, device="cuda").bfloat16()
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        plan = Plan(rows, columns, inner)

        def ours(flags: int, plan: Plan | None, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for weight in weights:
                linear(
                    x.data_ptr(), weight.data_ptr(), None, out.data_ptr(), rows=len(x), columns=columns, inner=inner,
                    stream=stream(), flags=flags, plan=plan, workspace=workspace.data_ptr(),
                )  # fmt: skip

        def torchs(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for weight in weights:
                torch.mm(x, weight.T, out=out)

        line = f"{columns:6} × {inner:5}  rows {rows:3}"
        if rows <= SKINNY_ROWS:
            plain, pdl = (time_us(lambda flags=flags: ours(flags, None)) / len(weights) for flags in (0, PDL))
            line += f"  ours {plain:6.1f}, with PDL {pdl:6.1f} ({100 * bytes_each / pdl / MEMORY_BYTES_PER_US:3.0f} %)"
        else:
            line += " " * 36
        planned = time_us(lambda plan=plan: ours(0, plan)) / len(weights)
        sys.stdout.write(f"{line}  planned {planned:6.1f}  torch {time_us(torchs) / len(weights):6.1f}\n")
        sys.stdout.flush()


def main() -> None:
    torch.cuda.init()
    prepare()
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    for columns, inner in SHAPES:
        measure(columns, inner)


if __name__ == "__main__":
    main()
