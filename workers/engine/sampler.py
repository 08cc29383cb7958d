"""From logits to tokens: bias, penalties, temperature, top-k, top-p, min-p, one uniform draw, log-probabilities.

Owns the meaning of `Sampling`. The one rule: every row is worked on alone, in float64 sums of one fixed order, so what
a row draws is bitwise independent of the other rows of the batch. Filters follow transformers' order and boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.messages import Logprob, Sampling
from workers.engine.philox import uniform

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_STRIDE = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """What one logit row needs to become a token."""

    sampling: Sampling
    tokens: npt.NDArray[np.int32]  # prompt and output so far, as far as they are known
    prompt_length: int
    choice: int
    banned: Sequence[int] = ()  # ids masked out (the ends, while fewer than min_tokens are out)
    pending: bool = False  # one more token precedes, which the step in flight draws (never if penalised)

    @property
    def position(self) -> int:
        """Index of the new token within the choice's output: the draw's counter."""
        return len(self.tokens) + self.pending - self.prompt_length

    @property
    def plain(self) -> bool:
        """True when the token is simply the row's argmax."""
        return self.sampling.temperature == 0.0 and self.sampling.logprobs < 0 and not self._edits

    @property
    def _edits(self) -> bool:
        return bool(self.sampling.logit_bias) or self.sampling.penalised or bool(self.banned)


@dataclass(frozen=True, slots=True)
class Pick:
    """A drawn token."""

    token: int
    logprob: Logprob | None = None


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Pick | None]:
    """One token per row of `logits` [R, V] (any float dtype, any device); None where the row is not finite.

    Greedy ties go to the lowest id. `draws` has R entries.
    """
    if not draws:
        return []
    rows = logits.float().cpu().numpy()
    best = rows.argmax(axis=-1)  # the first NaN wins, so a finite best means a row without NaN or +inf
    finite = np.isfinite(rows[np.arange(len(draws)), best])
    picks: list[Pick | None] = []
    for row, draw, top, sound in zip(rows, draws, best.tolist(), finite.tolist(), strict=True):
        picks.append((Pick(top) if draw.plain else _pick(row, draw)) if sound else None)
    return picks


def _pick(row: Floats, draw: Draw) -> Pick | None:
    scores = edit(row, draw)
    if not np.isfinite(scores.max()):
        return None
    token = choose(scores, draw.sampling, draw.choice, draw.position)
    wanted = draw.sampling.logprobs
    return Pick(token, raw_logprobs(row, token, wanted) if wanted >= 0 else None)


def edit(row: Floats, draw: Draw) -> Floats:
    """A copy of `row` [V] with logit bias, repetition, frequency and presence penalties, and banned ids applied."""
    scores = row.copy()
    sampling = draw.sampling
    if sampling.logit_bias:
        scores[list(sampling.logit_bias)] += np.fromiter(sampling.logit_bias.values(), np.float32)
    if sampling.repetition_penalty != 1.0:
        seen = scores[draw.tokens]
        penalty = np.float32(sampling.repetition_penalty)
        scores[draw.tokens] = np.where(seen < 0, seen * penalty, seen / penalty)  # repeats write equal values
    if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        ids, counts = np.unique(draw.tokens[draw.prompt_length :], return_counts=True)
        scores[ids] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)
    if draw.banned:
        scores[list(draw.banned)] = -np.inf
    return scores


def choose(scores: Floats, sampling: Sampling, choice: int, position: int) -> int:
    """The token of `scores` [V] under `sampling`: argmax, or the inverse CDF over the kept ids in ascending order."""
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    ids, weights = kept(scores, sampling)
    cumulative = weights.cumsum()
    target = uniform(sampling.seed, choice, position) * cumulative[-1]
    found = int(cumulative.searchsorted(target, side="right"))
    if found == len(ids):  # the product may round up to the total
        found = int(np.flatnonzero(weights)[-1])
    return int(ids[found])


def kept(scores: Floats, sampling: Sampling) -> tuple[Ids, Doubles]:
    """Ids that survive top-k, top-p and min-p, ascending, and their weights (the largest is 1, unnormalised)."""
    if 0 < sampling.top_k < len(scores):
        ids = _leaders(scores, sampling.top_k)
        weights = scores[ids].astype(np.float64)
    else:
        ids = np.arange(len(scores))
        weights = scores.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore"):  # a tiny temperature may send the rest to -inf, which is what it means
        weights /= sampling.temperature
    np.exp(weights, out=weights)
    if sampling.top_p < 1.0:
        keep = _nucleus(weights, sampling.top_p)
        ids, weights = ids[keep], weights[keep]
    if sampling.min_p > 0.0:
        keep = np.flatnonzero(weights >= sampling.min_p)
        ids, weights = ids[keep], weights[keep]
    return ids, weights


def _leaders(values: Floats | Doubles, count: int) -> Ids:
    """Indices of all values not below the `count`-th largest, ascending (more than `count` where it is a tie)."""
    candidates: Ids = np.arange(len(values))
    starts = candidates[::_STRIDE]
    if len(starts) >= count:
        # `count` strides have a value not below the count-th largest of their maxima, so nothing below it leads.
        maxima = np.maximum.reduceat(values, starts)
        candidates = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
    found = values[candidates]
    leading: Ids = candidates[found >= np.partition(found, -count)[-count]]
    return leading


def _nucleus(weights: Doubles, top_p: float) -> Ids:
    """Indices kept by top-p: those with less than `top_p` of the mass before them, heaviest first; at least one.

    The lightest ids whose mass stays within 1 - top_p go, as in transformers; among equals the lowest index is kept.
    """
    total = weights.sum()
    heavy = _heavy(weights, top_p, total)
    order = heavy[np.argsort(-weights[heavy], kind="stable")]
    before = np.concatenate(([0.0], weights[order].cumsum()[:-1]))
    count = max(1, int(before.searchsorted(top_p * total, side="left")))
    return np.sort(order[:count])


def _heavy(weights: Doubles, top_p: float, total: float) -> Ids:
    """Ascending indices that include the nucleus, few of them where a few weights have most of the mass.

    Right are all cuts above which `top_p` of the mass lies, and the last one: what weighs at most (1 - top_p) / V of
    the mass certainly goes.
    """
    for cut in (1e-1, 1e-2, 1e-3):
        heavy = np.flatnonzero(weights > cut)
        if weights[heavy].sum() >= top_p * total:
            return heavy
    heavy = np.flatnonzero(weights > (1.0 - top_p) * total / len(weights))
    return heavy if len(heavy) else np.array([weights.argmax()])  # all equal, and rounding


def raw_logprobs(row: Floats, token: int, count: int) -> Logprob:
    """Log-softmax of `row` [V] at `token` and at the `count` best ids (best first, ties by id)."""
    exact = row.astype(np.float64)
    top = exact.max()
    exact -= top + np.log(np.exp(exact - top).sum())
    best = _best(exact, min(count, len(exact)))
    return Logprob(float(exact[token]), best.tolist(), exact[best].tolist())


def _best(values: Doubles, count: int) -> Ids:
    if count == 0:
        return np.zeros(0, np.int64)
    ids = _leaders(values, count)
    return ids[np.argsort(-values[ids], kind="stable")][:count]
