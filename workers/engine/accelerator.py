"""Whether a device can be used, said in a sentence; and what it means when one fails.

The one rule: the first thing an engine does; nothing is loaded for a device that is not there.
"""

from __future__ import annotations

import torch

OLDEST = (8, 0)  # compute capability: bf16


class DeviceError(Exception):
    """The device cannot be used, or went wrong while it ran. The message is for people."""


def check_device(name: str) -> torch.device:
    """The device of this name (`cpu`, `cuda`, `cuda:1`), ready. Raises DeviceError with what to do."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {name!r} is not one of cpu, cuda, cuda:N")
    if device.type == "cuda":
        _check_gpu(device)
    return device


def is_device_failure(error: Exception) -> bool:
    """Whether an exception of torch is CUDA's word on a failed kernel or device."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _check_gpu(device: torch.device) -> None:
    if torch.version.cuda is None:
        raise DeviceError(
            f"{device} cannot be used: torch {torch.__version__} is built without CUDA; install one with it"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        seen = torch.cuda.device_count()
    except RuntimeError as error:  # no driver, one that is too old, or no GPU: torch says which
        raise DeviceError(f"{device} cannot be used: {str(error).splitlines()[0]}") from None
    if (device.index or 0) >= seen:
        raise DeviceError(f"{device} cannot be used: {seen} GPUs are visible here (CUDA_VISIBLE_DEVICES)")
    torch.cuda.set_device(device)
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        found, needed = (".".join(map(str, version)) for version in (capability, OLDEST))
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {found}; {needed} or newer is needed"
        )
