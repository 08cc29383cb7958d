"""Attention against fp64, on shuffled pages, with NaN in every slot that must not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.gpu.buffers import Buffer, assert_intact, captured, guarded, ints, poisoned, stream
from trunkline_kernels.cuda.attention import (
    AttentionDecodeArgs,
    AttentionPrefillArgs,
    attention_decode,
    attention_prefill,
)
from trunkline_kernels.cuda.door import PDL, arguments

PAGE = 16
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 128, 129, 1000]
HEADS = [(1, 1), (4, 2), (9, 3), (8, 2), (5, 1), (7, 1), (8, 1), (12, 1), (32, 8)]  # of queries, of keys
DIMS = pytest.mark.parametrize("dim", [64, 128])
FLAGS = pytest.mark.parametrize("flags", [0, PDL], ids=["plain", "pdl"])
UNUSED = -7  # a page id that must not be looked at


@dataclass(frozen=True)
class Span:
    """`queries` last tokens of a sequence of `context` tokens."""

    queries: int
    context: int


@dataclass
class World:
    """Sequences in a paged cache. `keys[s]` and `values[s]` are [context, kv_heads, dim] of sequence s."""

    spans: Sequence[Span]
    heads: int
    kv_heads: int
    dim: int
    generator: torch.Generator
    window: int = 0
    softcap: float = 0.0
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.keys, self.values = ([self.normal(span.context, self.kv_heads) for span in self.spans] for _ in range(2))
        counts = [-(-span.context // PAGE) for span in self.spans]
        self.pages = sum(counts) + 3
        order = torch.randperm(self.pages, generator=self.generator, device="cuda")
        self.page_ids = list(torch.split(order[: sum(counts)], counts))
        self.width = max([1, *counts]) + 1
        table = torch.full((len(self.spans), self.width), UNUSED)
        for row, ids in zip(table, self.page_ids, strict=True):
            row[: len(ids)] = ids.cpu()
        starts = torch.tensor([0, *(span.queries for span in self.spans)]).cumsum(0)
        self.rows = int(starts[-1])
        self.table, self.starts = ints(table), ints(starts)
        self.lengths = ints([span.context for span in self.spans])
        self.key_pool, self.value_pool = (poisoned(self.pages, self.kv_heads, PAGE, self.dim) for _ in range(2))
        for span in range(len(self.spans)):
            self.write(span)
        # As in a row of q, k and v together: what follows the queries is not theirs.
        self.q = poisoned(self.rows, (self.heads + 2 * self.kv_heads) * self.dim)
        self.q.tensor[:, : self.heads * self.dim] = self.normal(self.rows, self.heads).flatten(1)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn((*shape, self.dim), generator=self.generator, device="cuda").bfloat16()

    def write(self, span: int) -> None:
        """Into the pools, from the first key that any query of the span sees."""
        context, queries = self.spans[span].context, self.spans[span].queries
        first = max(0, context - queries + 1 - self.window) if self.window else 0
        at = torch.arange(first, context, device="cuda")
        place = self.page_ids[span][at // PAGE], slice(None), at % PAGE
        self.key_pool.tensor[place] = self.keys[span][first:]
        self.value_pool.tensor[place] = self.values[span][first:]

    def common(self) -> dict[str, Any]:
        return {
            "q": self.q.address, "keys": self.key_pool.address, "values": self.value_pool.address,
            "context_lens": self.lengths.address, "block_tables": self.table.address,
            "q_stride": self.q.tensor.shape[1], "spans": len(self.spans), "table_width": self.width,
            "pages": self.pages, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.dim,
            "window": self.window, "scale": self.dim**-0.5, "softcap": self.softcap,
        }  # fmt: skip

    def out(self) -> Buffer:
        return poisoned(self.rows, self.heads, self.dim)

    def decode(self, out: Buffer, splits: int = 2, stages: int = 2, flags: int = 0) -> Callable[[], None]:
        args = arguments(
            AttentionDecodeArgs, flags, out=out.address, splits=splits, stages=stages, **self.common()
        )  # fmt: skip
        return lambda: attention_decode(args, stream())

    def prefill(self, out: Buffer, flags: int = 0) -> Callable[[], None]:
        args = arguments(
            AttentionPrefillArgs, flags, out=out.address, query_starts=self.starts.address, rows=self.rows,
            **self.common(),
        )  # fmt: skip
        return lambda: attention_prefill(args, stream())

    def run(self, call: Callable[..., Callable[[], None]], **options: int) -> torch.Tensor:
        """The outputs of a call, [rows, heads, dim]; nothing else was written."""
        buffers = (self.q, self.key_pool, self.value_pool, self.table, self.starts, self.lengths)
        before = [buffer.bits for buffer in buffers]
        out = self.out()
        call(out, **options)()
        assert_intact(out, *buffers)
        assert [buffer.bits for buffer in buffers] == before
        return out.tensor

    def exact(self) -> torch.Tensor:
        """fp64."""
        queries = self.q.tensor[:, : self.heads * self.dim].double().view(self.rows, self.heads, self.dim)
        parts = torch.split(queries, [span.queries for span in self.spans])
        return torch.cat([self._exact(index, part) for index, part in enumerate(parts)])

    def _exact(self, index: int, queries: torch.Tensor) -> torch.Tensor:
        span, group = self.spans[index], self.heads // self.kv_heads
        keys, values = (x.double().repeat_interleave(group, 1) for x in (self.keys[index], self.values[index]))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.dim**-0.5
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        key = torch.arange(span.context, device="cuda")
        position = torch.arange(span.context - span.queries, span.context, device="cuda")[:, None]
        unseen = (key > position) | (key <= position - self.window if self.window else torch.zeros_like(key).bool())
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, values)


def assert_close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Weights and outputs are rounded to bf16, 2^-9 of their size each; no NaN."""
    torch.testing.assert_close(found.double(), exact, rtol=1.6e-2, atol=4e-3)


