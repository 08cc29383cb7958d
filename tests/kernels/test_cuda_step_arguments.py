"""tl_cuda_step_begin refuses bad arguments on the host, before any CUDA call. Addresses here point nowhere."""

from __future__ import annotations

import pytest

from trunkline_kernels.cuda.door import arguments, library_path
from trunkline_kernels.cuda.step import StepBegin, step_begin
from trunkline_kernels.door import KernelError

HERE = 1 << 20
POINTERS = ("columns", "picks", "columns_out", "tables", "tables_out")
COUNTS = {
    "rows": 3, "column_count": 4, "column_stride": 8, "picks_count": 5, "table_rows": 3, "width": 6, "table_stride": 6,
}  # fmt: skip
NOTHING = {"rows": 0, "table_rows": 0}

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the CUDA kernels are not built")


def run(flags: int = 0, **changes: int | None) -> None:
    step_begin(arguments(StepBegin, flags, **{**dict.fromkeys(POINTERS, HERE), **COUNTS, **changes}), 0)


def test_no_rows_and_no_tables_are_no_work() -> None:
    run(**NOTHING, **dict.fromkeys(POINTERS))


@pytest.mark.parametrize("pointer", POINTERS)
def test_pointers_are_there_and_aligned(pointer: str) -> None:
    with pytest.raises(KernelError, match="NULL"):
        run(**{pointer: None})
    with pytest.raises(KernelError, match="aligned"):
        run(**{pointer: HERE + 2})


@pytest.mark.parametrize("count", COUNTS)
def test_counts_are_in_range(count: str) -> None:
    for value in (-1, 1 << 31):
        with pytest.raises(KernelError, match=r"out of range|fit"):
            run(**{count: value})


@pytest.mark.parametrize("change", [{"column_stride": 2}, {"table_stride": 5}])
def test_strides_hold_what_is_copied(change: dict[str, int]) -> None:
    with pytest.raises(KernelError, match="fit"):
        run(**change)


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(KernelError, match="flag"):
        run(flags=8, **NOTHING)
