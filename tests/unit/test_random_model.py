"""Random models of a named shape: whole artefacts, the same for the same seed, whose answers make sense."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.tokens import Tokenizer
from tests.fakes.checkpoints import CONFIG, verified
from workers.engine.batch import BLOCK_SIZE
from workers.models.config import parse_config
from workers.models.llama import weight_specs
from workers.models.loader import load_model
from workers.weights import random_model
from workers.weights.manifest import GOLDEN, TOKENIZER, Manifest
from workers.weights.random_model import SHAPES, RandomSource, make_random, shape_config
from workers.weights.replay import single_sequence
from workers.weights.source import SourceError

TINY: dict[str, Any] = {**CONFIG, "vocab_size": 300, "bos_token_id": 1}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape `tiny`, whose larger tensors take several generators each."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(random_model, "_BLOCK", 1000)


@pytest.mark.parametrize(("shape", "parameters"), [("8b", 8_030_261_248), ("1b", 1_235_814_400), ("135m", 134_515_008)])
def test_a_shape_has_as_many_parameters_as_the_model_it_is_named_after(shape: str, parameters: int) -> None:
    specs = weight_specs(parse_config(shape_config(shape)))
    assert sum(torch.Size(spec.shape).numel() for spec in specs) == parameters
    fewer = parse_config(shape_config(shape, layers=2))
    assert fewer.layers == 2


def test_a_shape_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no shape 'huge'"):
        make_random(tmp_path / "model", "huge")


@pytest.mark.usefixtures("tiny")
def test_the_same_seed_makes_the_same_artefact_and_another_seed_another(tmp_path: Path) -> None:
    def made(name: str, **options: int) -> Manifest:
        manifest = make_random(tmp_path / name, "tiny", name="tiny", **options)
        assert manifest == verified(tmp_path / name)
        return manifest

    first = made("one")
    assert made("two") == first
    assert made("one", seed=1).artefact_hash != first.artefact_hash
    assert len(made("two", layers=1).tensors) < len(first.tensors)
    assert first.precision == "bf16"
    assert GOLDEN not in {entry.name for entry in first.files}


@pytest.mark.usefixtures("tiny")
def test_no_two_parts_of_the_weights_repeat_one_another_and_their_spread_follows_their_inputs() -> None:
    with RandomSource(TINY, 0) as source:
        weights = [source.tensor(name) for name in sorted(source.names)]
    matrices = [weight for weight in weights if weight.dim() == 2]
    parts = [part for weight in matrices for part in weight.view(-1).split(1000) if len(part) == 1000]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(parts, 2))
    for weight in matrices:
        assert weight.std().item() * weight.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.1)


@pytest.mark.usefixtures("tiny")
def test_it_serves_and_its_scores_tell_tokens_apart(tmp_path: Path) -> None:
    make_random(tmp_path / "model", "tiny")
    model = load_model(tmp_path / "model", kernel_mode="standard", threads=1)
    tokens = [*range(5, 5 + 2 * BLOCK_SIZE)]
    batch, cache = single_sequence(model, tokens)
    logits = model.logits(model.forward(batch, cache))
    assert logits.isfinite().all()
    assert (logits.std(dim=-1) > 0.3).all()
    assert (logits.std(dim=-1) < 3).all()
    assert len(set(logits.argmax(-1).tolist())) > 5


@pytest.mark.usefixtures("tiny")
def test_its_tokenizer_gives_every_text_back_and_has_text_for_every_token(tmp_path: Path) -> None:
    make_random(tmp_path / "model", "tiny")
    tokenizer = Tokenizer((tmp_path / "model" / TOKENIZER).read_bytes())
    assert tokenizer.vocab_size == TINY["vocab_size"]
    assert tokenizer.special_ids == {TINY["bos_token_id"], TINY["eos_token_id"]}
    text = "Grüße, 世界!\n\tone  two"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.token_bytes(token) for token in range(TINY["vocab_size"]))
