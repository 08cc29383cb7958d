"""Row operators against fp64, in poisoned buffers, with and without programmatic launches, and replayed from graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.buffers import Buffer, assert_intact, captured, guarded, ints, poisoned, stream
from trunkline_kernels.cuda import rows
from trunkline_kernels.cuda.door import PDL

EPS = 1e-5
WIDTHS = [8, 64, 576, 2048, 4096, 5120, 8192, 16384]
PAGE = 16
BF16_STEP = 2.0**-8  # half of the largest relative distance between neighbours: one rounding
flags = pytest.mark.parametrize("flags", [0, PDL], ids=["plain", "pdl"])


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()


def assert_close(found: torch.Tensor, exact: torch.Tensor, roundings: int = 1) -> None:
    """Within so many roundings to bf16 of the exact values; and no NaN."""
    error = (found.double() - exact.double()).abs()
    assert not bool((error > 1.01 * roundings * BF16_STEP * exact.double().abs() + 1e-30).any()), float(error.max())
    assert not bool(found.isnan().any())


# ---- embed


def embed(tokens: Buffer, table: Buffer, flags: int = 0) -> Buffer:
    out = poisoned(len(tokens.tensor), table.tensor.shape[1])
    vocabulary, width = table.tensor.shape
    rows.embed(
        tokens.address,
        table.address,
        out.address,
        rows=len(tokens.tensor),
        width=width,
        vocabulary=vocabulary,
        stream=stream(),
        flags=flags,
    )
    assert_intact(tokens, table, out)
    return out


@flags
@pytest.mark.parametrize("count", [1, 7, 129])
@pytest.mark.parametrize("width", [8, 576, 4096])
def test_rows_of_a_table_are_gathered_and_tokens_outside_are_zero(
    generator: torch.Generator, width: int, count: int, flags: int
) -> None:
    table = guarded(normal(generator, 111, width))
    tokens = torch.randint(0, 111, (count,), generator=generator, device="cuda")
    tokens[0], tokens[-1] = 110, 0
    assert torch.equal(embed(ints(tokens), table, flags).tensor, table.tensor[tokens])
    for outside in (-1, 111, 2**31 - 1, -(2**31)):
        tokens[-1] = outside
        assert not embed(ints(tokens), table, flags).tensor[-1].any()


# ---- norms


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the plain operators do it."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return normal.to(x.dtype) * weight


def norm(x: Buffer, weight: Buffer, flags: int = 0) -> Buffer:
    out = poisoned(*x.tensor.shape)
    count, width = x.tensor.shape
    rows.rms_norm(
        x.address, weight.address, out.address, rows=count, width=width, eps=EPS, stream=stream(), flags=flags
    )
    assert_intact(x, weight, out)
    return out


def add_norm(x: Buffer, delta: Buffer, weight: Buffer, flags: int = 0) -> Buffer:
    out = poisoned(*x.tensor.shape)
    count, width = x.tensor.shape
    rows.add_rms_norm(
        x.address,
        delta.address,
        weight.address,
        out.address,
        rows=count,
        width=width,
        eps=EPS,
        stream=stream(),
        flags=flags,
    )
    assert_intact(x, delta, weight, out)
    return out


@flags
@pytest.mark.parametrize("count", [1, 7, 300])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_norm_is_right_and_equals_torch_but_for_the_order_of_its_sum(
    generator: torch.Generator, width: int, count: int, flags: int
) -> None:
    x, weight = guarded(normal(generator, count, width, scale=30)), guarded(normal(generator, width))
    found = norm(x, weight, flags).tensor
    assert_close(found, exact_norm(x.tensor, weight.tensor), roundings=2)
    # A sum in another order moves the scale by an ulp of fp32, and that moves a value over an edge here and there.
    assert float((found != torch_norm(x.tensor, weight.tensor)).float().mean()) < 0.01


@flags
@pytest.mark.parametrize("width", WIDTHS)
def test_adding_first_rounds_the_residual_and_equals_adding_apart(
    generator: torch.Generator, width: int, flags: int
) -> None:
    x, delta, weight = normal(generator, 19, width), normal(generator, 19, width), guarded(normal(generator, width))
    residual = guarded(x)
    found = add_norm(residual, guarded(delta), weight, flags)
    assert torch.equal(residual.tensor, x + delta)
    assert found.bits == norm(guarded(x + delta), weight).bits


def test_the_norm_works_in_place(generator: torch.Generator) -> None:
    x, delta, weight = normal(generator, 9, 576), normal(generator, 9, 576), guarded(normal(generator, 576))
    there = guarded(x)
    rows.rms_norm(there.address, weight.address, there.address, rows=9, width=576, eps=EPS, stream=stream())
    assert there.bits == norm(guarded(x), weight).bits
    residual, there = guarded(x), guarded(delta)
    rows.add_rms_norm(
        residual.address, there.address, weight.address, there.address, rows=9, width=576, eps=EPS, stream=stream()
    )
    assert there.bits == add_norm(guarded(x), guarded(delta), weight).bits
    assert_intact(residual, there)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_alone(generator: torch.Generator, width: int) -> None:
    x, weight = normal(generator, 40, width), guarded(normal(generator, width))
    whole = norm(guarded(x), weight).tensor
    for row in (0, 17, 39):
        assert torch.equal(norm(guarded(x[row : row + 1]), weight).tensor[0], whole[row])


def test_huge_and_zero_rows_stay_finite() -> None:
    x = torch.zeros(2, 4096, dtype=torch.bfloat16)
    x[0] = 1e15
    found = norm(guarded(x), guarded(torch.ones(4096, dtype=torch.bfloat16))).tensor
    assert bool((found[0] == 1).all())
    assert bool((found[1] == 0).all())


# ---- rope_cache


class Rope:
    """Some rows, pools and tables; `run` puts the call on the stream."""

    def __init__(self, generator: torch.Generator, heads: int, kv_heads: int, head_dim: int, count: int) -> None:
        self.heads, self.kv_heads, self.head_dim, self.pages, self.table_positions = heads, kv_heads, head_dim, 37, 500
        angles = torch.rand(self.table_positions, head_dim // 2, generator=generator, device="cuda") * 7
        self.cosines, self.sines = guarded(angles.cos()), guarded(angles.sin())
        self.before = normal(generator, count, (heads + 2 * kv_heads) * head_dim)
        self.qkv = guarded(self.before)
        shape = (self.pages, kv_heads, PAGE, head_dim)
        self.keys, self.values = poisoned(*shape), poisoned(*shape)
        self.positions = ints(torch.randint(0, self.table_positions, (count,), generator=generator, device="cuda"))
        self.slots = ints(torch.randperm(self.pages * PAGE, generator=generator, device="cuda")[:count])

    def run(self, flags: int = 0) -> None:
        rows.rope_cache(
            self.positions.address,
            self.slots.address,
            self.cosines.address,
            self.sines.address,
            self.qkv.address,
            self.keys.address,
            self.values.address,
            rows=len(self.before),
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            pages=self.pages,
            table_positions=self.table_positions,
            stream=stream(),
            flags=flags,
        )

    def reset(self) -> None:
        self.qkv.tensor.copy_(self.before)
        self.keys.poison()
        self.values.poison()

    def check(self) -> None:
        """Every row with a slot is rotated and stored; nothing else is written."""
        assert_intact(self.positions, self.slots, self.cosines, self.sines, self.qkv, self.keys, self.values)
        count, kv_heads = len(self.before), self.kv_heads
        heads = self.before.view(count, -1, self.head_dim)
        slots, positions = self.slots.tensor.long(), self.positions.tensor.long()
        live = (slots >= 0) & (slots < self.pages * PAGE) & (positions >= 0) & (positions < self.table_positions)
        expected = heads.double()
        turned = expected[live, :-kv_heads]
        low, high = turned.chunk(2, dim=-1)
        cos = self.cosines.tensor.double()[positions[live]][:, None]
        sin = self.sines.tensor.double()[positions[live]][:, None]
        expected[live, :-kv_heads] = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
        found = self.qkv.tensor.view_as(heads)
        # Where the two products nearly cancel, an error of fp32 in either is a large part of the difference.
        assert bool(((found.double() - expected).abs() <= 1.01 * BF16_STEP * expected.abs() + 1e-5).all())
        assert torch.equal(found[~live], heads[~live])
        assert torch.equal(found[:, -kv_heads:], heads[:, -kv_heads:])
        for pool, stored in ((self.keys, found[:, -2 * kv_heads : -kv_heads]), (self.values, found[:, -kv_heads:])):
            rest = pool.tensor.clone()
            page, offset = slots[live] // PAGE, slots[live] % PAGE
            assert torch.equal(rest[page, :, offset], stored[live])
            rest[page, :, offset] = float("nan")
            assert bool(rest.isnan().all())


@flags
@pytest.mark.parametrize("count", [1, 7, 130])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (32, 8, 64), (3, 1, 16), (2, 2, 80), (4, 1, 256)]
)
def test_heads_are_rotated_and_stored_at_their_slots_alone(
    generator: torch.Generator, heads: int, kv_heads: int, head_dim: int, count: int, flags: int
) -> None:
    rope = Rope(generator, heads, kv_heads, head_dim, count)
    rope.run(flags)
    rope.check()
    bits = (rope.qkv.bits, rope.keys.bits, rope.values.bits)
    rope.reset()
    rope.run(flags ^ PDL)
    assert (rope.qkv.bits, rope.keys.bits, rope.values.bits) == bits


def test_padding_and_rows_out_of_range_are_left_alone(generator: torch.Generator) -> None:
    rope = Rope(generator, 9, 3, 64, 12)
    rope.slots.tensor[:4] = torch.tensor([-1, rope.pages * PAGE, 2**31 - 1, -(2**31)])
    rope.positions.tensor[4:8] = torch.tensor([-1, rope.table_positions, 2**31 - 1, -(2**31)])
    rope.run()
    rope.check()


def test_a_replay_takes_the_slots_and_positions_of_its_time(generator: torch.Generator) -> None:
    rope = Rope(generator, 9, 3, 64, 12)
    graph = captured(lambda: rope.run(PDL))
    for live in (12, 5, 0):
        rope.reset()
        slots = torch.randperm(rope.pages * PAGE, generator=generator, device="cuda")[:12]
        slots[live:] = -1
        rope.slots.tensor.copy_(slots)
        rope.positions.tensor.copy_(torch.randint(0, 500, (12,), generator=generator, device="cuda"))
        graph.replay()
        rope.check()


# ---- swiglu


@flags
@pytest.mark.parametrize("count", [1, 7, 130])
@pytest.mark.parametrize("width", [8, 1536, 14336])
def test_swiglu_is_right_and_equals_torch(generator: torch.Generator, width: int, count: int, flags: int) -> None:
    gate_up, out = guarded(normal(generator, count, 2 * width, scale=4)), poisoned(count, width)
    gate_up.tensor[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.5])
    rows.swiglu(gate_up.address, out.address, rows=count, width=width, stream=stream(), flags=flags)
    assert_intact(gate_up, out)
    gate, up = gate_up.tensor.double().chunk(2, dim=-1)
    assert_close(out.tensor, torch.nn.functional.silu(gate) * up, roundings=2)
    gate, up = gate_up.tensor.chunk(2, dim=-1)
    assert float((out.tensor != torch.nn.functional.silu(gate) * up).float().mean()) < 0.001


# ---- a chain


def test_a_chain_of_overlapping_launches_equals_one_after_the_other(generator: torch.Generator) -> None:
    """Each kernel reads what the one before it wrote, over and over in the same buffers, in a graph."""
    width, count = 4096, 8
    first, weight = normal(generator, count, width), guarded(normal(generator, width))
    tokens = ints(torch.randperm(count, generator=generator, device="cuda"))
    x, out, wide = poisoned(count, width), poisoned(count, width), poisoned(count, 2 * width)

    def chain(flags: int) -> None:
        for _ in range(20):
            rows.rms_norm(
                x.address, weight.address, out.address, rows=count, width=width, eps=EPS, stream=stream(), flags=flags
            )
            rows.embed(
                tokens.address,
                out.address,
                wide.address,
                rows=count,
                width=width,
                vocabulary=count,
                stream=stream(),
                flags=flags,
            )
            rows.swiglu(wide.address, out.address, rows=count // 2, width=width, stream=stream(), flags=flags)
            rows.add_rms_norm(
                x.address,
                out.address,
                weight.address,
                out.address,
                rows=count,
                width=width,
                eps=EPS,
                stream=stream(),
                flags=flags,
            )

    def bits(run: Callable[[], object]) -> bytes:
        x.tensor.copy_(first)
        out.poison()
        wide.poison()
        run()
        assert_intact(x, out, wide)
        return x.bits + out.bits

    expected = bits(lambda: chain(0))
    assert not x.tensor.isnan().any()
    graph = captured(lambda: chain(PDL))
    for _ in range(20):
        assert bits(lambda: chain(PDL)) == expected
        assert bits(graph.replay) == expected
