"""One run: start a mesh, offer load, strike it, look what is left, and count.

The one rule: whatever happens, the mesh is ended and nothing stays stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
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
from tests.chaos.scorecard import Scorecard
from tests.e2e.leaks import left_behind
from tests.fakes.artefact import write_artefact
from tests.fakes.mesh import EOS, TEXT_TOKENS, tokenizer_json

MODEL = "formula"
SETTLE_S = 90.0  # until windows, leases and sweeps have run out


@dataclass(frozen=True)
class Settings:
    """What a run is."""

    requests: int
    seed: int
    rate: float  # requests a second
    at_once: int
    tokens: tuple[int, int]  # of a choice
    longest_s: float = 60.0  # of a fault
    faults: bool = True


FORMULA = Settings(requests=10_000, seed=1, rate=13.0, at_once=64, tokens=(16, 96))
STEP_MS = 20


async def formula_run(settings: Settings, home: Path) -> Scorecard:
    """On the engine without a model, in a new directory."""
    write_artefact(home / "models" / MODEL, vocab_size=TEXT_TOKENS, eos=EOS, tokenizer=tokenizer_json())
    engine = {"module": "tests.fakes.engine", "flags": {"step-ms": STEP_MS}, "kv_blocks": 4096}
    async with ChaosMesh.lay_out(home, MODEL, {"engine": engine}) as mesh:
        rng = random.Random(f"{settings.seed} asks")
        asks = FormulaAsks(rng, MODEL, Tokenizer(tokenizer_json()), settings.tokens)
        return await _run(mesh, (asks.draw(number) for number in range(settings.requests)), asks.draw(-1), settings)


async def _run(mesh: ChaosMesh, asks: Iterator[Ask], last: Ask, settings: Settings) -> Scorecard:
    loop = asyncio.get_running_loop()
    doors = [Door(name, address, mesh.key) for name, address in mesh.public_addresses().items()]
    origin = loop.time()
    deck = Deck(random.Random(f"{settings.seed} deck"), COUNTS, settings.longest_s)
    injector = Injector(mesh, iter(deck), random.Random(f"{settings.seed} pauses"), origin)
    try:
        async with asyncio.TaskGroup() as group:
            if settings.faults:
                group.create_task(injector.run())
            pace = random.Random(f"{settings.seed} pace")
            stories = await offer(asks, doors, origin, pace, settings.rate, settings.at_once)
            injector.ending = True
        leaks = await _leaks(mesh, last, doors, origin)
    finally:
        for door in doors:
            await door.close()
    return Scorecard(stories, injector.blows, leaks, loop.time() - origin)


async def _leaks(mesh: ChaosMesh, last: Ask, doors: list[Door], origin: float) -> dict[str, object]:
    """What stays after everything may have run out. Expired reservations end in the tenant's next admission."""
    left: dict[str, Any] = {}
    try:
        async with asyncio.timeout(SETTLE_S):
            while True:
                await Client(last, doors, origin).run()
                left = await left_behind(mesh)
                if not left:
                    return {}
                await asyncio.sleep(2.0)
    except TimeoutError:
        return left
