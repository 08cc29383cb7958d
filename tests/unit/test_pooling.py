"""Pooling: the same bits however the input was cut, and rows that come twice count once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.engine.messages import Encode, pack_tokens
from workers.engine.pooling import add_rows, embedding
from workers.engine.sequence import Sequence, encoding

ROWS = torch.randn(50, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None]


def fresh() -> Sequence:
    return encoding(Encode(1, [pack_tokens(range(50))]), 1, 0.0).sequences[0]


def pooled(*chunks: tuple[int, int]) -> Sequence:
    sequence = fresh()
    for start, end in chunks:
        add_rows(sequence, start, ROWS[start:end])
    return sequence


@pytest.mark.parametrize(
    "chunks",
    [[(0, 7), (7, 50)], [(n, n + 1) for n in range(50)], [(0, 30), (16, 40), (32, 40), (32, 50)], [(0, 49), (16, 50)]],
)
def test_the_sum_does_not_depend_on_the_chunks_nor_on_rows_that_come_again(chunks: list[tuple[int, int]]) -> None:
    whole, cut = pooled((0, 50)), pooled(*chunks)
    assert whole.pooled_sum is not None
    assert cut.pooled_sum is not None
    assert cut.pooled == 50
    assert cut.pooled_sum.tobytes() == whole.pooled_sum.tobytes()


def test_an_embedding_is_the_mean_and_of_length_one_if_asked() -> None:
    mean = embedding(pooled((0, 50)), normalize=False)
    assert mean.dtype == np.float32
    assert mean == pytest.approx(ROWS.double().mean(0).numpy(), rel=1e-6)
    unit = embedding(pooled((0, 50)), normalize=True)
    assert np.linalg.norm(unit) == pytest.approx(1.0)
    assert unit == pytest.approx(mean / np.linalg.norm(mean), rel=1e-6)


def test_a_mean_of_zero_stays_zero() -> None:
    sequence = fresh()
    add_rows(sequence, 0, torch.zeros(50, 4))
    assert embedding(sequence, normalize=True).tolist() == [0.0] * 4
