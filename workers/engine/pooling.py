"""Mean pooling of final hidden states, chunk by chunk.

Owns the sum's order: token after token in float64, so that the result does not depend on where chunks were cut.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.sequence import Sequence


def add_rows(sequence: Sequence, start: int, rows: torch.Tensor) -> None:
    """Adds hidden states `rows` [n, d] of tokens `start`… to the running sum; rows that were added before are skipped.

    (They come again when a preempted sequence computes its context anew.)
    """
    fresh = rows[sequence.pooled - start :].double().cpu().numpy()
    if len(fresh) == 0:
        return
    so_far = np.zeros(fresh.shape[1]) if sequence.pooled_sum is None else sequence.pooled_sum
    sequence.pooled_sum = np.add.accumulate(np.concatenate((so_far[None], fresh)))[-1]
    sequence.pooled += len(fresh)


def embedding(sequence: Sequence, normalize: bool) -> npt.NDArray[np.float32]:
    """The mean of the summed states, float32 [d], of length 1 if asked (a zero mean stays zero)."""
    assert sequence.pooled_sum is not None, "nothing was summed"
    mean = sequence.pooled_sum / sequence.pooled
    norm = np.linalg.norm(mean)
    return (mean / norm if normalize and norm > 0 else mean).astype(np.float32)
