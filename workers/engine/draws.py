"""From `Draw`s to the arrays of a sampling call on the device.

Owns the translation only; the meaning of the numbers is in `kernels/include/tl_kernels.h` and `sampler.py`. The one
rule: what a row's edits depend on is known on the host (`Draw.pending` rows are never penalised).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trunkline_kernels.door import SampleBias, SampleCount, SampleRow
from workers.engine.sampler import Draw

ROW = np.dtype(SampleRow)
BIAS = np.dtype(SampleBias)
COUNT = np.dtype(SampleCount)


class DrawArrays(NamedTuple):
    """A sampling call's parameters."""

    rows: npt.NDArray[np.void]  # ROW [R]
    biases: npt.NDArray[np.void]  # BIAS [B]
    histories: npt.NDArray[np.void]  # COUNT [H, capacity]
    history_lengths: npt.NDArray[np.int32]  # [H]


def draw_arrays(draws: Sequence[Draw]) -> DrawArrays:
    """The arrays for `draws`; row i's token also goes to entry i of the call's `next_tokens`."""
    rows: list[tuple[float, ...]] = []  # in the order of ROW's fields
    biases: list[tuple[int, float]] = []
    histories: list[npt.NDArray[np.void]] = []
    for index, draw in enumerate(draws):
        how, start, past = draw.sampling, len(biases), -1
        if how.logit_bias or draw.banned:
            biases.extend({**how.logit_bias, **dict.fromkeys(draw.banned, -math.inf)}.items())
        if how.penalised:
            past = len(histories)
            histories.append(_history(draw))
        penalties = how.presence_penalty, how.frequency_penalty, how.repetition_penalty
        place = draw.choice, draw.position, start, len(biases) - start, past, index
        rows.append((how.seed, how.temperature, how.top_p, how.min_p, *penalties, 1, how.top_k, how.logprobs, *place))
    capacity = max((len(history) for history in histories), default=0) + 1  # and the one that is drawn
    table = np.zeros((len(histories), capacity), COUNT)
    for line, history in zip(table, histories, strict=True):
        line[: len(history)] = history
    lengths = np.array([len(history) for history in histories], np.int32)
    return DrawArrays(np.array(rows, ROW), np.array(biases, BIAS), table, lengths)


def _history(draw: Draw) -> npt.NDArray[np.void]:
    """COUNT [n]: the distinct ids so far, and how often each is in the output."""
    ids, where = np.unique(draw.tokens, return_inverse=True)
    history = np.zeros(len(ids), COUNT)
    history["token"] = ids
    history["count"] = np.bincount(where[draw.prompt_length :], minlength=len(ids))
    return history
