"""One mesh of two gateways, two routers and two workers for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Mesh


@pytest.fixture(scope="session")
def mesh(artefact_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """2 gateways, 2 routers, 2 workers on the real model; what a test kills, the supervisor starts again."""
    running = Mesh.start(tmp_path_factory.mktemp("mesh"), artefact_dir.parent, workers=2, routers=2, gateways=2)
    yield running
    running.stop()
