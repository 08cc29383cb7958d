"""Bits do not depend on company, chunking, page placement or reuse: both numeric paths, a whole small model."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.checkpoints import small_artefact
from workers.engine.batch import BLOCK_SIZE, KVCache, RaggedBatch
from workers.models.loader import Model, load_model
from workers.weights.replay import single_sequence

PAGES = 64
LONGEST = 90


@functools.cache
def model(mode: str) -> Model:
    loaded = load_model(small_artefact(), kernel_mode=mode, threads=2)
    assert loaded.kernel_mode == mode
    return loaded


def alone(mode: str, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of every position, the whole sequence at once and by itself."""
    batch, kv = single_sequence(model(mode), tokens)
    return model(mode).logits(model(mode).forward(batch, kv))


@st.composite
def sequences(draw: st.DrawFn) -> list[list[int]]:
    seed = draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=5))
    return [torch.randint(272, (length,), generator=generator).tolist() for length in lengths]


class Schedule:
    """A cache with poisoned, shuffled pages, and steps that take a few tokens of each sequence."""

    def __init__(self, mode: str, tokens: Sequence[Sequence[int]], pages: Sequence[int]) -> None:
        config = model(mode).config
        self.mode, self.tokens = mode, tokens
        self.done = [0] * len(tokens)
        self.kv = KVCache.zeros(
            config.layers, PAGES, config.kv_heads, config.head_dim, torch.float32, torch.device("cpu")
        )
        self.kv.keys.fill_(torch.nan)
        self.kv.values.fill_(torch.nan)
        counts = [-(-len(each) // BLOCK_SIZE) for each in tokens]
        self.tables = [list(pages[sum(counts[:i]) : sum(counts[: i + 1])]) for i in range(len(counts))]

    def step(self, takes: Sequence[tuple[int, int]]) -> list[tuple[int, int, torch.Tensor]]:
        """Run (sequence, count) spans; answers (sequence, position, logits) of each row."""
        spans = [(index, self.done[index], self.done[index] + count) for index, count in takes]
        rows = [(index, position) for index, first, last in spans for position in range(first, last)]
        width = max(len(table) for table in self.tables)

        def ints(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        batch = RaggedBatch(
            tokens=ints([self.tokens[index][position] for index, position in rows]),
            positions=ints([position for _, position in rows]),
            slots=ints([self.tables[i][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in rows]),
            query_starts=ints([0, *torch.tensor([last - first for _, first, last in spans]).cumsum(0).tolist()]),
            context_lens=ints([last for _, _, last in spans]),
            block_tables=ints([self.tables[i] + [0] * (width - len(self.tables[i])) for i, _, _ in spans]),
            logit_rows=ints(range(len(rows))),
        )
        logits = model(self.mode).logits(model(self.mode).forward(batch, self.kv))
        for index, _, last in spans:
            self.done[index] = last
        return [(index, position, logits[row]) for row, (index, position) in enumerate(rows)]


@pytest.mark.timeout(300)  # torch's threads spin: beside a busy process a minute is not enough
@pytest.mark.parametrize("mode", ["fused", "standard"])
@settings(max_examples=25, deadline=None)
@given(tokens=sequences(), data=st.data())
def test_any_schedule_gives_each_token_the_bits_it_has_alone(
    mode: str, tokens: list[list[int]], data: st.DataObject
) -> None:
    reference = [alone(mode, each) for each in tokens]
    schedule = Schedule(mode, tokens, data.draw(st.permutations(range(PAGES))))
    while open_ := [index for index, done in enumerate(schedule.done) if done < len(tokens[index])]:
        chosen = data.draw(st.lists(st.sampled_from(open_), min_size=1, unique=True))
        takes = [(i, data.draw(st.sampled_from([1, 1, 2, 16, 17, LONGEST]))) for i in chosen]
        for index, position, logits in schedule.step(
            [(i, min(n, len(tokens[i]) - schedule.done[i])) for i, n in takes]
        ):
            assert torch.equal(logits, reference[index][position]), (index, position)


@pytest.mark.parametrize("mode", ["fused", "standard"])
def test_logits_of_some_rows_are_those_of_all_rows(mode: str) -> None:
    batch, kv = single_sequence(model(mode), list(range(50)))
    hidden = model(mode).forward(batch, kv)
    whole = model(mode).logits(hidden)
    for rows in ([49], [0, 7], list(range(17))):
        assert torch.equal(model(mode).logits(hidden[rows]), whole[rows])


@pytest.mark.parametrize("mode", ["fused", "standard"])
def test_an_empty_step_has_no_rows(mode: str) -> None:
    config, none = model(mode).config, torch.zeros(0, dtype=torch.int32)
    kv = KVCache.zeros(config.layers, 1, config.kv_heads, config.head_dim, torch.float32, torch.device("cpu"))
    batch = RaggedBatch(none, none, none, torch.zeros(1, dtype=torch.int32), none, none.reshape(0, 0), none)
    hidden = model(mode).forward(batch, kv)
    assert hidden.shape == (0, config.hidden_size)
    assert model(mode).logits(hidden).shape == (0, config.vocab_size)


def test_the_number_of_threads_does_not_show() -> None:
    batch, kv = single_sequence(model("fused"), list(range(80)))
    expected = model("fused").forward(batch, kv)
    for threads in (1, 3):
        other = load_model(small_artefact(), kernel_mode="fused", threads=threads)
        assert torch.equal(other.forward(batch, kv), expected)
