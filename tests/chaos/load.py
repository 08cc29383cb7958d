"""Offers requests at a rate until there have been enough, each by a client of its own.

The one rule: a client that cannot begin because too many run waits; nothing is left out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from tests.chaos.asks import Ask
from tests.chaos.client import Client, Door, Story


async def offer(
    asks: Iterator[Ask], doors: list[Door], origin: float, rng: random.Random, rate: float, at_once: int
) -> list[Story]:
    """`rate` requests a second, Poisson, at most `at_once` running."""
    stories: list[Story] = []
    places = asyncio.Semaphore(at_once)

    async def one(ask: Ask) -> None:
        try:
            stories.append(await Client(ask, doors, origin).run())
        finally:
            places.release()

    loop = asyncio.get_running_loop()
    due = loop.time()
    async with asyncio.TaskGroup() as group:
        for ask in asks:
            await places.acquire()
            due = max(due, loop.time() - 1.0) + rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            group.create_task(one(ask))
    return stories
