"""One run: start a mesh, offer load, strike it, look what is left, and count.

The one rule: whatever happens, the mesh is ended and nothing stays stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.tokens import Tokenizer
from tests.chaos.asks import Ask, FormulaAsks
from tests.chaos.client import Client, Door
from tests.chaos.faults import Deck
from tests.chaos.inject import Injector
from tests.chaos.load import offer
from tests.chaos.mesh import COUNTS, ChaosMesh
from tests.chaos.recorded import record
from tests.chaos.scorecard import Scorecard
from tests.e2e.harness import MODEL as SMOLLM2
from tests.e2e.leaks import left_behind
from tests.fakes.artefact import write_artefact
from tests.fakes.mesh import EOS, TEXT_TOKENS, tokenizer_json

MODEL = "formula"
STEP_MS = 20
SETTLE_S = 90.0  # until windows, leases and sweeps have run out
LOOK_S = 1.5
Draw = Callable[[int], Ask]


@dataclass(frozen=True)
class Settings:
    """What a run is."""

    engine: str  # latency: without a model; or the name of a model
    requests: int
    rate: float  # requests a second
    at_once: int
    tokens: tuple[int, int]  # of a choice
    seed: int = 1
    only: str = ""  # what the strikes' labels begin with
    longest_s: float = 60.0  # of a strike
    faults: bool = True


ENGINES = {
    "latency": Settings("latency", requests=10_000, rate=13.0, at_once=64, tokens=(16, 96)),
    "smollm2": Settings("smollm2", requests=300, rate=0.9, at_once=16, tokens=(16, 48)),
}


async def run(settings: Settings, home: Path, models: Path) -> Scorecard:
    """One run in a new directory; `models` holds the converted real one."""
    model, engine = _engine(settings, home, models)
    async with ChaosMesh.lay_out(home, model, {"engine": engine}) as mesh:
        doors = [Door(name, address, mesh.key) for name, address in mesh.public_addresses().items()]
        try:
            return await _run(mesh, doors, await _draw(settings, model, doors), settings)
        finally:
            for door in doors:
                await door.close()


def _engine(settings: Settings, home: Path, models: Path) -> tuple[str, dict[str, Any]]:
    """Puts the model there; its name and the engine's settings."""
    if settings.engine == "latency":
        write_artefact(home / "models" / MODEL, vocab_size=TEXT_TOKENS, eos=EOS, tokenizer=tokenizer_json())
        return MODEL, {"module": "tests.fakes.engine", "flags": {"step-ms": STEP_MS}, "kv_blocks": 4096}
    home.mkdir(parents=True)
    (home / "models").symlink_to(models)
    return SMOLLM2, {}


async def _draw(settings: Settings, model: str, doors: list[Door]) -> Draw:
    rng = random.Random(f"{settings.seed} asks")
    if settings.engine == "latency":
        return FormulaAsks(rng, model, Tokenizer(tokenizer_json()), settings.tokens).draw
    return (await record(rng, model, doors, settings.tokens)).draw


async def _run(mesh: ChaosMesh, doors: list[Door], draw: Draw, settings: Settings) -> Scorecard:
    loop = asyncio.get_running_loop()
    origin = loop.time()
    deck = Deck(random.Random(f"{settings.seed} deck"), COUNTS, settings.only, settings.longest_s)
    injector = Injector(mesh, iter(deck), random.Random(f"{settings.seed} pauses"), origin)
    asks = (draw(number) for number in range(settings.requests))
    async with asyncio.TaskGroup() as group:
        if settings.faults:
            group.create_task(injector.run())
        pace = random.Random(f"{settings.seed} pace")
        stories = await offer(asks, doors, origin, pace, settings.rate, settings.at_once)
        injector.ending = True
    leaks = await _leaks(mesh, draw(settings.requests), doors, origin)
    return Scorecard(stories, injector.blows, leaks, loop.time() - origin)


async def _leaks(mesh: ChaosMesh, last: Ask, doors: list[Door], origin: float) -> dict[str, object]:
    """What stays after everything may have run out. Expired reservations end in the tenant's next admission."""
    left: dict[str, Any] = {}
    try:
        async with asyncio.timeout(SETTLE_S):
            while True:
                await Client(last, doors, origin).run()
                await asyncio.sleep(LOOK_S)  # until that one has settled
                left = await left_behind(mesh)
                if not left:
                    return {}
    except TimeoutError:
        return left
