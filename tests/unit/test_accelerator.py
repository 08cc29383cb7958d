"""A device that cannot be used is refused with a sentence that says why and what to do."""

from __future__ import annotations

import pytest
import torch

from workers.engine.accelerator import DeviceError, check_device, is_device_failure


def no_driver() -> None:
    raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch with CUDA and one H200, as far as the check can see."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in {
        "init": None, "device_count": 1, "set_device": None, "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H200",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return monkeypatch


def test_the_cpu_is_always_there() -> None:
    assert check_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "", "meta", "cuda:x"])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="is not one of cpu, cuda, cuda:N"):
        check_device(name)


def test_a_gpu_that_is_there_is_taken(gpu: pytest.MonkeyPatch) -> None:
    assert check_device("cuda:0") == torch.device("cuda:0")


def test_each_lack_has_its_sentence(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"cuda:1 cannot be used: 1 GPUs are visible here \(CUDA_VISIBLE_DEVICES\)"):
        check_device("cuda:1")
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(DeviceError, match=r"NVIDIA H200 has compute capability 7\.5; 8\.0 or newer is needed"):
        check_device("cuda")
    gpu.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(DeviceError, match=r"cuda cannot be used: Found no NVIDIA driver on your system\.$"):
        check_device("cuda")
    gpu.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="is built without CUDA"):
        check_device("cuda")


def test_cudas_errors_are_told_from_others() -> None:
    assert is_device_failure(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_device_failure(RuntimeError("shape mismatch"))
    assert not is_device_failure(ValueError("CUDA error"))
