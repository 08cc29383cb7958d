"""One step's inputs, gathered on the host and sent to the device in a single copy.

The one rule: nothing is put in before the step that last used the arena has been read (`Ring` sees to that).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.device import Device, Event

ALIGNMENT = 256  # bytes
_FIRST_SIZE = 1 << 20


class Arena:
    """Host memory and its twin on the device. `put` everything, `send` once, then use what `put` gave."""

    def __init__(self, device: Device, size: int = _FIRST_SIZE) -> None:
        self.done: Event | None = None  # of the step that used it last
        self._device = device
        self._make(size)

    def put_all(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
        """Sends the arrays; answers with each one's bytes on the device, uint8 [nbytes], aligned to ALIGNMENT.

        Waits for the step that used the arena before.
        """
        if self.done is not None:
            self.done.wait()
            self.done = None
        starts = np.cumsum([0, *(_padded(array.nbytes) for array in arrays)]).tolist()
        if starts[-1] > len(self._host):
            self._make(2 * starts[-1])
        for start, array in zip(starts, arrays, strict=False):
            self._bytes[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self._device.upload(self._host[: starts[-1]], self._there[: starts[-1]])
        return [self._there[start : start + array.nbytes] for start, array in zip(starts, arrays, strict=False)]

    def _make(self, size: int) -> None:
        self._host = self._device.shared(size)
        self._bytes = self._host.numpy()
        self._there = torch.empty(size, dtype=torch.uint8, device=self._device.place)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
