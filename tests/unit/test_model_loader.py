"""What may serve: fused kernels only after they agreed with the reference, and nothing quietly."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.fakes.checkpoints import CONFIG, small_artefact, tensors, write_directory
from trunkline_kernels import door
from workers.models import loader
from workers.models.loader import load_model
from workers.models.selfcheck import largest_difference
from workers.weights.convert import convert
from workers.weights.golden import load_golden
from workers.weights.manifest import GOLDEN
from workers.weights.replay import replay


def test_each_mode_serves_answers_the_golden_vectors_and_says_what_it_is() -> None:
    for mode in ("fused", "standard"):
        model = load_model(small_artefact(), kernel_mode=mode, threads=2)
        assert (model.kernel_mode, model.path.split("/")[0], model.invariant) == (mode, mode, True)
        assert replay(model, load_golden(small_artefact() / GOLDEN)).passed


def test_biases_and_an_own_head_are_used(tmp_path: Path) -> None:
    config = {**CONFIG, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
    convert(write_directory(tmp_path / "source", config, tensors(config)), tmp_path / "model")
    for mode in ("fused", "standard"):
        model = load_model(tmp_path / "model", kernel_mode=mode, threads=1)
        assert model.kernel_mode == mode
        assert replay(model, load_golden(tmp_path / "model" / GOLDEN)).passed


def test_weights_stored_in_bf16_are_served_in_fp32_on_the_cpu(tmp_path: Path) -> None:
    convert(write_directory(tmp_path / "source"), tmp_path / "model", precision="bf16")
    model = load_model(tmp_path / "model", kernel_mode="fused", threads=1)
    assert model.dtype is torch.float32
    assert replay(model, load_golden(tmp_path / "model" / GOLDEN)).passed


def test_kernels_that_disagree_do_not_serve_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(loader.MAX_DIFFERENCE, torch.float32, 1e-12)
    with caplog.at_level(logging.ERROR):
        assert load_model(small_artefact(), kernel_mode="fused", threads=1).kernel_mode == "standard"
    assert "differ from standard" in caplog.text


def test_missing_kernels_leave_standard_to_serve_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(door, "library_path", lambda: tmp_path / "absent.so")
    door.library.cache_clear()
    with caplog.at_level(logging.ERROR):
        assert load_model(small_artefact(), kernel_mode="fused", threads=1).kernel_mode == "standard"
    door.library.cache_clear()
    assert "make kernels" in caplog.text


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'turbo' is not one of fused, standard"):
        load_model(small_artefact(), kernel_mode="turbo", threads=1)


def test_the_self_check_sees_one_wrong_weight_anywhere() -> None:
    reference = load_model(small_artefact(), kernel_mode="standard", threads=1)
    for layer in reference.decoder.layers:
        other = load_model(small_artefact(), kernel_mode="fused", threads=1)
        assert largest_difference(other, reference) < 1e-5
        damaged = other.decoder.layers[layer.index]
        damaged.post_norm = damaged.post_norm * 1.001
        assert largest_difference(other, reference) > 1e-4


def test_replaying_sees_a_model_that_answers_otherwise() -> None:
    model = load_model(small_artefact(), kernel_mode="fused", threads=1)
    model.decoder.norm = model.decoder.norm.flip(0)
    result = replay(model, load_golden(small_artefact() / GOLDEN))
    assert not result.passed
    assert result.differing > 0
