"""Tests of the CUDA kernels. Without a GPU all are skipped, for one reason; `make test-gpu` ends with it instead."""

from __future__ import annotations

import os

import pytest
import torch

from trunkline_kernels.cuda.library import prepare

REQUIRED = "TRUNKLINE_TEST_GPU"  # in the environment: without a GPU, fail
REASON = "no GPU that torch can use: make test-gpu, on a machine with one"


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    """A GPU whose kernels are ready. Every test here needs it."""
    if not torch.cuda.is_available():
        if REQUIRED in os.environ:
            pytest.exit(REASON, returncode=1)
        pytest.skip(REASON)
    torch.zeros(1, device="cuda")  # makes the context that the kernels share
    prepare()


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers on the GPU, the same in every run."""
    return torch.Generator("cuda").manual_seed(7)
