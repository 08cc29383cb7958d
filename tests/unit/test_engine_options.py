"""Engine options as flags, and the memory plan."""

from __future__ import annotations

import pytest

from workers.config import EngineConfig
from workers.engine.memory import MIB, Footprint, TooLittleMemoryError, available_bytes, plan_blocks
from workers.engine.options import EngineOptions, from_arguments, to_arguments


def test_options_survive_the_command_line() -> None:
    options = EngineOptions(model="/a b", threads=3, kv_memory_fraction=0.25, device="cuda:1", memory_limit_mb=7)
    assert from_arguments(to_arguments(9, options)) == (9, options)


def test_every_option_of_the_engine_can_be_configured() -> None:
    configured = EngineConfig(device="cuda", itl_slo_ms=25.0, threads=2)
    assert from_arguments(to_arguments(9, configured.options("m"))) == (
        9,
        EngineOptions(model="m", device="cuda", itl_slo_ms=25.0, threads=2),
    )


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_arguments(["--fd=1", "--model=x", "--speed=11"])
    assert "--speed" in capsys.readouterr().err


SIZE = Footprint(weights=500 * MIB, scratch=100 * MIB, block=MIB)


def test_the_cache_takes_its_share_of_what_the_weights_leave() -> None:
    options = EngineOptions(model="", kv_memory_fraction=0.5, max_seqs=100)
    assert plan_blocks(SIZE, options, context=1024, available=1600 * MIB) == 500


def test_the_cache_takes_no_more_than_it_could_use_and_no_less_than_one_context() -> None:
    options = EngineOptions(model="", kv_memory_fraction=0.1, max_seqs=2)
    assert plan_blocks(SIZE, options, context=1024, available=10**6 * MIB) == 128
    assert plan_blocks(SIZE, options, context=1024, available=664 * MIB) == 64


@pytest.mark.parametrize(("blocks", "needed"), [(0, 664), (200, 800)])
def test_too_little_memory_is_said_with_both_numbers(blocks: int, needed: int) -> None:
    options = EngineOptions(model="", kv_blocks=blocks)
    with pytest.raises(TooLittleMemoryError, match=f"^{needed} MiB of memory are needed .* {needed - 1} MiB are"):
        plan_blocks(SIZE, options, context=1024, available=(needed - 1) * MIB)
    assert plan_blocks(SIZE, options, context=1024, available=needed * MIB) == (blocks or 64)


def test_a_memory_limit_is_a_bound_on_what_the_machine_has() -> None:
    free = available_bytes(EngineOptions(model=""))
    assert free > 0
    assert available_bytes(EngineOptions(model="", memory_limit_mb=10)) == 10 * MIB
