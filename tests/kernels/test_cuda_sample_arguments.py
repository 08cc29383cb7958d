"""tl_cuda_sample refuses bad arguments before it calls CUDA: no GPU is needed."""

from __future__ import annotations

import re

import pytest

from trunkline_kernels.cuda.door import library
from trunkline_kernels.cuda.sampling import sample
from trunkline_kernels.door import KernelError, KernelsMissing, SampleArgs, sample_struct

ADDRESS = 1 << 20  # never looked at on the host
GOOD = {
    "rows": 3, "vocabulary": 1001, "stride": 1004, "tops": 20, "bias_total": 7, "history_total": 2,
    "history_capacity": 9, "next_total": 3,
} | dict.fromkeys(
    ("logits", "params", "tokens", "next_tokens", "logprobs", "top_ids", "top_logprobs", "biases", "histories",
     "history_lengths"), ADDRESS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _built() -> None:
    try:
        library()
    except KernelsMissing as missing:
        pytest.skip(str(missing))


def refused(problem: str, args: SampleArgs) -> None:
    with pytest.raises(KernelError, match=re.escape(problem)):
        sample(args, 0)


@pytest.mark.parametrize("name", [name for name, value in GOOD.items() if value == ADDRESS])
def test_an_array_that_is_needed_is_named_null(name: str) -> None:
    refused("a pointer is NULL", sample_struct(**GOOD | {name: 0}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", -1), ("rows", 2**20 + 1), ("vocabulary", 0), ("vocabulary", 2**18 + 4), ("tops", 21), ("tops", -1),
     ("bias_total", -1), ("history_total", 2**40), ("history_capacity", -1), ("next_total", -1)],
)  # fmt: skip
def test_a_count_beyond_its_limits_is_refused(name: str, value: int) -> None:
    refused("a count is out of range", sample_struct(**GOOD | {"stride": 2**19} | {name: value}))


@pytest.mark.parametrize("stride", [1000, 1002])
def test_rows_hold_the_vocabulary_in_whole_vectors(stride: int) -> None:
    refused("counts do not fit", sample_struct(**GOOD | {"stride": stride}))


@pytest.mark.parametrize(("name", "offset"), [("logits", 4), ("params", 4), ("tokens", 2), ("top_ids", 1)])
def test_an_array_lies_where_its_elements_can_be_read(name: str, offset: int) -> None:
    refused("not aligned", sample_struct(**GOOD | {name: ADDRESS + offset}))


@pytest.mark.parametrize(("name", "value"), [("size", 8), ("size", 0), ("flags", 2), ("flags", 2**31)])
def test_another_version_is_refused(name: str, value: int) -> None:
    args = sample_struct(**GOOD)
    setattr(args, name, value)
    refused("unknown size or flag", args)


def test_no_rows_is_no_work() -> None:
    sample(sample_struct(rows=0, vocabulary=1001, stride=1004), 0)
