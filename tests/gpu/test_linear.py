"""Products against fp64: skinny ones for every number of rows, planned ones for those that a plan takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.buffers import Buffer, assert_intact, captured, guarded, poisoned, stream
from trunkline_kernels.cuda import rows
from trunkline_kernels.cuda.door import PDL
from trunkline_kernels.cuda.linear import BIAS, FP32_OUT, SKINNY_ROWS, WORKSPACE_BYTES, Plan, linear
from trunkline_kernels.door import KernelError

# (columns, inner): one tile, one chunk; fewer chunks than warps; an odd number of chunks; more tiles than
# multiprocessors; the products of 135M, 1B and 8B Llamas.
SHAPES = [
    (16, 64),
    (48, 448),
    (16, 576),
    (4224, 128),
    (960, 576),
    (576, 1536),
    (3072, 2048),
    (2048, 8192),
    (6144, 4096),
    (4096, 14336),
]
flags = pytest.mark.parametrize("flags", [0, PDL], ids=["plain", "pdl"])
fp32 = pytest.mark.parametrize("fp32", [0, FP32_OUT], ids=["bf16", "fp32"])


class Product:
    """Operands, and an output of poison; `run` puts the product on the stream."""

    def __init__(
        self, generator: torch.Generator, count: int, columns: int, inner: int, *, fp32: int = 0, bias: bool = False
    ) -> None:
        def normal(*shape: int) -> Buffer:
            return guarded(torch.randn(shape, generator=generator, device="cuda").bfloat16())

        self.x, self.weight = normal(count, inner), normal(columns, inner)
        self.bias = normal(columns) if bias else None
        self.fp32 = fp32
        self.out = poisoned(count, columns, dtype=torch.float32 if fp32 else torch.bfloat16)

    def run(self, flags: int = 0, plan: Plan | None = None, workspace: Buffer | None = None) -> None:
        linear(
            self.x.address,
            self.weight.address,
            self.bias.address if self.bias else None,
            self.out.address,
            rows=len(self.x.tensor),
            columns=len(self.weight.tensor),
            inner=self.x.tensor.shape[1],
            stream=stream(),
            flags=flags | self.fp32,
            plan=plan,
            workspace=workspace.address if workspace else None,
        )

    def check(self) -> None:
        """Right to the rounding of the output and of sums in fp32; nothing but the output written."""
        assert_intact(self.x, self.weight, self.out)
        x, weight = self.x.tensor.double(), self.weight.tensor.double()
        exact, size = x @ weight.T, x.abs() @ weight.abs().T
        if self.bias:
            exact, size = exact + self.bias.tensor.double(), size + self.bias.tensor.double().abs()
        # Tensor cores truncate when they add: allow an ulp of fp32 per few additions of what is added up.
        allowed = size * 2.0**-20 + exact.abs() * (0 if self.fp32 else 1.01 * 2.0**-8)
        error = (self.out.tensor.double() - exact).abs()
        assert bool((error <= allowed).all()), float((error / allowed).max())


@fp32
@flags
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_a_skinny_product_is_right(
    generator: torch.Generator, columns: int, inner: int, count: int, flags: int, fp32: int
) -> None:
    product = Product(generator, count, columns, inner, fp32=fp32, bias=columns != 4096)
    product.run(flags)
    product.check()


def test_the_head_of_a_large_vocabulary_is_right(generator: torch.Generator) -> None:
    product = Product(generator, 3, 128256, 2048, fp32=FP32_OUT)
    product.run(PDL)
    product.check()


@pytest.mark.parametrize(("columns", "inner"), [(48, 448), (960, 576), (6144, 4096)])
def test_a_row_has_the_same_bits_in_any_company(generator: torch.Generator, columns: int, inner: int) -> None:
    whole = Product(generator, SKINNY_ROWS, columns, inner, fp32=FP32_OUT)
    whole.run()
    for count in range(1, SKINNY_ROWS + 1):
        for first in {0, SKINNY_ROWS - count}:
            part = Product(generator, count, columns, inner, fp32=FP32_OUT)
            part.weight, part.x = whole.weight, guarded(whole.x.tensor[first : first + count])
            part.run(PDL)
            assert torch.equal(part.out.tensor, whole.out.tensor[first : first + count])


def test_a_row_of_nan_or_infinity_is_nobody_elses_business(generator: torch.Generator) -> None:
    clean, dirty = (Product(generator, 8, 960, 576, fp32=FP32_OUT) for _ in range(2))
    dirty.weight = clean.weight
    dirty.x.tensor.copy_(clean.x.tensor)
    dirty.x.tensor[3], dirty.x.tensor[5] = float("nan"), float("inf")
    clean.run()
    dirty.run()
    others = [0, 1, 2, 4, 6, 7]
    assert torch.equal(dirty.out.tensor[others], clean.out.tensor[others])
    assert bool(dirty.out.tensor[3].isnan().all())


@pytest.mark.parametrize("count", [1, 8, 16])
def test_a_product_repeats_bit_for_bit(generator: torch.Generator, count: int) -> None:
    product = Product(generator, count, 6144, 4096)
    product.run()
    bits = product.out.bits
    for repeat in range(20):
        product.out.poison()
        product.run(PDL * (repeat % 2))
        assert product.out.bits == bits


@pytest.mark.parametrize("count", [1, 8, 16])
def test_overlapping_products_wait_for_what_they_read(generator: torch.Generator, count: int) -> None:
    """x → norm → product → product → x, over and over in the same buffers: a missing wait is a wrong bit."""
    width, wide = 2048, 6144
    there, back = (Product(generator, count, *shape) for shape in ((wide, width), (width, wide)))
    x, delta, weight = guarded(there.x.tensor), poisoned(count, width), guarded(torch.ones(width).bfloat16())
    first = x.tensor.clone()
    back.x, back.out = there.out, delta

    def chain(flags: int) -> None:
        for _ in range(30):
            there.run(flags)
            back.run(flags)
            rows.add_rms_norm(
                x.address,
                delta.address,
                weight.address,
                there.x.address,
                rows=count,
                width=width,
                eps=1e-5,
                stream=stream(),
                flags=flags,
            )

    def bits(run: Callable[[], object]) -> bytes:
        x.tensor.copy_(first)
        there.x.tensor.copy_(first)
        run()
        assert_intact(x, delta, there.x, there.out)
        return x.bits + there.x.bits

    expected = bits(lambda: chain(0))
    assert not there.x.tensor.isnan().any()
    graph = captured(lambda: chain(PDL))
    for _ in range(20):
        assert bits(lambda: chain(PDL)) == expected
        assert bits(graph.replay) == expected


# ---- plans


@pytest.fixture(scope="module")
def workspace() -> Buffer:
    return poisoned(WORKSPACE_BYTES, dtype=torch.uint8)


@pytest.mark.parametrize(("fp32", "bias"), [(0, False), (0, True), (FP32_OUT, False)])
@pytest.mark.parametrize(("columns", "inner"), [(960, 576), (576, 1536), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize(("most", "counts"), [(32, [1, 17, 31, 32]), (128, [33, 100, 128]), (512, [129, 300, 512])])
def test_a_planned_product_is_right_for_all_rows_up_to_the_plans(
    generator: torch.Generator,
    workspace: Buffer,
    most: int,
    counts: list[int],
    columns: int,
    inner: int,
    fp32: int,
    bias: bool,
) -> None:
    plan = Plan(most, columns, inner, flags=fp32 | (BIAS if bias else 0))
    for count in counts:
        product = Product(generator, count, columns, inner, fp32=fp32, bias=bias)
        product.run(plan=plan, workspace=workspace)
        product.check()
        bits = product.out.bits
        product.out.poison()
        product.run(PDL, plan=plan, workspace=workspace)
        assert product.out.bits == bits
    assert_intact(workspace)


def test_a_planned_product_is_replayed_from_a_graph_that_outlives_the_plan(
    generator: torch.Generator, workspace: Buffer
) -> None:
    product = Product(generator, 128, 960, 576)
    plans = [Plan(128, 960, 576)]
    graph = captured(lambda: product.run(plan=plans[0], workspace=workspace))
    bits = product.out.bits
    plans.clear()
    for _ in range(3):
        product.out.poison()
        graph.replay()
        product.check()
        assert product.out.bits == bits


def test_a_plan_refuses_what_it_was_not_made_for(generator: torch.Generator, workspace: Buffer) -> None:
    plan = Plan(32, 960, 576)
    for product in (
        Product(generator, 33, 960, 576),
        Product(generator, 32, 976, 576),
        Product(generator, 32, 960, 640),
        Product(generator, 32, 960, 576, bias=True),
        Product(generator, 32, 960, 576, fp32=FP32_OUT),
    ):
        with pytest.raises(KernelError, match="fit"):
            product.run(plan=plan, workspace=workspace)
        assert bool(product.out.tensor.isnan().all())
    fitting = Product(generator, 32, 960, 576)
    with pytest.raises(KernelError, match="NULL"):
        fitting.run(plan=plan)
