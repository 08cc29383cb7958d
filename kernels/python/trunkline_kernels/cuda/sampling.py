"""Sampling on the GPU. See `kernels/include/tl_kernels.h` for the arguments, which are those of the CPU call.

Logits are fp32 [rows, stride], aligned to 16 bytes, stride a multiple of 4. Raises KernelError if the call is refused.
"""

from __future__ import annotations

from ctypes import byref, c_void_p

from trunkline_kernels.cuda.door import check, function
from trunkline_kernels.door import SampleArgs


def sample(args: SampleArgs, stream: int) -> None:
    """One token per active row of logits, and log-probabilities where asked; addresses in `args` are the device's."""
    check("tl_cuda_sample", function("tl_cuda_sample", c_void_p, c_void_p)(byref(args), stream))
