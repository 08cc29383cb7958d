"""What the GPU benches stand on: floors by arithmetic, targets as given, gates beside a peer on the same machine."""

from __future__ import annotations

import json

import pytest

from tests.bench import roofline
from tests.bench.engine_gpu import WORKLOADS, sizes
from tests.bench.targets import Target, load, peer_values
from workers.models.config import parse_config
from workers.weights.random_model import SHAPES, shape_config

TABLE = load()
BATCH_ROWS = [target for target in TABLE.engine if target.metric == "tpot_ms"]


@pytest.mark.parametrize("target", BATCH_ROWS, ids=lambda target: f"{target.shape}-{target.batch}-tp{target.tp}")
def test_a_floor_is_the_given_one(target: Target) -> None:
    assert target.floor is not None
    assert target.batch is not None
    floor = roofline.tpot_ms(parse_config(shape_config(target.shape)), target.batch, 512, 257, tp=target.tp)
    if target.shape == "135m" and target.batch > 1:
        assert floor > target.floor, "the given one counts one of this model's three kv heads"
    else:
        assert floor == pytest.approx(target.floor, rel=0.05, abs=0.01)


def test_no_gate_and_no_stretch_lies_beyond_its_floor() -> None:
    for target in TABLE.engine:
        config = parse_config(shape_config(target.shape))
        if target.workload:
            requests, prompt, tokens = sizes(target.workload)
            most = requests * tokens / roofline.workload_s(config, requests, prompt, tokens, tp=target.tp)
            assert target.gate < target.stretch < most
        else:
            assert target.batch is not None
            least = (
                roofline.tpot_ms(config, target.batch, 512, 257, tp=target.tp)
                if target.metric == "tpot_ms"
                else roofline.prefill(config, target.batch, 512, tp=target.tp).ms()
            )
            assert least < target.stretch < target.gate


def test_work_grows_with_what_causes_it() -> None:
    config = parse_config(shape_config("1b"))
    one = roofline.decode(config, 1, 100)
    assert roofline.decode(config, 1, 200).bytes > one.bytes
    assert roofline.decode(config, 2, 100).flops == 2 * one.flops
    assert roofline.decode(config, 1, 100, tp=2).bytes == one.bytes / 2
    long = roofline.prefill(config, 1, 2000)
    assert long.flops > 2 * roofline.prefill(config, 1, 1000).flops, "attention grows with the square"


def test_the_table_is_whole_and_names_each_row_once() -> None:
    cases = [target.case for target in TABLE.engine]
    assert len(set(cases)) == len(cases) == 35
    assert {target.shape for target in TABLE.engine} == set(SHAPES)
    assert {target.workload for target in TABLE.engine if target.workload} == set(WORKLOADS)
    assert [online.rate for online in TABLE.online] == [10, 15, 20, 25]
    for target in TABLE.engine:
        assert target.met(target.stretch)
        assert not target.met(target.vllm), "every gate is ahead of the peer"


def test_beside_a_peer_on_the_same_machine_a_gate_keeps_its_distance_to_it() -> None:
    lines = [
        "load_s 12.0",
        json.dumps({"engine": "vllm", "tp": 1, "model": "8b", "bs": 1, "ttft_ms": 39.5, "tpot_ms": 9.766}),
        json.dumps({"engine": "vllm", "tp": 1, "model": "8b", "workload": "1000x128/128", "out_tok_s": 8255.5}),
    ]
    values = peer_values(lines)
    assert values == {
        ("8b", 1, 1, "tpot_ms"): 9.766,
        ("8b", 1, 1, "ttft_ms"): 39.5,
        ("8b", 1, "1000x128/128", "out_tok_s"): 8255.5,
    }
    for target in TABLE.engine:
        if target.case in values:
            beside = target.beside(values[target.case])
            assert beside.gate / beside.vllm == pytest.approx(target.gate / target.vllm)
    (tpot,) = [target for target in TABLE.engine if target.case == ("8b", 1, 1, "tpot_ms")]
    assert tpot.beside(9.766).gate == pytest.approx(8.3)


def test_an_online_gate_asks_for_both_goodput_and_short_gaps() -> None:
    (ten, *_) = TABLE.online
    good: dict[str, object] = {"goodput": 0.96, "itl_ms": [5, 6, 31]}
    assert ten.met(good)
    assert not ten.met({**good, "goodput": 0.94})
    assert not ten.met({**good, "itl_ms": [5, 6, 33]})
    assert not ten.met({**good, "itl_ms": [None, None, None]})
    assert not any(each.met({"goodput": each.vllm["goodput"], "itl_ms": each.vllm["itl_ms"]}) for each in TABLE.online)
