"""tl_cuda_attention_* refuse bad arguments before they call CUDA: no GPU is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trunkline_kernels.cuda.attention import (
    AttentionDecodeArgs,
    AttentionPrefillArgs,
    attention_decode,
    attention_prefill,
)
from trunkline_kernels.cuda.door import arguments, library
from trunkline_kernels.door import KernelError, KernelsMissing

ADDRESS = 1 << 20  # never looked at on the host
POINTERS = ("q", "keys", "values", "context_lens", "block_tables", "out")
GOOD: dict[str, Any] = {
    "q_stride": 1536, "spans": 3, "table_width": 4, "pages": 20, "heads": 8, "kv_heads": 2, "head_dim": 128,
    "scale": 0.1,
} | dict.fromkeys(POINTERS, ADDRESS)  # fmt: skip
DECODE = GOOD | {"splits": 2, "stages": 2}
PREFILL = GOOD | {"query_starts": ADDRESS, "rows": 9}


@pytest.fixture(autouse=True)
def _built() -> None:
    try:
        library()
    except KernelsMissing as missing:
        pytest.skip(str(missing))


def decode(**changed: Any) -> None:
    attention_decode(arguments(AttentionDecodeArgs, **DECODE | changed), 0)


def prefill(**changed: Any) -> None:
    attention_prefill(arguments(AttentionPrefillArgs, **PREFILL | changed), 0)


CALLS = pytest.mark.parametrize("call", [decode, prefill])


def refused(problem: str, call: Any, **changed: Any) -> None:
    with pytest.raises(KernelError, match=re.escape(problem)):
        call(**changed)


@CALLS
@pytest.mark.parametrize("name", POINTERS)
def test_an_array_that_is_needed_is_named_null(call: Any, name: str) -> None:
    refused("a pointer is NULL", call, **{name: 0})


def test_prefill_needs_the_bounds_of_its_spans() -> None:
    refused("a pointer is NULL", prefill, query_starts=0)


@CALLS
@pytest.mark.parametrize(("name", "offset"), [*((name, 8) for name in ("q", "keys", "values", "out")),
                                              ("context_lens", 2), ("block_tables", 1)])  # fmt: skip
def test_an_array_lies_where_its_elements_can_be_read(call: Any, name: str, offset: int) -> None:
    refused("not aligned", call, **{name: ADDRESS + offset})


@CALLS
@pytest.mark.parametrize(
    ("name", "value"),
    [("spans", -1), ("table_width", 0), ("pages", 0), ("pages", 2**26), ("heads", 0), ("kv_heads", 0), ("window", -1),
     ("q_stride", 0)],
)  # fmt: skip
def test_a_count_beyond_its_limits_is_refused(call: Any, name: str, value: int) -> None:
    refused("a count is out of range", call, **{name: value})


@pytest.mark.parametrize(("name", "value"), [("rows", -1), ("rows", 2**30)])
def test_prefill_counts_its_rows(name: str, value: int) -> None:
    refused("a count is out of range", prefill, **{name: value})


def test_decode_has_a_grid_for_so_many_spans() -> None:
    refused("a count is out of range", decode, spans=65536)


@CALLS
@pytest.mark.parametrize(
    "changed",
    [{"heads": 9}, {"head_dim": 96}, {"head_dim": 256, "q_stride": 4096}, {"q_stride": 1023}, {"q_stride": 1016},
     {"q_stride": 1028}],
)  # fmt: skip
def test_heads_and_rows_fit_one_another(call: Any, changed: dict[str, int]) -> None:
    refused("counts do not fit", call, **changed)


@pytest.mark.parametrize("changed", [{"splits": 0}, {"splits": 3}, {"splits": 16}, {"stages": 1}, {"stages": 5}])
def test_decode_shares_keys_out_as_clusters_can(changed: dict[str, int]) -> None:
    refused("counts do not fit", decode, **changed)


@CALLS
@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 0.0), ("scale", -1.0), ("scale", float("nan")), ("scale", float("inf")), ("softcap", -1.0),
     ("softcap", float("nan")), ("softcap", float("inf"))],
)  # fmt: skip
def test_a_factor_is_finite_and_not_negative(call: Any, name: str, value: float) -> None:
    refused("out of range", call, **{name: value})


@CALLS
@pytest.mark.parametrize(("name", "value"), [("size", 8), ("size", 0), ("flags", 2), ("flags", 2**31)])
def test_a_struct_of_another_version_is_refused(call: Any, name: str, value: int) -> None:
    kind, run = (AttentionDecodeArgs, attention_decode) if call is decode else (AttentionPrefillArgs, attention_prefill)
    args: Any = arguments(kind, **(DECODE if call is decode else PREFILL))
    setattr(args, name, value)
    with pytest.raises(KernelError, match="unknown size or flag"):
        run(args, 0)


def test_no_rows_are_no_work() -> None:
    decode(spans=0, **dict.fromkeys(POINTERS, 0))
    prefill(rows=0, query_starts=0, **dict.fromkeys(POINTERS, 0))
    prefill(spans=0, query_starts=0, **dict.fromkeys(POINTERS, 0))
