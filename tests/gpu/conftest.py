"""Tests of the CUDA kernels. Without a GPU their files are skipped; under `make test-gpu` they fail."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from trunkline_kernels.cuda.door import prepare

REQUIRED = "TRUNKLINE_TEST_GPU"  # in the environment: without a GPU, fail
REASON = "no GPU that torch can use: make test-gpu, on a machine with one"


class _Skipped(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        if REQUIRED in os.environ:
            pytest.fail(REASON, pytrace=False)
        pytest.skip(REASON)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Without a GPU, not even the names of tests."""
    if torch.cuda.is_available():
        return None
    module: pytest.Module = _Skipped.from_parent(parent, path=module_path)
    return module


@pytest.fixture(scope="session", autouse=True)
def _prepared() -> None:
    torch.zeros(1, device="cuda")  # makes the context that the kernels share
    prepare()


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers on the GPU, the same in every run."""
    return torch.Generator("cuda").manual_seed(7)
