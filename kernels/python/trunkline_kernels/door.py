"""Opening the library and calling it with flat arguments.

The one rule: a status other than OK becomes a KernelError; no call fails quietly.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from pathlib import Path

from trunkline_kernels.build import build_key, library_path

ABI_VERSION = 1
PAGE_TOKENS = 16
Address = int


class KernelsMissing(ImportError):
    """The library is not built, or was built from other sources or for another machine."""


class KernelError(ValueError):
    """A call refused its arguments."""


class Batch(Structure):
    """`tl_batch`: one step. Addresses of int32 arrays; see the header for their shapes."""

    _fields_ = (
        ("size", c_uint32),
        ("spans", c_int32),
        ("rows", c_int32),
        ("table_width", c_int32),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
    )


class Heads(Structure):
    """`tl_heads`: heads and cache geometry."""

    _fields_ = (
        ("size", c_uint32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("pages", c_int32),
        ("positions", c_int32),
        ("scale", c_float),
    )


class SampleBias(Structure):
    """`tl_sample_bias`: what is added to the score of one id; -inf bans it."""

    _fields_ = (("token", c_int32), ("bias", c_float))


class SampleCount(Structure):
    """`tl_sample_count`: a distinct id of a sequence and how often it is in the output."""

    _fields_ = (("token", c_int32), ("count", c_int32))


class SampleRow(Structure):
    """`tl_sample_row`: how one row is sampled; see the header for each field."""

    _fields_ = (
        ("seed", c_uint64),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("presence_penalty", c_double),
        ("frequency_penalty", c_double),
        ("repetition_penalty", c_float),
        ("active", c_int32),
        ("top_k", c_int32),
        ("logprobs", c_int32),
        ("choice", c_int32),
        ("position", c_int32),
        ("bias_start", c_int32),
        ("bias_count", c_int32),
        ("history", c_int32),
        ("next", c_int32),
    )


class SampleArgs(Structure):
    """`tl_sample_args`: one call of sampling. Addresses of arrays; see the header for their shapes."""

    _fields_ = (
        ("size", c_uint32),
        ("flags", c_uint32),
        ("logits", c_void_p),
        ("params", c_void_p),
        ("biases", c_void_p),
        ("histories", c_void_p),
        ("history_lengths", c_void_p),
        ("tokens", c_void_p),
        ("next_tokens", c_void_p),
        ("logprobs", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("scores", c_void_p),
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("stride", c_int64),
        ("bias_total", c_int64),
        ("history_total", c_int64),
        ("history_capacity", c_int64),
        ("next_total", c_int64),
        ("tops", c_int64),
    )


_POINTER = c_void_p
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "tl_context_create": (c_int32, POINTER(c_void_p)),
    "tl_embed": (_POINTER, _POINTER, _POINTER, _POINTER, c_int64, c_int64, c_int64),
    "tl_rms_norm": (_POINTER, _POINTER, _POINTER, _POINTER, c_int64, c_int64, c_float),
    "tl_add_rms_norm": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, c_int64, c_int64, c_float),
    "tl_linear_pack": (_POINTER, _POINTER, _POINTER, c_int64, c_int64, c_int64, c_int64),
    "tl_linear": (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, c_int64, c_int64, c_int64),
    "tl_rope_cache": (_POINTER, POINTER(Batch), POINTER(Heads), _POINTER, _POINTER, _POINTER, _POINTER, _POINTER),
    "tl_attention": (_POINTER, POINTER(Batch), POINTER(Heads), _POINTER, _POINTER, _POINTER, _POINTER),
    "tl_swiglu": (_POINTER, _POINTER, _POINTER, c_int64, c_int64),
    "tl_sample": (_POINTER, POINTER(SampleArgs)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The opened library; raises KernelsMissing with what to do."""
    path = library_path()
    if not path.exists():
        raise KernelsMissing(f"the kernels are not built ({path.name} is missing): run make kernels")
    opened = open_library(path)
    if opened.tl_build_key().decode() != build_key():
        raise KernelsMissing("the kernels were built from other sources or for another processor: run make kernels")
    return opened


def open_library(path: Path) -> ctypes.CDLL:
    """Open a library file whatever it was built from; raises KernelsMissing if it is not one of this ABI."""
    try:
        opened = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsMissing(f"the kernels cannot be opened ({error}): run make kernels") from error
    _declare(opened)
    if opened.tl_abi_version() != ABI_VERSION:
        raise KernelsMissing(f"the kernels have ABI {opened.tl_abi_version()}, not {ABI_VERSION}: run make kernels")
    return opened


