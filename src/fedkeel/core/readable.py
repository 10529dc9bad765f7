"""Numbers, times and small tables as a person reads them, in a terminal, a notebook or a spreadsheet."""

import csv
import html
import io
import re
import shlex
from collections.abc import Iterable, Sequence

from fedkeel.core.naming import csv_text, visible

DASH = "–"  # where there is no number


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}"


def short(number: float) -> str:
    """Three digits that count, or all of a large number.

    >>> short(0.07361), short(64), short(1253.24)
    ('0.0736', '64', '1253')
    """
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def shell(words: Iterable[str]) -> str:
    """Words for a shell, in quotes that a person can edit.

    >>> print(shell(["fedkeel", "run", "--data", "digits(train_transform='flip')"]))
    fedkeel run --data "digits(train_transform='flip')"
    """
    double = re.compile(r"[^\"$`\\!]*'[^\"$`\\!]*")
    return " ".join(f'"{word}"' if double.fullmatch(word) else shlex.quote(word) for word in words)


def text_table(caption: str, rows: Sequence[Sequence[object]]) -> str:
    """The rows, if any, under a caption, the first of them the headings."""
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return "\n".join([visible(caption), *(f"  {line}" for line in lines)])


def html_table(caption: str, rows: Sequence[Sequence[object]]) -> str:
    """The same for a notebook. Names are data: nothing in them is markup."""

    def line(cells: Iterable[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(visible(str(cell)))}</{tag}>' for cell in cells)}</tr>"

    if not rows:
        return f"<p>{html.escape(visible(caption))}</p>"
    head, *body = rows
    table = f"<thead>{line(head, 'th')}</thead><tbody>{''.join(line(row, 'td') for row in body)}</tbody>"
    return f"<p>{html.escape(visible(caption))}</p><table>{table}</table>"


def csv_table(rows: Iterable[Iterable[object]]) -> str:
    """The same for a spreadsheet, which must not take a name for a formula. What is None is left empty."""
    buffer = io.StringIO()
    cells = ((csv_text(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
    csv.writer(buffer, lineterminator="\n").writerows(cells)
    return buffer.getvalue()
