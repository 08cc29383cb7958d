"""The waterfall shows every span once, nested and to scale, whatever the trace looks like."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trunkctl.waterfall import MOST_ALIKE, Event, Span, receipt_table, rows, waterfall
from trunkline.common.v1 import common_pb2


def span(span_id: str, start: int, end: int, parent: str | None = None, name: str = "", **rest: object) -> Span:
    fields = {"service": "gateway-1", "role": "gateway", **rest}
    return Span(name=name or span_id, span_id=span_id, parent_id=parent, start_us=start, end_us=end, **fields)  # type: ignore[arg-type]


def drawn(spans: list[Span], width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(waterfall(spans))
    return console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined, no-any-return]


spans_of_any_shape = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.none() | st.integers(0, 20), st.sampled_from("abc")),
    min_size=1,
    max_size=20,
).map(
    lambda drawn: [
        span(str(i), start, start + length, None if parent is None else str(parent), name)
        for i, (start, length, parent, name) in enumerate(drawn)
    ]
)


@given(spans_of_any_shape)
def test_every_span_that_hangs_on_a_root_stands_in_exactly_one_row(spans: list[Span]) -> None:
    shown = [span.span_id for row in rows(spans) for span in row.spans]
    parents = {span.span_id: span.parent_id for span in spans}

    def rooted(span_id: str) -> bool:
        seen: set[str] = set()
        while (parent := parents[span_id]) in parents and parent is not None:
            if span_id in seen:
                return False
            seen.add(span_id)
            span_id = parent
        return True

    assert sorted(shown) == sorted(span_id for span_id in parents if rooted(span_id))


@given(spans_of_any_shape.filter(lambda spans: rows(spans) != []), st.integers(70, 160))
def test_no_bar_leaves_its_column(spans: list[Span], width: int) -> None:
    lines = drawn(spans, width)
    assert len(lines) == len(rows(spans)), "a bar wrapped into a line of its own"
    assert not any("…" in line for line in lines), "a bar was cut"


def test_children_stand_under_their_parent_in_the_order_of_their_start() -> None:
    trace = [
        span("late", 50, 60, "root"),
        span("root", 0, 100),
        span("early", 10, 20, "root"),
        span("leaf", 11, 12, "early"),
    ]
    assert [(row.depth, row.spans[0].name) for row in rows(trace)] == [
        (0, "root"),
        (1, "early"),
        (2, "leaf"),
        (1, "late"),
    ]


def test_a_span_whose_parent_is_elsewhere_stands_at_the_top() -> None:
    assert [row.depth for row in rows([span("a", 0, 1, parent="of the caller")])] == [0]


def test_many_spans_of_one_name_share_a_line_that_tells_their_number() -> None:
    steps = [span(f"s{i}", i, i + 1, "root", "engine.step") for i in range(MOST_ALIKE + 1)]
    lines = drawn([span("root", 0, 10), *steps])
    assert len(lines) == 2
    assert f"engine.step ×{MOST_ALIKE + 1}" in lines[1]


def test_bars_are_to_scale() -> None:
    root, half, tail = drawn([span("root", 0, 800), span("half", 0, 400, "root"), span("tail", 600, 800, "root")])
    whole = root.count("█")
    assert half.count("█") == whole // 2
    assert tail.count("█") == whole // 4
    assert tail.index("█") == root.index("█") + 3 * whole // 4


def test_the_first_token_is_marked_on_the_bar_and_a_failure_is_named() -> None:
    (line,) = drawn([span("root", 0, 100, events=[Event("first_token", 50)], status="ERROR")])
    assert line.count("◆") == 1
    assert "ERROR" in line


def test_the_receipt_always_tells_what_nobody_claims() -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(receipt_table(common_pb2.Receipt(total_ms=10.0, decode_ms=7.5, prefill_ms=2.5)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "75.0%" in text
    assert "unattributed" in text
    assert "router_queue" not in text
