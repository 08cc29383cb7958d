"""What can be done to a mesh: single strikes and pairs, in an order that follows from a seed.

The one rule: no strike takes the last of a role on purpose; workers fall in pairs, gateways and routers alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

What = Literal["kill", "stop", "empty", "drop", "half_open", "stalled", "slow", "refusing"]
STOPS_S = (0.4, 2.0, 12.0)
TOGETHER_S = 0.05  # between the two of a pair, at most


@dataclass(frozen=True)
class Fault:
    """One thing that happens to one process or link."""

    what: What
    role: str  # gateway, router, worker (the door), engine, redis; or a link: client, peer, store
    target: str  # a process, or a link
    for_s: float = 0.0

    @property
    def label(self) -> str:
        """Its kind, for tables."""
        lasting = f" {self.for_s:g} s" if self.what == "stop" else ""
        return f"{self.what} {self.role}{lasting}"


@dataclass(frozen=True)
class Strike:
    """One fault, or two within 50 ms."""

    faults: tuple[Fault, ...]
    apart_s: float = 0.0

    @property
    def label(self) -> str:
        """Its kind, for tables."""
        return " + ".join(fault.label for fault in self.faults)


@dataclass(frozen=True)
class _Card:
    """A strike whose targets are not drawn yet."""

    parts: tuple[tuple[What, str, float], ...]

    @property
    def label(self) -> str:
        return " + ".join(f"{what} {role}" for what, role, _ in self.parts)

    @property
    def longest_s(self) -> float:
        return max(lasting for _, _, lasting in self.parts)


_PROCESSES = ("gateway", "router", "worker", "engine", "redis")
_LINKS = ("to gateway", "to router", "to worker", "to peer", "to store")
_PAIRS = (
    ("gateway", "worker"), ("router", "worker"), ("gateway", "router"), ("worker", "worker"), ("engine", "worker"),
    ("gateway", "engine"), ("redis", "worker"), ("redis", "router"), ("redis", "gateway"),
)  # fmt: skip


def _cards() -> list[_Card]:
    singles = [_Card((("kill", role, 0.0),)) for role in _PROCESSES]
    singles += [_Card((("stop", role, lasting),)) for role in _PROCESSES for lasting in STOPS_S]
    singles.append(_Card((("empty", "redis", 0.0),)))
    links: list[tuple[What, float]] = [
        ("drop", 0),
        ("half_open", 4),
        ("stalled", 1),
        ("stalled", 8),
        ("slow", 5),
        ("refusing", 2),
    ]
    singles += [_Card(((what, link, lasting),)) for link in _LINKS for what, lasting in links]
    pairs = [_Card((("kill", one, 0.0), ("kill", other, 0.0))) for one, other in _PAIRS]
    pairs += [_Card((("kill", one, 0.0), ("stop", other, 2.0))) for one, other in _PAIRS]
    return singles + pairs


class Deck:
    """Draws strikes at names: every kind once, in random order, before any comes again."""

    def __init__(self, rng: random.Random, counts: dict[str, int], only: str = "", longest_s: float = 60.0) -> None:
        """`counts` of processes by role. Of all kinds those whose label begins with `only`, and no longer ones."""
        self._rng, self._counts = rng, counts
        self._cards = [card for card in _cards() if card.label.startswith(only) and card.longest_s <= longest_s]
        if not self._cards:
            raise ValueError(f"no strike is called {only!r}")

    def __len__(self) -> int:
        return len(self._cards)

    def __iter__(self) -> Iterator[Strike]:
        while True:
            for card in self._rng.sample(self._cards, len(self._cards)):
                yield self._strike(card)

    def _strike(self, card: _Card) -> Strike:
        rng = self._rng
        places = rng.sample(range(self._counts["worker"]), len(card.parts))  # two workers are never the same one
        faults = [
            Fault(what, role, self._target(role, place), lasting)
            for (what, role, lasting), place in zip(card.parts, places, strict=True)
        ]
        rng.shuffle(faults)
        return Strike(tuple(faults), rng.uniform(0.0, TOGETHER_S) if len(faults) > 1 else 0.0)

    def _target(self, role: str, place: int) -> str:
        """A name; `place` is the number of a worker."""
        any_of = lambda what: f"{what}-{self._rng.randint(1, self._counts[what])}"  # noqa: E731
        match role:
            case "redis":
                return "redis"
            case "worker" | "to worker":
                return f"worker-{place + 1}"
            case "engine":
                return f"worker-{place + 1}/engine"
            case "to peer":
                return f"{any_of('gateway')}.internal"
            case "to store":
                return f"{any_of(self._rng.choice(('gateway', 'gateway', 'router', 'worker')))}>store"
            case _:
                return any_of(role.removeprefix("to "))
