"""The scorecard as a drawing: every recovery gap at its time, over the strikes, and the gaps of each kind of strike.

SVG by hand: nothing else is needed to look at it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from tests.chaos.scorecard import Scorecard, quantile

WIDTH, LEFT, TOP, HEIGHT, ROW = 1080, 300, 60, 260, 16
LEAST_S, MOST_S = 0.03, 100.0
KINDS = {"ordinary": "#4878a8", "resumable": "#d08030", "keyed": "#50904c"}


def svg(card: Scorecard, title: str) -> str:
    """The whole drawing."""
    rows = sorted(card.by_kind())
    total = TOP + HEIGHT + 90 + ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
        f'<text x="20" y="24" font-size="15">{escape(title)}</text>',
        *_legend(),
        *_timeline(card),
        *_kinds(card, rows, TOP + HEIGHT + 60),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _legend() -> Iterator[str]:
    for place, (kind, colour) in enumerate(KINDS.items()):
        yield f'<circle cx="{26 + 100 * place}" cy="40" r="4" fill="{colour}"/>'
        yield f'<text x="{34 + 100 * place}" y="44">{kind}</text>'
    yield '<text x="340" y="44" fill="#666">grey: from a strike until every process takes work again</text>'


def _timeline(card: Scorecard) -> Iterator[str]:
    """Gaps (logarithmic) over the seconds of the run."""
    span = max([story.ended for story in card.stories], default=1.0)
    across = lambda at: 50 + at / span * (WIDTH - 70)  # noqa: E731
    for blow in card.blows:
        width = max(1.0, across(blow.recovered) - across(blow.began))
        what = escape(f"{blow.strike.label} at {blow.began:.1f} s")
        yield (
            f'<rect x="{across(blow.began):.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT}" fill="#e4e4e4">'
            f"<title>{what}</title></rect>"
        )
    for second in (0.1, 1, 10):
        y = _height(second)
        yield f'<line x1="50" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#bbb" stroke-dasharray="3"/>'
        yield f'<text x="44" y="{y + 4:.1f}" text-anchor="end">{second:g} s</text>'
    for at in range(0, int(span) + 1, max(1, round(span / 12))):
        yield f'<text x="{across(at):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{at} s</text>'
    for story, blow in card.gaps:
        began, length = story.gap
        what = escape(f"#{story.ask.number} {story.ask.kind}: {length:.2f} s, {blow.strike.label}")
        yield (
            f'<circle cx="{across(began):.1f}" cy="{_height(length):.1f}" r="2" '
            f'fill="{KINDS[story.ask.kind]}" fill-opacity="0.7"><title>{what}</title></circle>'
        )


def _height(seconds: float) -> float:
    share = math.log(max(seconds, LEAST_S) / LEAST_S) / math.log(MOST_S / LEAST_S)
    return TOP + HEIGHT * (1 - min(1.0, share))


def _kinds(card: Scorecard, rows: list[str], top: int) -> Iterator[str]:
    """For each kind of strike: its gaps' median and 99th percentile on a line of seconds."""
    heading = "recovery gap by kind of strike: median and 99th percentile (strikes, requests)"
    yield f'<text x="20" y="{top - 8}">{heading}</text>'
    longest = max([story.gap[1] for story, _ in card.gaps], default=1.0)
    for place, label in enumerate(rows):
        gaps = [story.gap[1] for story, blow in card.gaps if blow.strike.label == label]
        strikes = sum(blow.strike.label == label for blow in card.blows)
        y, scale = top + ROW * place, (WIDTH - LEFT - 120) / longest
        yield f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end">{escape(label)} ({strikes}, {len(gaps)})</text>'
        for share, colour in ((0.99, "#c8d4e0"), (0.5, "#4878a8")):
            width = quantile(gaps, share) * scale
            yield f'<rect x="{LEFT}" y="{y + 1}" width="{width:.1f}" height="{ROW - 5}" fill="{colour}"/>'
        text = f"{quantile(gaps, 0.5):.2f} / {quantile(gaps, 0.99):.2f} s" if gaps else "-"
        yield f'<text x="{LEFT + quantile(gaps, 0.99) * scale + 6:.1f}" y="{y + 10}">{text}</text>'