def singles(*contexts: int) -> list[Span]:
    return [Span(1, context) for context in contexts]


# ---- decode


@DIMS
@FLAGS
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_single_tokens_of_awkward_contexts_are_right(
    generator: torch.Generator, heads: int, kv_heads: int, dim: int, splits: int, flags: int
) -> None:
    world = World(singles(*LENGTHS), heads, kv_heads, dim, generator)
    assert_close(world.run(world.decode, splits=splits, flags=flags), world.exact())


@DIMS
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_long_contexts_go_many_times_round_the_ring(generator: torch.Generator, dim: int, stages: int) -> None:
    world = World(singles(4096, 32768, 5, 20001), 8, 2, dim, generator)
    for splits in (1, 8):
        assert_close(world.run(world.decode, splits=splits, stages=stages), world.exact())


@DIMS
def test_many_sequences_fill_the_device_more_than_once(generator: torch.Generator, dim: int) -> None:
    contexts = torch.randint(0, 700, (256,), generator=generator, device="cuda").tolist()
    world = World(singles(*contexts), 32, 8, dim, generator)
    assert_close(world.run(world.decode, splits=2, stages=3), world.exact())


def test_an_empty_row_is_zero(generator: torch.Generator) -> None:
    world = World(singles(0, 70, 0), 8, 2, 128, generator)
    found = world.run(world.decode, splits=4)
    assert not found[0].any()
    assert not found[2].any()
    assert_close(found, world.exact())


@pytest.mark.parametrize("splits", [1, 8])
def test_a_row_has_the_same_bits_whoever_is_beside_it(generator: torch.Generator, splits: int) -> None:
    world = World(singles(1000, 3, 640, 64), 8, 2, 128, generator)
    before = world.run(world.decode, splits=splits)
    world.lengths.tensor[1:].copy_(torch.tensor([40, 0, 63]))  # sequence 1 runs into pages that are not its own
    assert torch.equal(world.run(world.decode, splits=splits)[0], before[0])


# ---- prefill


@DIMS
@FLAGS
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_whole_prompts_of_awkward_lengths_are_right(
    generator: torch.Generator, heads: int, kv_heads: int, dim: int, flags: int
) -> None:
    world = World([Span(length, length) for length in LENGTHS], heads, kv_heads, dim, generator)
    assert_close(world.run(world.prefill, flags=flags), world.exact())


