"""The code of the CUDA library's skinny products, run on the CPU against fp64: see `tests.kernels.emulator`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.emulator.arrays import exact, guarded_bf16, poisoned_bf16, to_bf16
from tests.kernels.emulator.emulated import Emulator, broken
from tests.kernels.guarded import Guarded, poisoned, untouched
from trunkline_kernels.cuda.door import arguments
from trunkline_kernels.cuda.linear import FP32_OUT, SKINNY_ROWS, LinearArgs

pytestmark = pytest.mark.timeout(180)  # the first test compiles


class Product:
    """x[rows, inner] · weight[columns, inner]ᵀ + bias."""

    def __init__(self, rng: np.random.Generator, rows: int, columns: int, inner: int, bias: bool = False) -> None:
        self.x, self.weight = (guarded_bf16(to_bf16(rng.standard_normal((n, inner)))) for n in (rows, columns))
        self.bias = guarded_bf16(to_bf16(rng.standard_normal(columns))) if bias else None

    def run(self, emulator: Emulator, flags: int = 0, seed: int = 0) -> Guarded:
        (rows, inner), columns = self.x.array.shape, len(self.weight.array)
        out = (poisoned if flags & FP32_OUT else poisoned_bf16)(rows, columns)
        args = arguments(
            LinearArgs, flags, x=self.x.address, weight=self.weight.address,
            bias=self.bias.address if self.bias else None, out=out.address, rows=rows, columns=columns, inner=inner,
        )  # fmt: skip
        with untouched(self.x, self.weight):
            emulator.call("tl_cuda_linear", args, (self.x.array, self.weight.array), seed)
        assert out.intact
        return out

    def check(self, emulator: Emulator, flags: int = 0, seed: int = 0) -> None:
        """Right to the rounding of the output, and of sums in fp32."""
        out = self.run(emulator, flags, seed).array
        found = out.astype(np.float64) if flags & FP32_OUT else exact(out)
        x, weight = exact(self.x.array), exact(self.weight.array)
        wanted, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
        if self.bias:
            wanted, size = wanted + exact(self.bias.array), size + np.abs(exact(self.bias.array))
        allowed = size * 2.0**-20 + np.abs(wanted) * (0 if flags & FP32_OUT else 1.01 * 2.0**-8)
        assert (np.abs(found - wanted) <= allowed).all()


# One tile, one chunk; fewer chunks than warps, an odd number of them; several steps; more tiles than the three
# multiprocessors of the emulated GPU.
SHAPES = [(16, 64), (48, 448), (16, 576), (176, 128), (80, 1088)]


@pytest.mark.parametrize("flags", [0, FP32_OUT], ids=["bf16", "fp32"])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_a_skinny_product_is_right_in_any_order_of_its_threads(
    emulator: Emulator, rng: np.random.Generator, columns: int, inner: int, rows: int, flags: int
) -> None:
    product = Product(rng, rows, columns, inner, bias=columns != 16)
    for seed in range(2):
        product.check(emulator, flags, seed)


def test_a_row_has_the_same_bits_in_any_company(emulator: Emulator, rng: np.random.Generator) -> None:
    product = Product(rng, SKINNY_ROWS, 80, 576)
    whole, x = product.run(emulator, FP32_OUT).array, product.x
    for rows in (1, 5, 8, 9, 15):
        product.x = guarded_bf16(x.array[-rows:])
        assert (product.run(emulator, FP32_OUT, seed=rows).array == whole[-rows:]).all()


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("    __syncthreads();\n    parity ^= 1;", "    parity ^= 1;"),
        ("    parity ^= 1;\n", ""),
        ("row >= a.rows) continue;", "row > a.rows) continue;"),
    ],
    ids=["a sum is read before it is there", "a sum is written over", "a row too many"],
)
def test_an_error_in_a_skinny_product_is_noticed(
    emulator: Emulator, tmp_path: Path, rng: np.random.Generator, line: str, instead: str
) -> None:
    product = Product(rng, 9, 176, 576)
    wrong = broken(emulator, tmp_path, "linear.cu", line, instead)

    def check_orders() -> None:
        for seed in range(20):
            product.check(wrong, seed=seed)

    with pytest.raises(AssertionError):
        check_orders()
