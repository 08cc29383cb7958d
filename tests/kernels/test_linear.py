"""tl_linear against fp64, and the promise that rows never see one another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.guarded import Guarded, guarded, poisoned, untouched
from trunkline_kernels.door import Context, KernelError

Normal = Callable[..., np.ndarray]
SHAPES = [(1, 1, 1), (1, 7, 16), (2, 111, 17), (7, 576, 500), (12, 64, 32), (13, 64, 48), (25, 111, 111), (111, 33, 40)]


def pack(context: Context, *weights: np.ndarray) -> Guarded:
    """Weights [N_i, K] side by side in one packed weight."""
    columns, inner = sum(len(weight) for weight in weights), weights[0].shape[1]
    packed = poisoned(context.packed_size(columns, inner))
    packed.array[...] = 0
    first = 0
    for weight in weights:
        source = guarded(weight)
        with untouched(source):
            context.linear_pack(source.address, packed.address, len(weight), inner, first, columns)
        first += len(weight)
    assert packed.intact
    return packed


def linear(context: Context, x: np.ndarray, packed: Guarded, columns: int, bias: Guarded | None = None) -> np.ndarray:
    source, out = guarded(x), poisoned(len(x), columns)
    with untouched(source, packed):
        context.linear(
            source.address, packed.address, bias.address if bias else 0, out.address, len(x), x.shape[1], columns
        )
    assert out.intact
    return out.array


@pytest.mark.parametrize(("rows", "inner", "columns"), [*SHAPES, (3, 3584, 500), (2, 500, 3584)])
def test_products_are_right_to_fp32_and_fill_exactly_their_output(
    context: Context, normal: Normal, rows: int, inner: int, columns: int
) -> None:
    x, weight, bias = normal(rows, inner), normal(columns, inner), normal(columns)
    found = linear(context, x, pack(context, weight), columns, guarded(bias))
    exact = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    bound = np.abs(x).astype(np.float64) @ np.abs(weight).T + np.abs(bias)
    assert (np.abs(found - exact) <= 4e-7 * bound).all()


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_a_row_has_the_same_bits_alone_in_any_company_and_on_any_number_of_threads(
    context: Context, single: Context, normal: Normal, rng: np.random.Generator, rows: int, inner: int, columns: int
) -> None:
    x, packed = normal(rows, inner), pack(context, normal(columns, inner))
    whole = linear(context, x, packed, columns)
    for row in range(rows):
        assert linear(single, x[row : row + 1], packed, columns).tobytes() == whole[row].tobytes()
    some = rng.permutation(rows)[: rows // 2 + 1]
    assert linear(context, x[some], packed, columns).tobytes() == whole[some].tobytes()


def test_weights_packed_side_by_side_equal_weights_packed_alone(context: Context, normal: Normal) -> None:
    parts, x = [normal(columns, 45) for columns in (5, 16, 40, 3, 33)], normal(9, 45)
    together = linear(context, x, pack(context, *parts), sum(map(len, parts)))
    apart = [linear(context, x, pack(context, part), len(part)) for part in parts]
    assert together.tobytes() == np.concatenate(apart, axis=1).tobytes()


def test_packing_leaves_other_columns_alone(context: Context, normal: Normal) -> None:
    weight, packed = guarded(normal(10, 20)), poisoned(context.packed_size(37, 20))
    context.linear_pack(weight.address, packed.address, 10, 20, 11, 37)
    panels = packed.array.reshape(3, 20, 16)  # [panel, inner, column]
    columns = panels.transpose(0, 2, 1).reshape(48, 20)
    assert np.array_equal(columns[11:21], weight.array)
    assert np.isnan(np.delete(columns, range(11, 21), axis=0)).all()


def test_no_rows_is_no_work(context: Context, normal: Normal) -> None:
    packed = pack(context, normal(4, 4))
    context.linear(0, packed.address, 0, 0, 0, 4, 4)


def test_twenty_runs_on_two_threads_have_the_same_bits(context: Context, normal: Normal) -> None:
    x, packed = normal(31, 200), pack(context, normal(300, 200))
    assert len({linear(context, x, packed, 300).tobytes() for _ in range(20)}) == 1


def test_bad_arguments_are_refused_and_nothing_is_written(context: Context, normal: Normal) -> None:
    x, packed, out = guarded(normal(2, 8)), pack(context, normal(16, 8)), poisoned(2, 16)
    good = (x.address, packed.address, 0, out.address, 2, 8, 16)
    for index, wrong, problem in [
        (0, 0, "NULL"),
        (1, 0, "NULL"),
        (3, 0, "NULL"),
        (0, x.address + 2, "aligned"),
        (1, packed.address + 4, "aligned"),
        (3, out.address + 1, "aligned"),
        (4, -1, "count"),
        (5, 0, "count"),
        (6, 1 << 31, "count"),
    ]:
        arguments = [*good[:index], wrong, *good[index + 1 :]]
        with untouched(x, packed, out), pytest.raises(KernelError, match=problem):
            context.linear(*arguments)
    with untouched(packed), pytest.raises(KernelError, match="fit"):
        context.linear_pack(x.address, packed.address, 2, 8, 15, 16)
    with pytest.raises(KernelError, match="out of range"):
        context.packed_size(0, 8)
