"""Tests of the CUDA kernels. Without a GPU all are skipped, for one reason; `make test-gpu` fails instead."""

from __future__ import annotations

import os

import pytest
import torch

REQUIRED = "TRUNKLINE_TEST_GPU"  # set: no GPU is a failure


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    """A GPU whose kernels are ready. Every test here needs it."""
    if not torch.cuda.is_available():
        refuse = pytest.fail if REQUIRED in os.environ else pytest.skip
        refuse("no GPU that torch can use: run make test-gpu on a machine with one")
    from trunkline_kernels.cuda.library import prepare

    torch.cuda.init()  # its context is the one the kernels share
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    prepare()


@pytest.fixture
def generator() -> torch.Generator:
    """Random numbers on the GPU, the same in every run."""
    return torch.Generator("cuda").manual_seed(7)
