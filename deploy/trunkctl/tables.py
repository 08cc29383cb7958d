"""Tables on the terminal."""

from rich.console import Console
from rich.table import Table

MOST_CELLS = 10_000  # of a line


def show_table(table: Table) -> None:
    """Prints a table whose cells stay whole, each row on a line of its own: an id that is broken over lines is of no
    use. A narrower terminal wraps whole lines."""
    Console(highlight=False, width=MOST_CELLS).print(table)
