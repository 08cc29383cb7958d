"""tl_rms_norm and tl_add_rms_norm against fp64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.guarded import guarded, poisoned, untouched
from trunkline_kernels.door import Context, KernelError

Normal = Callable[..., np.ndarray]
EPS = 1e-5
WIDTHS = [1, 7, 16, 111, 500, 576, 3584]


def exact_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight


def norm(context: Context, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    source, scale, out = guarded(x), guarded(weight), poisoned(*x.shape)
    with untouched(source, scale):
        context.rms_norm(source.address, scale.address, out.address, *x.shape, EPS)
    assert out.intact
    return out.array


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_the_norm_is_right_to_fp32(context: Context, normal: Normal, rows: int, width: int) -> None:
    x, weight = 30 * normal(rows, width), normal(width)
    assert np.allclose(norm(context, x, weight), exact_norm(x, weight), rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("width", WIDTHS)
def test_adding_first_updates_the_residual_and_equals_adding_apart(
    context: Context, normal: Normal, width: int
) -> None:
    x, delta, weight = normal(19, width), normal(19, width), normal(width)
    residual, addend, scale, out = guarded(x), guarded(delta), guarded(weight), poisoned(19, width)
    with untouched(addend, scale):
        context.add_rms_norm(residual.address, addend.address, scale.address, out.address, 19, width, EPS)
    assert residual.intact
    assert out.intact
    assert residual.array.tobytes() == (x + delta).tobytes()
    assert out.array.tobytes() == norm(context, x + delta, weight).tobytes()


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_the_same_bits_alone(context: Context, single: Context, normal: Normal, width: int) -> None:
    x, weight = normal(40, width), normal(width)
    whole = norm(context, x, weight)
    for row in (0, 15, 16, 39):
        assert norm(single, x[row : row + 1], weight).tobytes() == whole[row].tobytes()


def test_huge_and_zero_rows_stay_finite(context: Context) -> None:
    x = np.stack([np.full(100, 1e15, np.float32), np.zeros(100, np.float32)])
    found = norm(context, x, np.ones(100, np.float32))
    assert np.allclose(found[0], 1.0)
    assert (found[1] == 0).all()


def test_bad_arguments_are_refused(context: Context, normal: Normal) -> None:
    x, weight, out = guarded(normal(2, 8)), guarded(normal(8)), poisoned(2, 8)
    context.rms_norm(0, 0, 0, 0, 8, EPS)  # no rows is no work
    for arguments, problem in [
        ((0, weight.address, out.address, 2, 8), "NULL"),
        ((x.address, weight.address + 1, out.address, 2, 8), "aligned"),
        ((x.address, weight.address, out.address, -2, 8), "count"),
        ((x.address, weight.address, out.address, 2, 0), "count"),
    ]:
        with untouched(x, weight, out), pytest.raises(KernelError, match=problem):
            context.rms_norm(*arguments, EPS)
    with untouched(x, out), pytest.raises(KernelError, match="NULL"):
        context.add_rms_norm(x.address, 0, weight.address, out.address, 2, 8, EPS)
