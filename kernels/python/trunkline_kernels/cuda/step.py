"""The start of a step: `tl_cuda_step.h`."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

from trunkline_kernels.cuda.door import Args, call


class StepBegin(Args):
    """`tl_cuda_step_begin_args`: addresses of int32 arrays in device memory, and their shapes; see the header."""

    _fields_ = (
        ("columns", c_void_p),
        ("picks", c_void_p),
        ("columns_out", c_void_p),
        ("tables", c_void_p),
        ("tables_out", c_void_p),
        ("rows", c_int64),
        ("column_count", c_int64),
        ("column_stride", c_int64),
        ("picks_count", c_int64),
        ("table_rows", c_int64),
        ("width", c_int64),
        ("table_stride", c_int64),
    )


def step_begin(args: StepBegin, stream: int) -> None:
    """Puts a step's upload where its kernels look for it, tokens that are not known here filled in from the picks."""
    call("tl_cuda_step_begin", args, stream)
