"""tl_embed copies rows, and only rows that exist."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.guarded import guarded, ints, poisoned, untouched
from trunkline_kernels.door import Context, KernelError

Normal = Callable[..., np.ndarray]


@pytest.mark.parametrize("width", [1, 7, 111, 500])
def test_rows_of_the_table_are_copied_bit_for_bit(context: Context, normal: Normal, width: int) -> None:
    table, tokens, out = guarded(normal(10, width)), ints([9, 0, 3, 3]), poisoned(4, width)
    with untouched(table):
        context.embed(tokens.ctypes.data, table.address, out.address, 4, width, 10)
    assert out.intact
    assert out.array.tobytes() == table.array[tokens].tobytes()


@pytest.mark.parametrize("token", [-1, 10, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused_before_anything_is_written(
    context: Context, normal: Normal, token: int
) -> None:
    table, out = guarded(normal(10, 4)), poisoned(3, 4)
    with untouched(out), pytest.raises(KernelError, match="out of range"):
        context.embed(ints([1, 2, token]).ctypes.data, table.address, out.address, 3, 4, 10)


def test_no_tokens_is_no_work(context: Context) -> None:
    context.embed(0, 0, 0, 0, 4, 10)
