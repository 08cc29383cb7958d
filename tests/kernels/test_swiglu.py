"""tl_swiglu against fp64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.kernels.guarded import guarded, poisoned, untouched
from trunkline_kernels.door import Context, KernelError

Normal = Callable[..., np.ndarray]


def swiglu(context: Context, gate_up: np.ndarray) -> np.ndarray:
    rows, width = len(gate_up), gate_up.shape[1] // 2
    source, out = guarded(gate_up), poisoned(rows, width)
    with untouched(source):
        context.swiglu(source.address, out.address, rows, width)
    assert out.intact
    return out.array


def exact(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return gate * np.exp(-np.logaddexp(0, -gate)) * up


@pytest.mark.parametrize("width", [1, 7, 16, 111, 500, 1536, 3584, 4097])
@pytest.mark.parametrize("rows", [1, 7])
def test_the_activation_is_right_to_fp32(context: Context, normal: Normal, rows: int, width: int) -> None:
    gate_up = 5 * normal(rows, 2 * width)
    assert np.allclose(swiglu(context, gate_up), exact(gate_up), rtol=1e-6, atol=1e-30)


def test_every_gate_from_minus_to_plus_a_million_gives_what_it_should(context: Context) -> None:
    gate = np.concatenate([np.linspace(-100, 100, 4001), [-1e6, -1e4, 1e4, 1e6, 0.0, -0.0]]).astype(np.float32)
    found = swiglu(context, np.concatenate([gate, np.ones_like(gate)])[None])[0]
    assert np.allclose(found, exact(np.concatenate([gate, np.ones_like(gate)])[None])[0], rtol=1e-6, atol=1e-30)


def test_an_element_has_the_same_bits_wherever_it_stands(context: Context, single: Context, normal: Normal) -> None:
    gate, up = normal(1, 4500), normal(1, 4500)
    whole = swiglu(context, np.concatenate([gate, up], axis=1))[0]
    for start, stop in [(0, 1), (3, 20), (4090, 4500)]:
        part = swiglu(single, np.concatenate([gate[:, start:stop], up[:, start:stop]], axis=1))[0]
        assert part.tobytes() == whole[start:stop].tobytes()


def test_bad_arguments_are_refused(context: Context) -> None:
    out = poisoned(2, 4)
    context.swiglu(0, 0, 0, 4)  # no rows is no work
    for arguments, problem in [((0, out.address, 2, 4), "NULL"), ((out.address, out.address + 2, 2, 4), "aligned"),
                               ((out.address, out.address, 2, 0), "count")]:  # fmt: skip
        with untouched(out), pytest.raises(KernelError, match=problem):
            context.swiglu(*arguments)
