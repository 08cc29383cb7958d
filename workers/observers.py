"""Several observers of a door as one. The one rule: the order they are given in is the order they are told in."""

from __future__ import annotations

from workers.door.execution import Execution
from workers.door.holdings import Observer
from workers.engine import messages as m


class Observers:
    """See the module."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def answered(self, kind: str) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.answered(kind)

    def admitted(self, execution: Execution, *, adopted: bool) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.admitted(execution, adopted=adopted)

    def scheduled(self, execution: Execution) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.scheduled(execution)

    def first_token(self, execution: Execution) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.first_token(execution)

    def ended(self, execution: Execution, outcome: str) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.ended(execution, outcome)

    def stepped(self, step: m.StepOut) -> None:
        """See `Observer`."""
        for each in self._observers:
            each.stepped(step)
