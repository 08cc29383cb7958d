"""Operators on rows: embed, norms, rotary positions with the cache write, SwiGLU. See `kernels/include/tl_cuda.h`.

Matrices are bf16 [rows, width], row-major, aligned to 16 bytes. Every call raises KernelError if it is refused.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p

from trunkline_kernels.cuda.door import Address, Args, arguments, call


class EmbedArgs(Args):
    """`tl_cuda_embed_args`."""

    _fields_ = (
        ("tokens", c_void_p),
        ("table", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("vocabulary", c_int64),
    )


class RmsNormArgs(Args):
    """`tl_cuda_rms_norm_args`."""

    _fields_ = (
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("eps", c_float),
    )


class AddRmsNormArgs(Args):
    """`tl_cuda_add_rms_norm_args`."""

    _fields_ = (
        ("x", c_void_p),
        ("delta", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
        ("eps", c_float),
    )


class RopeCacheArgs(Args):
    """`tl_cuda_rope_cache_args`."""

    _fields_ = (
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("qkv", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("rows", c_int64),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("pages", c_int32),
        ("table_positions", c_int32),
    )


class SwigluArgs(Args):
    """`tl_cuda_swiglu_args`."""

    _fields_ = (
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("rows", c_int64),
        ("width", c_int64),
    )


def embed(
    tokens: Address,
    table: Address,
    out: Address,
    *,
    rows: int,
    width: int,
    vocabulary: int,
    stream: int,
    flags: int = 0,
) -> None:
    """out = table[tokens], zero where a token is outside [0, vocabulary). `tokens` are int32 [rows].

    With row numbers for tokens, it gathers rows of any matrix.
    """
    args = arguments(
        EmbedArgs, flags, tokens=tokens, table=table, out=out, rows=rows, width=width, vocabulary=vocabulary
    )
    call("tl_cuda_embed", args, stream)


def rms_norm(
    x: Address, weight: Address, out: Address, *, rows: int, width: int, eps: float, stream: int, flags: int = 0
) -> None:
    """Root-mean-square norm of rows; `out` may be `x`."""
    args = arguments(RmsNormArgs, flags, x=x, weight=weight, out=out, rows=rows, width=width, eps=eps)
    call("tl_cuda_rms_norm", args, stream)


def add_rms_norm(
    x: Address,
    delta: Address,
    weight: Address,
    out: Address,
    *,
    rows: int,
    width: int,
    eps: float,
    stream: int,
    flags: int = 0,
) -> None:
    """x += delta in place, rounded to bf16; then the norm of the sum. `out` may be `delta`."""
    args = arguments(AddRmsNormArgs, flags, x=x, delta=delta, weight=weight, out=out, rows=rows, width=width, eps=eps)
    call("tl_cuda_add_rms_norm", args, stream)


def rope_cache(
    positions: Address,
    slots: Address,
    cosines: Address,
    sines: Address,
    qkv: Address,
    keys: Address,
    values: Address,
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    pages: int,
    table_positions: int,
    stream: int,
    flags: int = 0,
) -> None:
    """Rotate q and k of `qkv` [rows, (heads + 2 · kv_heads) · head_dim] in place; write k and v into the pools.

    `cosines` and `sines` are fp32 [table_positions, head_dim / 2]; pools are [pages, kv_heads, 16, head_dim].
    A row whose slot is -1 is left as it is.
    """
    args = arguments(
        RopeCacheArgs,
        flags,
        positions=positions,
        slots=slots,
        cosines=cosines,
        sines=sines,
        qkv=qkv,
        keys=keys,
        values=values,
        rows=rows,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        pages=pages,
        table_positions=table_positions,
    )
    call("tl_cuda_rope_cache", args, stream)


def swiglu(gate_up: Address, out: Address, *, rows: int, width: int, stream: int, flags: int = 0) -> None:
    """silu(gate) · up of `gate_up` [rows, 2 · width] → [rows, width]."""
    call("tl_cuda_swiglu", arguments(SwigluArgs, flags, gate_up=gate_up, out=out, rows=rows, width=width), stream)
