"""tl_cuda_step_begin: what was uploaded and what was drawn meet in the step's arrays."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.buffers import assert_intact, captured, ints, poisoned, stream
from trunkline_kernels.cuda.door import PDL, arguments
from trunkline_kernels.cuda.step import StepBegin, step_begin


@pytest.mark.parametrize("flags", [0, PDL])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 3), (128, 40), (300, 257)])
def test_columns_tables_and_pending_tokens_arrive(rows: int, width: int, flags: int) -> None:
    stride, table_stride = rows + 5, width + 3
    uploaded = torch.arange(4 * rows).view(4, rows)
    uploaded[0, ::2] = -1 - (torch.arange(len(uploaded[0, ::2])) % 4)  # picks 0, 1, 2, 3
    picks = [70, -1, 72]  # the second row had no finite scores; there is no fourth
    tables = torch.arange(rows * width).view(rows, width)
    sources = ints(uploaded), ints(picks), ints(tables)
    columns_out = poisoned(4, stride, dtype=torch.int32)
    tables_out = poisoned(rows, table_stride, dtype=torch.int32)
    args = arguments(
        StepBegin, flags, columns=sources[0].address, picks=sources[1].address, columns_out=columns_out.address,
        tables=sources[2].address, tables_out=tables_out.address, rows=rows, column_count=4, column_stride=stride,
        picks_count=len(picks), table_rows=rows, width=width, table_stride=table_stride,
    )  # fmt: skip
    step_begin(args, stream())
    assert_intact(*sources, columns_out, tables_out)
    expected = uploaded.clone()
    expected[0, ::2] = torch.tensor([70, 0, 72, 0]).repeat(rows)[: len(uploaded[0, ::2])]
    assert torch.equal(columns_out.tensor[:, :rows].cpu(), expected.int())
    assert bool((columns_out.tensor[:, rows:] == -1).all()), "written beyond the rows"
    assert torch.equal(tables_out.tensor[:, :width].cpu(), tables.int())
    assert bool((tables_out.tensor[:, width:] == -1).all()), "written beyond the width"


def test_a_replay_takes_the_picks_of_its_time() -> None:
    uploaded, picks, out = ints([-1, 5, -2]), ints([10, 11]), poisoned(3, dtype=torch.int32)
    args = arguments(
        StepBegin, PDL, columns=uploaded.address, picks=picks.address, columns_out=out.address, rows=3, column_count=1,
        column_stride=3, picks_count=2,
    )  # fmt: skip
    graph = captured(lambda: step_begin(args, stream()))
    for first in (20, 30):
        picks.tensor.copy_(torch.tensor([first, first + 1]))
        graph.replay()
        assert_intact(uploaded, picks, out)
        assert out.tensor.tolist() == [first, 5, first + 1]
