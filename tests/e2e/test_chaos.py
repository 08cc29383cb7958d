"""A little chaos on every run of the tests; `make chaos` is the whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.chaos.run import ENGINES, run


@pytest.mark.timeout(240)
async def test_requests_survive_a_handful_of_strikes_with_their_only_transcript(tmp_path: Path) -> None:
    settings = dataclasses.replace(ENGINES["latency"], requests=150, rate=12.0, tokens=(8, 40), seed=3, longest_s=2.0)
    card = await run(settings, tmp_path / "mesh", tmp_path)
    assert card.passed, card.text()
    assert len(card.blows) >= 3
