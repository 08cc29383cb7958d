"""The memory plan counts what the loader will hold, rank by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import CONFIG
from workers.models.config import ConfigError, parse_config, read_config
from workers.weights.manifest import read_manifest
from workers.weights.plan import MemoryPlan, plan_memory, stage_layers


def plan(memory: int = 1 << 30, **options: Any) -> MemoryPlan:
    config = parse_config({**CONFIG, **options.pop("config", {})})
    return plan_memory(config, precision=options.pop("precision", "fp32"), memory=memory, **options)


def test_one_rank_of_the_default_model_holds_its_file(artefact_dir: Path) -> None:
    manifest = read_manifest(artefact_dir)
    (rank,) = plan_memory(read_config(artefact_dir), precision="fp32", memory=2 << 30).ranks
    assert rank.weight_bytes == sum(entry.size for entry in manifest.tensors) == 4 * 134_515_008
    assert rank.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    assert rank.weights["embedding"] == 4 * 49152 * 576


def test_memory_beside_the_weights_becomes_tokens_and_full_sequences() -> None:
    (rank,) = plan().ranks
    exact = rank.weight_bytes + 3 * 256 * rank.kv_bytes_per_token
    assert (plan(exact).kv_tokens, plan(exact).concurrency) == (768, 3)
    assert (plan(exact - 1).kv_tokens, plan(exact - 1).concurrency) == (767, 2)
    assert plan(exact, context=100).concurrency == 7
    assert plan(rank.weight_bytes - 1).kv_tokens == 0


def test_half_the_precision_is_half_the_bytes() -> None:
    wide, narrow = plan().ranks[0], plan(precision="bf16").ranks[0]
    assert (wide.weight_bytes, wide.kv_bytes_per_token) == (2 * narrow.weight_bytes, 2 * narrow.kv_bytes_per_token)


def test_tensor_parallel_ranks_share_all_but_the_norms() -> None:
    (whole,), cut = plan().ranks, plan(tensor_parallel=2).ranks
    for rank in cut:
        assert {name: rank.weights[name] * (1 if name == "norm" else 2) for name in rank.weights} == whole.weights
        assert rank.kv_bytes_per_token * 2 == whole.kv_bytes_per_token


def test_pipeline_stages_share_the_layers_and_only_the_last_holds_the_head() -> None:
    untied = {"tie_word_embeddings": False, "num_hidden_layers": 5}
    (whole,), stages = plan(config=untied).ranks, plan(config=untied, pipeline_parallel=3).ranks
    assert [sorted(rank.weights) for rank in stages] == [
        ["attention", "embedding", "mlp", "norm"], ["attention", "mlp", "norm"], ["attention", "head", "mlp", "norm"],
    ]  # fmt: skip
    assert sum(rank.weight_bytes for rank in stages) == whole.weight_bytes
    assert sum(rank.kv_bytes_per_token for rank in stages) == whole.kv_bytes_per_token
    assert [list(stage_layers(5, 3, stage)) for stage in range(3)] == [[0, 1], [2, 3], [4]]


def test_a_tied_head_is_held_again_where_it_is_packed_or_on_another_stage() -> None:
    embedding = plan().ranks[0].weights["embedding"]
    assert "head" not in plan().ranks[0].weights
    assert plan(packed=True).ranks[0].weights["head"] == embedding
    assert plan(pipeline_parallel=2).ranks[-1].weights["head"] == embedding


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tensor_parallel": 4}, "6 query heads cannot be cut into 4"),
        ({"tensor_parallel": 3}, "2 kv heads cannot be cut into 3"),
        ({"pipeline_parallel": 4}, "3 layers cannot fill 4"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused_with_the_numbers(
    options: dict[str, int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan(**options)
