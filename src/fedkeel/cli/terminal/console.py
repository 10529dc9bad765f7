"""Text and tables on a terminal or in a pipe, drawn by rich."""

from collections.abc import Sequence

from rich import box
from rich import table as rich_table
from rich.text import Text

from fedkeel.cli.terminal.output import Line
from fedkeel.core.naming import visible
from fedkeel.experiments.tables import DASH, Results
from fedkeel.runs.progress import console as console


def drawn(line: Line) -> str | Text | rich_table.Table:
    """A table as rich draws it: of results, method by domain, the best of each column bold, and starred for a pipe."""
    if isinstance(line, str | Text):
        return line
    caption = line.legend() if isinstance(line, Results) else line.caption
    table = rich_table.Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", pad_edge=False)
    if isinstance(line, Results):
        headings, *rows = line.lines()
        for heading in headings:
            table.add_column(_cell(heading), justify="left" if heading == "method" else "right")
        for method, *cells in rows:
            table.add_row(_cell(method), *(_cell(text, "bold" if text.endswith("*") else "") for text in cells))
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
