"""The CUDA calls refuse bad arguments on the host, before any CUDA call: no GPU is needed to see it.

Addresses here point nowhere. Nothing of this may be launched, so each case has exactly one fault.
"""

from __future__ import annotations

from ctypes import byref, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trunkline_kernels.cuda import linear, rows
from trunkline_kernels.cuda.door import Args, arguments, call, check, function, library, library_path, prepare
from trunkline_kernels.door import KernelError

HERE = 1 << 20  # an address aligned to anything


@dataclass(frozen=True)
class Call:
    """A call, arguments that it would take, and which of them it looks at how."""

    name: str
    kind: type[Args]
    good: dict[str, Any]
    vectors: tuple[str, ...]  # addresses aligned to 16 bytes
    words: tuple[str, ...] = ()  # addresses aligned to 4 bytes
    optional: tuple[str, ...] = ()  # addresses that may be NULL
    unfit: tuple[dict[str, int], ...] = ()  # counts that do not fit one another
    beyond: tuple[dict[str, int], ...] = ()  # counts past a limit

    def run(self, flags: int = 0, **changes: Any) -> None:
        fields = {**dict.fromkeys((*self.vectors, *self.words), HERE), **self.good, **changes}
        call(self.name, arguments(self.kind, flags, **fields), 0)


CALLS = [
    Call(
        "tl_cuda_embed",
        rows.EmbedArgs,
        {"rows": 3, "width": 64, "vocabulary": 100},
        vectors=("table", "out"),
        words=("tokens",),
        unfit=({"width": 60},),
        beyond=({"rows": 1 << 30},),
    ),
    Call(
        "tl_cuda_rms_norm",
        rows.RmsNormArgs,
        {"rows": 3, "width": 64, "eps": 1e-5},
        vectors=("x", "weight", "out"),
        unfit=({"width": 60},),
        beyond=({"width": 16392},),
    ),
    Call(
        "tl_cuda_add_rms_norm",
        rows.AddRmsNormArgs,
        {"rows": 3, "width": 64, "eps": 1e-5},
        vectors=("x", "delta", "weight", "out"),
        unfit=({"width": 60},),
        beyond=({"width": 16392},),
    ),
    Call(
        "tl_cuda_rope_cache",
        rows.RopeCacheArgs,
        {"rows": 3, "heads": 4, "kv_heads": 2, "head_dim": 64, "pages": 9, "table_positions": 100},
        vectors=("cosines", "sines", "qkv", "keys", "values"),
        words=("positions", "slots"),
        unfit=({"head_dim": 40},),
        beyond=({"head_dim": 272}, {"heads": 2000}, {"kv_heads": 2000}, {"rows": 1 << 30}),
    ),
    Call(
        "tl_cuda_swiglu",
        rows.SwigluArgs,
        {"rows": 3, "width": 64},
        vectors=("gate_up", "out"),
        unfit=({"width": 60},),
        beyond=({"rows": 1 << 30},),
    ),
    Call(
        "tl_cuda_linear",
        linear.LinearArgs,
        {"rows": 3, "columns": 48, "inner": 128},
        vectors=("x", "weight", "bias", "out"),
        optional=("bias",),
        unfit=({"columns": 40}, {"inner": 96}),
        beyond=({"rows": 17},),
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if not library_path().exists():
        pytest.skip("the CUDA kernels are not built: make kernels-cuda, where nvcc is")


@pytest.fixture(params=CALLS, ids=lambda each: each.name)
def each(request: pytest.FixtureRequest) -> Call:
    chosen: Call = request.param
    return chosen


def test_no_rows_is_no_work_and_the_structs_are_those_of_the_header(each: Call) -> None:
    each.run(rows=0, **dict.fromkeys((*each.vectors, *each.words)))


def test_a_null_pointer_is_refused(each: Call) -> None:
    for pointer in (*each.vectors, *each.words):
        if pointer not in each.optional:
            with pytest.raises(KernelError, match="NULL"):
                each.run(**{pointer: None})


def test_a_crooked_pointer_is_refused(each: Call) -> None:
    crooked = [(pointer, by) for pointer in each.vectors for by in (2, 4, 8)]
    crooked += [(pointer, by) for pointer in each.words for by in (1, 2)]
    for pointer, by in crooked:
        with pytest.raises(KernelError, match="aligned"):
            each.run(**{pointer: HERE + by})


def test_counts_out_of_range_are_refused(each: Call) -> None:
    counts = [name for name, value in each.good.items() if isinstance(value, int)]
    for name in counts:
        with pytest.raises(KernelError, match="out of range"):
            each.run(**{name: -1})
        if name != "rows":
            with pytest.raises(KernelError, match="out of range"):
                each.run(**{name: 0})
    for counts_beyond in each.beyond:
        with pytest.raises(KernelError, match="out of range"):
            each.run(**counts_beyond)


def test_counts_that_do_not_fit_are_refused(each: Call) -> None:
    for unfit in each.unfit:
        with pytest.raises(KernelError, match="fit"):
            each.run(**unfit)


def test_another_version_of_a_struct_is_refused(each: Call) -> None:
    for size, flags in ((sizeof(each.kind) - 8, 0), (sizeof(each.kind) + 8, 0), (sizeof(each.kind), 1 << 31)):
        with pytest.raises(KernelError, match="size or flag"):
            call(each.name, each.kind(size=size, flags=flags), 0)
    with pytest.raises(KernelError, match="NULL"):
        check(each.name, function(each.name, c_void_p, c_void_p)(None, None))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rows": 0}, "out of range"),
        ({"columns": 12}, "fit"),
        ({"inner": 12}, "fit"),
        ({"workspace_bytes": -1}, "out of range"),
        ({"flags": linear.BIAS | linear.FP32_OUT}, "fit"),
        ({"flags": 1 << 31}, "size or flag"),
    ],
)
def test_a_plan_of_nothing_is_refused(changes: dict[str, int], problem: str) -> None:
    with pytest.raises(KernelError, match=problem):
        linear.Plan(**{"rows": 32, "columns": 64, "inner": 64, **changes})


def test_a_plan_needs_somewhere_to_go() -> None:
    args = arguments(linear.PlanArgs, rows=32, columns=64, inner=64, workspace_bytes=0)
    with pytest.raises(KernelError, match="NULL"):
        check("create", library().tl_cuda_linear_plan_create(byref(args), None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_preparing_says_so() -> None:
    with pytest.raises(KernelError, match="no GPU"):
        prepare()
