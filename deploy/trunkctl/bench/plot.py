"""A load as a picture: an SVG with four small charts, written by hand so that nothing has to be installed for it."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trunkctl.bench.measures import Outcome, quantile

WIDTH, HEIGHT = 440, 260  # of one chart
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 36, 40
POINTS = 400  # of one line or cloud, at most
COLOURS = ("#0b6e99", "#c2410c", "#15803d")

Point = tuple[float, float]


@dataclass(frozen=True)
class Chart:
    """Lines, or dots where `dots`; one per name."""

    title: str
    x: str
    y: str
    series: dict[str, list[Point]]
    dots: bool = False


def draw(title: str, outcomes: Sequence[Outcome]) -> str:
    """The whole picture."""
    done = [outcome for outcome in outcomes if outcome.times]
    firsts = [1e3 * outcome.ttft for outcome in done]
    gaps = [1e3 * gap for outcome in done for gap in outcome.gaps()]
    pauses = [1e3 * pause for outcome in done for pause in outcome.pauses()]
    failed = [(outcome.due, 0.0) for outcome in outcomes if outcome.error]
    charts = [
        Chart("Time to first token", "ms", "share of requests", {"": _shares(firsts)}),
        Chart("Time between tokens", "ms", "share", {"tokens": _shares(gaps), "pieces": _shares(pauses)}),
        Chart("Output", "seconds", "tokens/s", {"": _per_second(outcomes)}),
        Chart(
            "First token by arrival",
            "seconds",
            "ms",
            {"": [(outcome.due, 1e3 * outcome.ttft) for outcome in done], "failed": failed},
            dots=True,
        ),
    ]
    places = itertools.product((0, 1), repeat=2)
    parts = [_chart(chart, WIDTH * x, 30 + HEIGHT * y) for chart, (y, x) in zip(charts, places, strict=True)]
    size = f'width="{2 * WIDTH}" height="{30 + 2 * HEIGHT}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#333">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="16" y="22" font-size="14">{escape(title)}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _shares(values: Sequence[float]) -> list[Point]:
    """How large a share of the values is at most x."""
    if not values:
        return []
    ordered = sorted(values)
    shares = [index / (POINTS // 2) for index in range(POINTS // 2 + 1)]
    return [(quantile(ordered, share), share) for share in shares]


def _per_second(outcomes: Iterable[Outcome]) -> list[Point]:
    """Tokens in each second; in each of POINTS parts of a longer load."""
    pairs = [pair for outcome in outcomes for pair in zip(outcome.times, outcome.counts, strict=True)]
    if not pairs:
        return []
    step = max(1.0, max(time for time, _ in pairs) / POINTS)
    sums = [0] * (int(max(time for time, _ in pairs) / step) + 1)
    for time, count in pairs:
        sums[int(time / step)] += count
    return [((index + 0.5) * step, total / step) for index, total in enumerate(sums)]


def _chart(chart: Chart, left: float, top: float) -> str:
    points = [point for series in chart.series.values() for point in series]
    most_x = _round_up(max((x for x, _ in points), default=0.0))
    most_y = 1.0 if chart.y.startswith("share") else _round_up(max((y for _, y in points), default=0.0))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [f'<g transform="translate({left + LEFT},{top + TOP})">', *_axes(chart, wide, high, most_x, most_y)]
    for (name, series), colour in zip(chart.series.items(), COLOURS, strict=False):
        placed = [(wide * x / most_x, high * (1 - y / most_y)) for x, y in _thin(series)]
        parts += _dots(placed, colour) if chart.dots else _line(placed, colour)
        if name and series:
            row = 14 * list(chart.series).index(name)
            parts.append(f'<text x="{wide}" y="{high - 24 + row}" text-anchor="end" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</g>"])


def _axes(chart: Chart, wide: float, high: float, most_x: float, most_y: float) -> list[str]:
    parts = [f'<text x="0" y="-12" font-weight="bold">{chart.title}</text>']
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = wide * part, high * (1 - part)
        parts.append(f'<path d="M0 {y:.1f}H{wide}M{x:.1f} 0V{high}" stroke="#ddd" fill="none"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{most_y * part:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{high + 15}" text-anchor="middle">{most_x * part:g}</text>')
    parts.append(f'<text x="{wide / 2}" y="{high + 31}" text-anchor="middle" fill="#777">{chart.x}</text>')
    parts.append(f'<text x="{wide}" y="-12" text-anchor="end" fill="#777">{chart.y}</text>')
    return parts


def _line(points: Sequence[Point], colour: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']


def _dots(points: Sequence[Point], colour: str) -> list[str]:
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}" fill-opacity="0.6"/>' for x, y in points]


def _thin(points: Sequence[Point]) -> Sequence[Point]:
    """At most POINTS of them."""
    return points[:: -(-len(points) // POINTS)] if points else points


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power > value:
        power /= 10
    while power * 10 <= value:
        power *= 10
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)