def _declare(opened: ctypes.CDLL) -> None:
    for name, arguments in _SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, c_int32
    opened.tl_abi_version.restype = c_int32
    for name in ("tl_build_key", "tl_isa", "tl_status_text"):
        getattr(opened, name).restype = c_char_p
    opened.tl_linear_packed_size.argtypes, opened.tl_linear_packed_size.restype = (c_int64, c_int64), c_int64
    opened.tl_context_destroy.argtypes, opened.tl_context_destroy.restype = (c_void_p,), None


class Context:
    """Worker threads, and the calls that run on them. Arguments are addresses and counts, as in the header."""

    def __init__(self, threads: int, opened: ctypes.CDLL | None = None) -> None:
        self._library = opened or library()
        handle = c_void_p()
        self._check(self._library.tl_context_create(threads, byref(handle)), "tl_context_create")
        self._handle, self.threads = handle, threads
        # Looked up once: attribute access on a library costs as much as a call.
        opened = self._library
        self._embed, self._linear, self._swiglu = opened.tl_embed, opened.tl_linear, opened.tl_swiglu
        self._norm, self._add_norm = opened.tl_rms_norm, opened.tl_add_rms_norm
        self._rope_cache, self._attention = opened.tl_rope_cache, opened.tl_attention
        self._sample = opened.tl_sample

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)  # absent when __init__ failed
        if handle is not None:
            self._library.tl_context_destroy(handle)

    def _check(self, status: int, call: str) -> None:
        if status:
            text: bytes = self._library.tl_status_text(status)
            raise KernelError(f"{call}: {text.decode()}")

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""
        name: bytes = self._library.tl_isa()
        return name.decode()

    def packed_size(self, columns: int, inner: int) -> int:
        """Floats a packed weight takes."""
        size: int = self._library.tl_linear_packed_size(columns, inner)
        if size < 0:
            raise KernelError(f"a weight of {columns} × {inner} is out of range")
        return size

    def embed(self, tokens: Address, table: Address, out: Address, rows: int, width: int, vocabulary: int) -> None:
        """out = table[tokens]."""
        self._check(self._embed(self._handle, tokens, table, out, rows, width, vocabulary), "tl_embed")

    def rms_norm(self, x: Address, weight: Address, out: Address, rows: int, width: int, eps: float) -> None:
        """Root-mean-square norm of rows."""
        self._check(self._norm(self._handle, x, weight, out, rows, width, eps), "tl_rms_norm")

    def add_rms_norm(
        self, x: Address, delta: Address, weight: Address, out: Address, rows: int, width: int, eps: float
    ) -> None:
        """x += delta, then its norm."""
        self._check(self._add_norm(self._handle, x, delta, weight, out, rows, width, eps), "tl_add_rms_norm")

    def linear_pack(
        self, weight: Address, packed: Address, rows: int, inner: int, first_column: int, columns: int
    ) -> None:
        """Copy weight [rows, inner] into its columns of a zeroed, 64-byte aligned packed weight."""
        status = self._library.tl_linear_pack(self._handle, weight, packed, rows, inner, first_column, columns)
        self._check(status, "tl_linear_pack")

    def linear(
        self, x: Address, packed: Address, bias: Address, out: Address, rows: int, inner: int, columns: int
    ) -> None:
        """out = x · weightᵀ + bias; bias 0 = none."""
        self._check(self._linear(self._handle, x, packed, bias, out, rows, inner, columns), "tl_linear")

    def rope_cache(
        self, batch: Batch, heads: Heads, cos: Address, sin: Address, qkv: Address, keys: Address, values: Address
    ) -> None:
        """Rotate q and k, write k and v."""
        status = self._rope_cache(self._handle, byref(batch), byref(heads), cos, sin, qkv, keys, values)
        self._check(status, "tl_rope_cache")

    def attention(self, batch: Batch, heads: Heads, qkv: Address, keys: Address, values: Address, out: Address) -> None:
        """Causal attention over pages."""
        status = self._attention(self._handle, byref(batch), byref(heads), qkv, keys, values, out)
        self._check(status, "tl_attention")

    def swiglu(self, gate_up: Address, out: Address, rows: int, width: int) -> None:
        """silu(gate) · up."""
        self._check(self._swiglu(self._handle, gate_up, out, rows, width), "tl_swiglu")

    def sample(self, args: SampleArgs) -> None:
        """One token per active row of logits, and log-probabilities where asked."""
        self._check(self._sample(self._handle, byref(args)), "tl_sample")


def batch_struct(**fields: int) -> Batch:
    """A `Batch` with its size filled in."""
    return Batch(size=sizeof(Batch), **fields)


def heads_struct(*, scale: float, **fields: int) -> Heads:
    """A `Heads` with its size filled in."""
    return Heads(size=sizeof(Heads), scale=scale, **fields)


def sample_struct(**fields: int) -> SampleArgs:
    """A `SampleArgs` with its size filled in; what is not named is absent."""
    return SampleArgs(size=sizeof(SampleArgs), **fields)
