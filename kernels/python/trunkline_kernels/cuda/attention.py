"""Causal attention over a paged cache, for steps that decode and for any others. See `tl_cuda_attention.h`.

The one rule: an argument struct is made once for a layer's pools and buffers, and may be used again and again.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p

from trunkline_kernels.cuda.door import Args, call


class AttentionDecodeArgs(Args):
    """`tl_cuda_attention_decode_args`: one query token per span."""

    _fields_ = (
        ("q", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("spans", c_int32),
        ("table_width", c_int32),
        ("pages", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("splits", c_int32),
        ("stages", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


class AttentionPrefillArgs(Args):
    """`tl_cuda_attention_prefill_args`: any number of query tokens per span."""

    _fields_ = (
        ("q", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("rows", c_int32),
        ("spans", c_int32),
        ("table_width", c_int32),
        ("pages", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
    )


def attention_decode(args: AttentionDecodeArgs, stream: int) -> None:
    """out [spans, heads, head_dim] of one query token per span; raises KernelError."""
    call("tl_cuda_attention_decode", args, stream)


def attention_prefill(args: AttentionPrefillArgs, stream: int) -> None:
    """out [rows, heads, head_dim] of spans of query tokens; raises KernelError."""
    call("tl_cuda_attention_prefill", args, stream)