@DIMS
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (32, 8)])
def test_chunks_behind_a_prefix_and_single_tokens_mix(
    generator: torch.Generator, heads: int, kv_heads: int, dim: int
) -> None:
    spans = [Span(1, 700), Span(33, 100), Span(0, 40), Span(512, 2000), Span(1, 1), Span(64, 64), *singles(*LENGTHS)]
    world = World(spans + [Span(1, 20)] * 40, heads, kv_heads, dim, generator)
    assert_close(world.run(world.prefill), world.exact())


@DIMS
def test_a_long_prompt_is_right(generator: torch.Generator, dim: int) -> None:
    world = World([Span(2500, 9000)], 4, 1, dim, generator)
    assert_close(world.run(world.prefill), world.exact())


@DIMS
@pytest.mark.parametrize("window", [0, 50])
def test_a_query_has_the_same_bits_however_its_prompt_is_cut(generator: torch.Generator, dim: int, window: int) -> None:
    world = World([Span(150, 150)], 8, 2, dim, generator, window)
    whole = world.run(world.prefill)
    for first, last in [(0, 1), (1, 64), (64, 150), (17, 18), (149, 150)]:
        world.spans = [Span(last - first, last)]
        world.rows = last - first
        world.lengths, world.starts = ints([last]), ints([0, last - first])
        every_row, world.q = world.q, guarded(world.q.tensor[first:last])
        assert torch.equal(world.run(world.prefill), whole[first:last])
        world.q = every_row


def test_rows_of_no_span_are_not_written(generator: torch.Generator) -> None:
    world = World([Span(20, 30), Span(11, 11)], 4, 2, 64, generator)
    world.starts.tensor[2] = 25
    found = world.run(world.prefill)
    assert bool(found[25:].isnan().all())
    assert not bool(found[:25].isnan().any())


# ---- both


def calls(world: World) -> list[Callable[..., Callable[[], None]]]:
    single = all(span.queries == 1 for span in world.spans)
    return [world.decode, world.prefill] if single else [world.prefill]


@DIMS
@pytest.mark.parametrize(("window", "softcap"), [(1, 0.0), (33, 0.0), (64, 2.0), (500, 30.0), (0, 5.0)])
@pytest.mark.parametrize("queries", [1, 40])
def test_windows_and_caps(generator: torch.Generator, dim: int, window: int, softcap: float, queries: int) -> None:
    spans = [Span(min(queries, length), length) for length in LENGTHS]
    world = World(spans, 8, 2, dim, generator, window, softcap)
    for call in calls(world):
        assert_close(world.run(call), world.exact())


@pytest.mark.parametrize("queries", [1, 50])
def test_the_same_call_gives_the_same_bits_with_and_without_programmatic_launch(
    generator: torch.Generator, queries: int
) -> None:
    world = World([Span(min(queries, length), length) for length in LENGTHS], 32, 8, 128, generator)
    for call in calls(world):
        first = world.run(call)
        for repeat in range(20):
            assert torch.equal(world.run(call, flags=PDL * (repeat % 2)), first)


@pytest.mark.parametrize("page", [-1, 10**9, -(2**31), 2**31 - 1])
def test_a_page_outside_the_pools_reads_as_zeros(generator: torch.Generator, page: int) -> None:
    world = World(singles(100, 40), 4, 2, 64, generator)
    world.table.tensor[0, 2] = page
    world.keys[0][32:48], world.values[0][32:48] = 0, 0
    for call in calls(world):
        assert_close(world.run(call), world.exact())


@pytest.mark.parametrize("length", [-5, 10**9, 2**31 - 1])
def test_a_length_that_cannot_be_never_faults(generator: torch.Generator, length: int) -> None:
    world = World(singles(100, 40), 4, 2, 64, generator)
    world.lengths.tensor[0] = length
    for call in calls(world):
        assert_close(world.run(call)[1], world.exact()[1])


@pytest.mark.parametrize("flags", [0, PDL])
def test_a_replay_takes_the_lengths_and_pages_of_its_time(generator: torch.Generator, flags: int) -> None:
    world = World(singles(300, 300, 300), 8, 2, 128, generator)
    for call in calls(world):
        out = world.out()
        graph = captured(call(out, flags=flags))
        for contexts in ([300, 17, 0], [1, 64, 299], [65, 128, 300]):
            world.lengths.tensor.copy_(torch.tensor(contexts))
            out.poison()
            graph.replay()
            assert_intact(out)
            assert torch.equal(out.tensor, world.run(call, flags=flags))
