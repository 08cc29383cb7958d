"""Products with a weight. See `kernels/include/tl_cuda.h`.

Without a plan up to SKINNY_ROWS rows; with a `Plan` (cuBLASLt) any number up to the plan's.
"""

from __future__ import annotations

from ctypes import POINTER, byref, c_int64, c_void_p

from trunkline_kernels.cuda.door import Address, Args, arguments, call, check, function

FP32_OUT = 2  # flag of `linear` and of plans: out is fp32
BIAS = 4  # flag of plans: calls come with a bias
SKINNY_ROWS = 16
WORKSPACE_BYTES = 32 << 20  # what cuBLASLt can make use of on Hopper


class PlanArgs(Args):
    """`tl_cuda_linear_plan_args`."""

    _fields_ = (
        ("rows", c_int64),
        ("columns", c_int64),
        ("inner", c_int64),
        ("workspace_bytes", c_int64),
    )


class LinearArgs(Args):
    """`tl_cuda_linear_args`."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("plan", c_void_p),
        ("workspace", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("inner", c_int64),
    )


class Plan:
    """Shape and algorithm of a product of up to `rows` rows; one call at a time. Made outside of captures.

    `flags`: FP32_OUT or BIAS, as the calls will have them. Raises KernelError if cuBLASLt has nothing for the shape.
    """

    def __init__(
        self, rows: int, columns: int, inner: int, *, flags: int = 0, workspace_bytes: int = WORKSPACE_BYTES
    ) -> None:
        args = arguments(PlanArgs, flags, rows=rows, columns=columns, inner=inner, workspace_bytes=workspace_bytes)
        self._destroy = function("tl_cuda_linear_plan_destroy", c_void_p)
        self._destroy.restype = None
        create = function("tl_cuda_linear_plan_create", c_void_p, POINTER(c_void_p))
        handle = c_void_p()
        check("tl_cuda_linear_plan_create", create(byref(args), byref(handle)))
        self.handle = handle.value
        self.rows, self.columns, self.inner, self.workspace_bytes = rows, columns, inner, workspace_bytes

    def __del__(self) -> None:
        handle = getattr(self, "handle", None)  # absent when __init__ failed
        if handle is not None:
            self._destroy(handle)


def linear(
    x: Address,
    weight: Address,
    bias: Address | None,
    out: Address,
    *,
    rows: int,
    columns: int,
    inner: int,
    stream: int,
    flags: int = 0,
    plan: Plan | None = None,
    workspace: Address | None = None,
) -> None:
    """out[rows, columns] = x[rows, inner] · weight[columns, inner]ᵀ + bias, in bf16, or fp32 with FP32_OUT.

    `workspace` goes with a plan: its `workspace_bytes` on the device, aligned to 256. Raises KernelError if refused.
    """
    args = arguments(
        LinearArgs,
        flags,
        x=x,
        weight=weight,
        bias=bias,
        out=out,
        plan=None if plan is None else plan.handle,
        workspace=workspace,
        rows=rows,
        columns=columns,
        inner=inner,
    )
    call("tl_cuda_linear", args, stream)
