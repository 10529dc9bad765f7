"""Text and tables on a terminal or in a pipe, drawn by rich."""

from collections.abc import Sequence
from typing import IO, Any

from rich import box
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from fedkeel.cli.terminal.output import Line
from fedkeel.core.naming import visible
from fedkeel.experiments.tables import DASH, Results

WIDE = 1000  # a pipe has no edge: a table there is never cut


class PlainConsole(Console):
    """Names are data: nothing in a text is markup, and nothing in it reaches the terminal but letters."""

    def render_str(self, text: str, **options: Any) -> Text:  # every text and every cell passes here
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def console(stream: IO[str]) -> Console:
    """A console that keeps tables whole when nobody's terminal limits them."""
    width = None if stream.isatty() else WIDE
    return PlainConsole(file=stream, width=width, highlight=False, markup=False, emoji=False)


def drawn(line: Line) -> str | Text | rich_table.Table:
    """A table as rich draws it: of results, method by domain, the best of each column is bold."""
    if isinstance(line, str | Text):
        return line
    table = rich_table.Table(box=box.SIMPLE_HEAD, caption=line.caption, caption_justify="left", pad_edge=False)
    if isinstance(line, Results):
        for heading in line.headings:
            table.add_column(_cell(heading), justify="left" if heading == "method" else "right")
        for row in line.rows:
            cells = [_cell(cell or DASH, "bold" if best else "") for cell, best in line.marked(row)]
            table.add_row(_cell(line.name(row)), *cells, *map(_cell, line.traffic(row)))
        return table
    for column, heading in enumerate(line.headings):
        is_number = _are_numbers([str(values[column]) for values in line.rows])
        table.add_column(_cell(heading), justify="right" if is_number else "left", overflow="fold")
    for values in line.rows:
        table.add_row(*map(_cell, values))
    return table


def _are_numbers(cells: Sequence[str]) -> bool:
    known = [cell for cell in cells if cell != DASH]
    return bool(known) and all(cell.replace(".", "").replace("-", "0").isdigit() for cell in known)


def _cell(text: object, style: str = "") -> Text:
    """One line, in which nothing is markup."""
    return Text(visible(str(text)), style=style)
