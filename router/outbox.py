"""What goes out at the end of this turn of the loop, by worker.

Owns the batches being put together. The one rule: whatever is added in a turn is taken out in the same turn, so an idle
router adds no delay and a busy one sends few, full batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from router.fleet import Worker
from router.submission import MAX_BYTES, Submission

MAX_BATCH_BYTES: Final = 16 << 20
_FULL: Final = MAX_BATCH_BYTES - MAX_BYTES  # below it, one more submission of any size fits


@dataclass(slots=True)
class Parcel:
    """One batch to be."""

    worker: Worker
    items: list[Submission] = field(default_factory=list)
    size: int = 0


class Outbox:
    """Open parcels, one a worker."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._parcels: dict[str, Parcel] = {}

    def add(self, worker: Worker, item: Submission) -> bool:
        """True if the worker's parcel is full now and must be taken out before the next `add` for it."""
        parcel = self._parcels.get(worker.address)
        if parcel is None:
            parcel = self._parcels[worker.address] = Parcel(worker)
        parcel.items.append(item)
        parcel.size += item.size
        return worker.probing or len(parcel.items) >= self._max_items or parcel.size > _FULL

    def take(self, worker: Worker) -> Parcel:
        return self._parcels.pop(worker.address)

    def workers(self) -> list[Worker]:
        """Those with an open parcel."""
        return [parcel.worker for parcel in self._parcels.values()]
