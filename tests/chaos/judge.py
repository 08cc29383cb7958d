"""Whether what clients heard is what the promise allows: who survived, and which statuses the faults explain.

The one rule: what no fault explains is wrong, however harmless it looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from tests.chaos.asks import Kind
from tests.chaos.client import Story, Turn
from tests.chaos.faults import Fault
from tests.chaos.inject import Blow
from tests.chaos.mesh import KEY_TTL_S

TAIL_S = 12.0  # after the mesh is whole: lapsing leases, sweeps
BROKEN: Final = frozenset(("kill", "drop", "half_open", "refusing"))  # what breaks a client's connection
_STORE: Final = frozenset(("redis", "to store"))
_GATEWAYS: Final = frozenset(("gateway", "to peer", "to gateway"))
_WORK: Final = frozenset(("router", "worker", "engine", "to router", "to worker"))
EXPLAINED_BY: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "MOVED": _STORE | _GATEWAYS,
        "OWNER_MOVED": _STORE | _GATEWAYS,
        "OWNER_LOST": _GATEWAYS,
        "STATE_AWAY": _STORE | {"gateway"},
        "RPM": frozenset(("redis",)),
        "TPM": frozenset(("redis",)),
        "CONCURRENCY": frozenset(("redis",)),
        "NO_REPLICA": _WORK,
    }
)


class Judge:
    """Knows every blow."""

    def __init__(self, blows: Sequence[Blow]) -> None:
        self._blows = blows

    def wrong(self, story: Story) -> list[Turn]:
        """Statuses of a request that no fault explains."""
        return [turn for turn in story.turns if not self._explained(turn, story)]

    def counts(self, story: Story) -> bool:
        """Whether the promise covers it: what its client ended is not, nor an ordinary one whose gateway died."""
        if story.end == "cancelled":
            return False
        if story.ask.kind is not Kind.ORDINARY or story.end == "finished":
            return True
        last = story.turns[-1]
        return bool(last.reason) or not self._broken(last)

    def blow_of(self, story: Story) -> Blow | None:
        """The blow in which its longest wait began, or which fell into it."""
        began, length = story.gap
        hits = [blow for blow in self._blows if blow.began <= began + length and began <= blow.recovered]
        return hits[0] if hits else None

    def _explained(self, turn: Turn, story: Story) -> bool:
        if turn.code == "SILENT":
            return any(True for _ in self._faults_at(turn.at, TAIL_S))
        if not turn.reason:
            return turn.code == "UNAVAILABLE" and self._broken(turn)
        roles = EXPLAINED_BY.get(turn.reason, frozenset())
        tail = KEY_TTL_S + TAIL_S if turn.reason in ("STATE_AWAY", "RPM", "TPM") else TAIL_S
        return any(fault.role in roles for fault in self._faults_at(turn.at, tail))

    def _broken(self, turn: Turn) -> bool:
        """The transport failed because of what was done to that gateway, or to the way there."""
        return any(
            fault.target == turn.gateway and fault.what in BROKEN and fault.role in ("gateway", "to gateway")
            for fault in self._faults_at(turn.at, 2.0)
        )

    def _faults_at(self, at: float, tail_s: float) -> list[Fault]:
        """What is, or was not long ago, wrong with the mesh."""
        return [
            fault
            for blow in self._blows
            if blow.began <= at and (not blow.recovered or at <= blow.recovered + tail_s)
            for fault in blow.strike.faults
        ]
