"""A trace as a waterfall: a line per span, nested under its parent, with a bar to scale. Pure: spans in, table out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from trunkline.common.v1 import common_pb2

MOST_ALIKE = 4  # siblings of one name beyond these share a line
NARROWEST = 20  # cells for the bars
EIGHTHS = "▏▎▍▌▋▊▉█"
STYLES = {"gateway": "cyan", "router": "magenta", "worker": "green"}
PARTS = tuple(
    field.name.removesuffix("_ms")
    for field in common_pb2.Receipt.DESCRIPTOR.fields
    if field.name.endswith("_ms") and field.name != "total_ms"
)


class Event(msgspec.Struct, frozen=True):
    """Something that happened at one moment of a span."""

    name: str
    at_us: int


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span as the state store holds it. Times are microseconds since the Unix epoch."""

    name: str
    service: str  # the process's id
    role: str
    span_id: str
    parent_id: str | None = None
    start_us: int
    end_us: int
    status: str = ""
    attrs: dict[str, str | bool | int | float | list[str | bool | int | float]] = {}
    events: list[Event] = []


@dataclass(frozen=True)
class Row:
    """One line: a span, or several alike."""

    depth: int
    spans: Sequence[Span]

    @property
    def start_us(self) -> int:
        """Start of the first."""
        return min(span.start_us for span in self.spans)

    @property
    def end_us(self) -> int:
        """End of the last."""
        return max(span.end_us for span in self.spans)


def rows(spans: Iterable[Span]) -> list[Row]:
    """Depth first, children by their start. A span whose parent is not among the spans stands at the top."""
    spans = list(spans)
    known = {span.span_id for span in spans}
    children: dict[str | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_us):
        children[span.parent_id if span.parent_id in known else None].append(span)
    return list(_below(None, 0, children))


def _below(parent: str | None, depth: int, children: dict[str | None, list[Span]]) -> Iterator[Row]:
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in children.pop(parent, []):  # popped, so that a broken trace with a circle ends, too
        by_name[span.name].append(span)
    groups = [
        group
        for alike in by_name.values()
        for group in ([alike] if len(alike) > MOST_ALIKE else [[span] for span in alike])
    ]
    for row in sorted((Row(depth, group) for group in groups), key=lambda row: row.start_us):
        yield row
        for span in row.spans:
            yield from _below(span.span_id, depth + 1, children)


def waterfall(spans: Iterable[Span]) -> Table:
    """The lines, with bars that share one time scale and the width that the text leaves, NARROWEST cells at least."""
    lines = rows(spans)
    first, last = min(row.start_us for row in lines), max(row.end_us for row in lines)
    table = Table(box=None, header_style="dim", pad_edge=False, expand=True)
    table.add_column("span", no_wrap=True)
    table.add_column("process", style="dim", no_wrap=True)
    table.add_column("at ms", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", ratio=1, min_width=NARROWEST, no_wrap=True)
    for row in lines:
        numbers = _ms(row.start_us - first), _ms(row.end_us - row.start_us)
        table.add_row(_label(row), row.spans[0].service, *numbers, Bar(row, first, last))
    return table


def _label(row: Row) -> Text:
    span = row.spans[0]
    label = Text("  " * row.depth + (span.name.rpartition(".")[2] if "/" in span.name else span.name))
    if len(row.spans) > 1:
        label.append(f" ×{len(row.spans)}", style="bold")
    if span.status not in ("", "OK", "UNSET"):
        label.append(f" {span.status}", style="red")
    return label


@dataclass(frozen=True)
class Bar:
    """A row's bar in whatever width it is given, in eighths of a cell; the first token is a mark on it."""

    row: Row
    first_us: int
    last_us: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it."""
        yield Text("".join(self.cells(options.max_width)), style=STYLES.get(self.row.spans[0].role, "white"))

    def cells(self, width: int) -> list[str]:
        """Blanks up to the start, then at least one cell."""
        scale = width / max(1, self.last_us - self.first_us)
        start = min(int((self.row.start_us - self.first_us) * scale), width - 1)
        length = round((self.row.end_us - self.row.start_us) * scale * 8)
        whole, rest = divmod(max(1, min(length, 8 * (width - start))), 8)
        cells = list(" " * start + EIGHTHS[7] * whole + (EIGHTHS[rest - 1] if rest else ""))
        for event in (event for span in self.row.spans for event in span.events if event.name == "first_token"):
            cells[max(start, min(int((event.at_us - self.first_us) * scale), len(cells) - 1))] = "◆"
        return cells


def _ms(us: int) -> str:
    return f"{us / 1000:.1f}"


def receipt_table(receipt: common_pb2.Receipt) -> Table:
    """Where the time went, part by part, with what no stage claims at the end; parts of no time are left out."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("receipt")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for part in PARTS:
        took = getattr(receipt, f"{part}_ms")
        if took or part == "unattributed":
            table.add_row(part, f"{took:.1f}", f"{took / max(receipt.total_ms, 1e-9):.1%}")
    table.add_row("total", f"{receipt.total_ms:.1f}", "", style="bold")
    return table
