"""Results on a terminal or in a pipe: plain text and tables."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedkeel.core.naming import visible
from fedkeel.experiments.tables import DASH, Results

WIDE = 1000  # a pipe has no edge: a table there is never cut


class PlainConsole(Console):
    """Names are data: nothing in a text is markup, and nothing in it reaches the terminal but letters."""

    def render_str(self, text: str, **options: Any) -> Text:  # every text and every cell passes here
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def console(stream: IO[str] | None = None) -> Console:
    """Where results go, stdout unless told otherwise; tables stay whole where no terminal limits them."""
    stream = stream or sys.stdout
    width = None if stream.isatty() else WIDE
    return PlainConsole(file=stream, width=width, highlight=False, markup=False, emoji=False)


def results_table(results: Results) -> Table:
    """Method by domain, the best of each column in bold."""
    table = _table(results.caption)
    for heading in results.headings:
        table.add_column(_cell(heading), justify="left" if heading == "method" else "right")
    for row in results.rows:
        cells = [_cell(cell or DASH, "bold" if best else "") for cell, best in results.marked(row)]
        table.add_row(_cell(results.name(row)), *cells, *map(_cell, results.traffic(row)))
    return table


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str | None = None) -> Table:
    """A table of anything; numbers to the right."""
    table = _table(caption)
    for column, heading in enumerate(headings):
        cells = [cell for cell in (str(row[column]) for row in rows) if cell != DASH]
        numbers = bool(cells) and all(cell.replace(".", "").replace("-", "0").isdigit() for cell in cells)
        table.add_column(_cell(heading), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _table(caption: str | None) -> Table:
    return Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)


def _cell(text: object, style: str = "") -> Text:
    """One line, in which nothing is markup."""
    return Text(visible(str(text)), style=style)
