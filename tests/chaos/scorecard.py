"""The numbers of a run, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.client import Story
from tests.chaos.inject import Blow
from tests.chaos.judge import Judge
from trunkctl.bench import measures

SURVIVAL = 0.999
HELD_UP_S = 0.5  # a wait for a token that long, while something was wrong, is a gap to recover from
MOST_SHOWN = 20


def quantile(values: Sequence[float], share: float) -> float:
    """As a load's; 0 of none."""
    return measures.quantile(values, share) if values else 0.0


class Scorecard:
    """Counts; `passed` is the verdict."""

    def __init__(
        self, stories: Sequence[Story], blows: Sequence[Blow], leaks: dict[str, object], took_s: float
    ) -> None:
        judge = Judge(blows)
        self.stories, self.blows, self.leaks, self.took_s = stories, blows, leaks, took_s
        self.counted = [story for story in stories if judge.counts(story)]
        self.lost = [story for story in self.counted if story.end != "finished"]
        self.flawed = [story for story in stories if story.flaws]
        self.wrong = [(story, turns) for story in stories if (turns := judge.wrong(story))]
        self.not_whole = [blow for blow in blows if not blow.whole]
        self.gaps = [(story, blow) for story in stories if (blow := _recovery(judge, story))]

    @property
    def survival(self) -> float:
        """Share of the requests that the promise covers."""
        return 1 - len(self.lost) / len(self.counted) if self.counted else 0.0

    @property
    def passed(self) -> bool:
        """All that `make chaos` must show."""
        faults = (self.flawed, self.wrong, self.leaks, self.not_whole)
        return self.survival >= SURVIVAL and not any(faults)

    def summary(self) -> dict[str, Any]:
        """The numbers."""
        gaps = [story.gap[1] for story, _ in self.gaps]
        ends = Counter(f"{story.ask.kind} {story.end}" for story in self.stories)
        return {
            "passed": self.passed,
            "requests": len(self.stories),
            "counted": len(self.counted),
            "survived": len(self.counted) - len(self.lost),
            "survival": round(self.survival, 6),
            "duplicated_or_spliced": len(self.flawed),
            "wrong_statuses": sum(len(turns) for _, turns in self.wrong),
            "leaks": {name: str(value) for name, value in self.leaks.items()},
            "not_recovered": len(self.not_whole),
            "strikes": len(self.blows),
            "ends": dict(sorted(ends.items())),
            "not_counted": {
                "cancelled by their client": sum(story.end == "cancelled" for story in self.stories),
                "ordinary, lost with their gateway": self._lost_with_gateway(),
            },
            "came_back": sum(story.resumes > 0 for story in self.stories),
            "migrated": sum(story.migrations > 0 for story in self.stories),
            "statuses": dict(Counter(_status(turn) for story in self.stories for turn in story.turns).most_common()),
            "recovery_gap_s": _gap_row(gaps),
            "tokens": sum(story.tokens for story in self.stories),
            "took_s": round(self.took_s, 1),
        }

    def by_kind(self) -> dict[str, Any]:
        """Recovery gaps by what was done."""
        struck = Counter(blow.strike.label for blow in self.blows)
        held: dict[str, list[float]] = {label: [] for label in sorted(struck)}
        for story, blow in self.gaps:
            held[blow.strike.label].append(story.gap[1])
        return {label: {"strikes": struck[label], **_gap_row(gaps)} for label, gaps in held.items()}

    def log(self) -> list[dict[str, Any]]:
        """Each blow with its times."""
        return [
            {"at_s": round(blow.began, 2), "healed_s": round(blow.healed, 2), "recovered_s": round(blow.recovered, 2),
             "what": blow.strike.label, "targets": [fault.target for fault in blow.strike.faults]}
            for blow in self.blows
        ]  # fmt: skip

    def text(self) -> str:
        """For a terminal; with the cases that spoil it."""
        lines = [f"{name:<24} {value}" for name, value in self.summary().items()]
        lines += [f"{label:<40} {row}" for label, row in self.by_kind().items()]
        lines += [f"{each['at_s']:8.2f} s  {each['what']:<40} {each}" for each in self.log()]
        lines += [f"LOST    {_line(story)}" for story in self.lost[:MOST_SHOWN]]
        lines += [f"FLAWED  {_line(story)} {story.flaws[:3]}" for story in self.flawed[:MOST_SHOWN]]
        lines += [f"WRONG   {_line(story)}" for story, _ in self.wrong[:MOST_SHOWN]]
        lines += [f"NOT WHOLE after {blow}" for blow in self.not_whole]
        lines += [f"LEFT    {name}: {value}" for name, value in self.leaks.items()]
        return "\n".join(lines)

    def _lost_with_gateway(self) -> int:
        counted = {id(story) for story in self.counted}
        return sum(id(story) not in counted and story.end != "cancelled" for story in self.stories)


def _recovery(judge: Judge, story: Story) -> Blow | None:
    return judge.blow_of(story) if story.gap[1] >= HELD_UP_S or story.migrations or story.resumes else None


def _gap_row(gaps: Sequence[float]) -> dict[str, Any]:
    return {
        "requests": len(gaps),
        "p50": round(quantile(gaps, 0.5), 2),
        "p99": round(quantile(gaps, 0.99), 2),
        "longest": round(max(gaps, default=0.0), 2),
    }


def _status(turn: Any) -> str:
    return f"{turn.code}({turn.reason})" if turn.reason else turn.code


def _line(story: Story) -> str:
    turns = "; ".join(f"{turn.at:.2f} s {turn.gateway} {_status(turn)} {turn.why}" for turn in story.turns)
    span = f"{story.began:.2f}-{story.ended:.2f} s"
    return (
        f"#{story.ask.number} {story.ask.kind} {story.request_id} {span} {story.end}, {story.tokens} tokens [{turns}]"
    )
