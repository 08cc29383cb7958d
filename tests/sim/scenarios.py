"""All scenarios: the races of the wire, and scenes of rules that no race touches.

The one rule: whoever looks for a scenario looks here, so that all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.sim import races, rules
from tests.sim.scene import SCENARIOS, Scene, play


def scenes() -> Iterator[tuple[str, str, Scene]]:
    """All of them: name, label, scene."""
    for name, labels in SCENARIOS.items():
        for label, scene in labels.items():
            yield name, label, scene


__all__ = ["SCENARIOS", "Scene", "play", "races", "rules", "scenes"]
