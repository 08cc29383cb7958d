"""Requests to a real model: their transcripts are what the undisturbed mesh said before the first strike.

The one rule: each transcript is recorded twice, at both gateways, and must be the same, or nothing can be judged by it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.asks import Ask, Choice, cancel_after, draw_kind, outlive
from tests.chaos.client import Door
from trunkline.inference.v1 import inference_pb2 as pb

TOPICS = ("the sea", "a red fox", "old maps", "the moon", "bread", "a storm", "iron", "music")
DISTINCT = 24
AT_ONCE = 8
RECORD_S = 120.0


@dataclass(frozen=True)
class RecordedAsks:
    """Draws from what was recorded."""

    rng: random.Random
    recorded: Sequence[tuple[pb.GenerationSpec, Mapping[int, Choice]]]

    def draw(self, number: int) -> Ask:
        """The next one."""
        known, expected = self.rng.choice(self.recorded)
        spec = pb.GenerationSpec()
        spec.CopyFrom(known)
        kind = draw_kind(self.rng)
        outlive(spec, kind, f"key {number}")
        return Ask(number, kind, spec, expected, cancel_after(self.rng))


async def record(rng: random.Random, model: str, doors: Sequence[Door], tokens: tuple[int, int]) -> RecordedAsks:
    """Asks the mesh as it is; half greedy, half sampled with a seed, some with two choices."""
    specs = [_spec(rng, model, place, tokens) for place in range(DISTINCT)]
    places = asyncio.Semaphore(AT_ONCE)

    async def heard(door: Door, spec: pb.GenerationSpec) -> dict[int, Choice]:
        async with places:
            return await _heard(door, spec)

    async with asyncio.TaskGroup() as group:
        said = [[group.create_task(heard(door, spec)) for door in doors] for spec in specs]
    for spec, (first, *others) in zip(specs, said, strict=True):
        if any(other.result() != first.result() for other in others):
            raise AssertionError(f"the undisturbed mesh says different things to {spec.prompt!r}")
    return RecordedAsks(rng, [(spec, first.result()) for spec, (first, *_) in zip(specs, said, strict=True)])


def _spec(rng: random.Random, model: str, place: int, tokens: tuple[int, int]) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(
        model=model,
        prompt=f"{place + 1}. Write one sentence about {TOPICS[place % len(TOPICS)]}:",
        max_tokens=rng.randint(*tokens),
        n=2 if place % 6 == 5 else 1,
        ignore_eos=True,
        return_token_ids=True,
    )
    spec.sampling.temperature = 0.8 * (place % 2)
    spec.sampling.seed = rng.randrange(1 << 32)
    return spec


async def _heard(door: Door, spec: pb.GenerationSpec) -> dict[int, Choice]:
    request = pb.CompleteRequest(spec=spec)
    answer = await door.stubs[0].Complete(request, metadata=door.metadata, timeout=RECORD_S)
    return {
        choice.index: Choice(tuple(choice.token_ids), choice.text, choice.finish_reason) for choice in answer.choices
    }
