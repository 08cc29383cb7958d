"""The routers there are, and whose turn it is.

The one rule: a router that failed is left aside for a moment, not forgotten; whether it is there, the next call finds
out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from shared.clock import Clock
from shared.peers import Peers

_ASIDE_S: Final = 1.0


@dataclass
class _Mark:
    aside_until: float = 0.0
    draining: bool = False
    heard: bool = False  # its stream of models is up


class Routers:
    """Round robin over the routers that the registry or the configuration names."""

    def __init__(self, peers: Peers, clock: Clock) -> None:
        self._peers = peers
        self._clock = clock
        self._marks: dict[str, _Mark] = {}
        self._turn = 0
        self._on_lost: list[Callable[[str], None]] = []

    def addresses(self) -> list[str]:
        """All of them, in order; marks of others are forgotten."""
        known = sorted({info.address for info in self._peers.snapshot().values()})
        self._marks = {address: self._marks.get(address, _Mark()) for address in known}
        return known

    def heard(self, address: str, draining: bool) -> None:
        """It sends its models."""
        mark = self._marks.setdefault(address, _Mark())
        mark.heard, mark.draining, mark.aside_until = True, draining, 0.0

    def failed(self, address: str) -> None:
        """It broke off or cannot be reached."""
        mark = self._marks.setdefault(address, _Mark())
        mark.heard, mark.aside_until = False, self._clock.monotonic() + _ASIDE_S

    def lost(self, address: str) -> None:
        """It is silent for too long: calls that wait for its answer are lost too."""
        self.failed(address)
        for tell in self._on_lost:
            tell(address)

    def on_lost(self, tell: Callable[[str], None]) -> None:
        """Have the addresses of silent routers told."""
        self._on_lost.append(tell)

    def usable(self) -> list[str]:
        """The best there are: those that are heard and take work; else all that did not just fail; else all."""
        known = self.addresses()
        now = self._clock.monotonic()
        fresh = [address for address in known if self._marks[address].aside_until <= now]
        good = [address for address in fresh if self._marks[address].heard and not self._marks[address].draining]
        return good or fresh or known

    def next(self, avoid: Collection[str] = ()) -> str | None:
        """Whose turn it is, better one not to `avoid`; None if there is none."""
        usable = self.usable()
        usable = [address for address in usable if address not in avoid] or usable
        if not usable:
            return None
        self._turn += 1
        return usable[self._turn % len(usable)]
