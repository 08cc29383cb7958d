"""Which worker gets a request: filter, score in [0, 1], pick. Pure arithmetic on an immutable snapshot.

Owns no state. The one rule: everything it reads is in its arguments, so a decision can be made again from them
(`Explain` does), and the random source only breaks ties.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from router.scorers import SCORERS, Estimate, Limits
from shared.ids import Rng

Lane = tuple[str, str]
"""(artefact hash, tokenizer hash): requests of one lane can go to the same workers."""

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as the policy sees it for one artefact. Made anew whenever anything in it changes."""

    worker_id: str
    incarnation: int
    estimate: Estimate
    blocked: str = ""  # why it takes no work now, whatever the request; empty if it may
    busy: bool = False  # it may, as soon as it has answered the batch it has just been sent
    score: float = 0.0  # the part of the score that does not depend on the request


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a worker."""

    artefact: str = ""
    choices: int = 1
    prefill_tokens: int = 0
    kv_tokens: int = 0
    excluded: frozenset[int] = NONE  # incarnations that must not get it, or cannot serve it
    preferred: Sequence[int] = ()  # incarnations that should, best first


@dataclass(frozen=True, slots=True)
class Weights:
    """Weight of each score; the total is their weighted mean."""

    load: float = 0.5
    prefill: float = 0.3
    kv: float = 0.2
    preferred: float = 1.0

    def of(self, name: str) -> float:
        return float(getattr(self, name))


@dataclass(frozen=True, slots=True)
class Verdict:
    """One candidate's part in a decision."""

    candidate: Candidate
    filtered_by: str
    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    total: float = 0.0


class Policy:
    """The weights and limits a router decides by."""

    def __init__(self, weights: Weights, limits: Limits, rng: Rng) -> None:
        self._weights = weights
        self._limits = limits
        self._rng = rng
        self._sum = weights.preferred + sum(weights.of(name) for name in SCORERS)

    def base_score(self, estimate: Estimate) -> float:
        """The request-independent part of the score, kept in `Candidate.score` so that a decision adds up little."""
        weighted = (self._weights.of(name) * score(estimate, self._limits) for name, score in SCORERS.items())
        return sum(weighted) / self._sum

    def choose(self, candidates: Iterable[Candidate], need: Need, taken: Collection[int] = NONE) -> Candidate | None:
        """The best worker that may take it now, or None. `taken`: incarnations that an earlier request waits for."""
        best: list[Candidate] = []
        best_score = -1.0
        for candidate in candidates:
            if candidate.blocked or candidate.incarnation in taken:
                continue
            score = candidate.score
            if need.preferred:
                score += self._preference(candidate, need)
            if score < best_score or self.filter(candidate, need):
                continue
            if score > best_score:
                best_score = score
                best.clear()
            best.append(candidate)
        if len(best) < 2:
            return best[0] if best else None
        return best[self._rng.randrange(len(best))]

    def filter(self, candidate: Candidate, need: Need) -> str:
        """Name of the first filter that drops the candidate; empty if it stays."""
        if candidate.incarnation in need.excluded:
            return "excluded"
        return candidate.blocked or self._room(candidate.estimate, need)

    def explain(self, candidate: Candidate, need: Need) -> Verdict:
        """One candidate's filter and scores, as `choose` sees them."""
        scores = {name: score(candidate.estimate, self._limits) for name, score in SCORERS.items()}
        total = self.base_score(candidate.estimate) + self._preference(candidate, need)
        scores["preferred"] = self._preference(candidate, need) * self._sum / (self._weights.preferred or 1.0)
        return Verdict(candidate, self.filter(candidate, need), scores, total)

    def _preference(self, candidate: Candidate, need: Need) -> float:
        """1 for the first preferred incarnation, less for later ones, 0 for the others; weighted."""
        if candidate.incarnation not in need.preferred:
            return 0.0
        return self._weights.preferred / (1 + need.preferred.index(candidate.incarnation)) / self._sum

    def _room(self, estimate: Estimate, need: Need) -> str:
        """Head-room. A worker that holds nothing takes anything: it alone can say that a request will never fit."""
        if estimate.requests >= estimate.max_requests:
            return "requests"
        if estimate.requests == 0:
            return ""
        if estimate.prefill_tokens and estimate.prefill_tokens + need.prefill_tokens > self._limits.prefill_tokens:
            return "prefill"
        return "kv" if need.prefill_tokens > estimate.kv_available else ""
