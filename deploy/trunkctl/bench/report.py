"""A report as people read it."""

from rich.console import Console
from rich.table import Table

from trunkctl.bench.measures import Quantiles, Report


def show(report: Report, console: Console) -> None:
    """Prints the figures, the errors, and a warning where the client was too slow to be believed."""
    console.print(_latencies(report))
    console.print(_totals(report))
    for kind, count in report.errors.items():
        console.print(f"[red]{count:>8}[/] {kind}", soft_wrap=True)
    if report.uncounted_tokens:
        console.print(
            f"The server counted {report.uncounted_tokens} tokens more than its events showed: it sends several in one "
            "event without token ids, so token rates and gaps are too low.",
            style="yellow",
        )
    if report.client.slow:
        console.print(
            "The client did not keep up (lag or CPU above): these figures are its own. --processes spreads it.",
            style="yellow",
        )


def _latencies(report: Report) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("milliseconds")
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right")
    rows = {
        "to first token": report.ttft_ms,
        "between tokens": report.itl_ms,
        "between pieces": report.pause_ms,
        "per output token": report.tpot_ms,
        "end to end": report.e2e_ms,
        "[dim]client: sent late by[/]": report.client.send_lag_ms,
        "[dim]client: loop late by[/]": report.client.loop_lag_ms,
    }
    for name, values in rows.items():
        table.add_row(name, *_cells(values))
    return table


def _cells(values: Quantiles | None) -> list[str]:
    return ["-"] * 3 if values is None else [f"{value:.2f}" for value in (values.p50, values.p90, values.p99)]


def _totals(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    slo = f"first token ≤ {report.slo.ttft_ms:g} ms, own pauses' p99 ≤ {report.slo.itl_ms:g} ms"
    for name, value in {
        "requests": f"{report.sent} sent, {report.completed} completed, {report.sent - report.completed} failed",
        "rates": f"{report.requests_s:g} requests/s, {report.output_tok_s:g} output tokens/s in {report.window_s:g} s",
        "goodput": f"{report.goodput:.4f} ({slo})",
        "client": f"{100 * report.client.cpu:.0f} % of a CPU in its busiest process",
    }.items():
        table.add_row(f"[dim]{name}[/]", value)
    return table
