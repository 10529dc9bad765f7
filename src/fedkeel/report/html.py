"""The pieces of HTML that a page is made of: the macros of `blocks.html`, and the cells of their tables."""

from __future__ import annotations

from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from fedkeel.experiments.difference import Cell
from fedkeel.experiments.tables import DASH

TEMPLATES = Environment(
    loader=PackageLoader("fedkeel", "report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


def html(macro: str, *given: Any) -> Markup:
    """One of the macros: table, text, items, code, tiles, folded, choice. Text that is given is escaped there."""
    return Markup(getattr(TEMPLATES.get_template("blocks.html").module, macro)(*given))


class Number(NamedTuple):
    """A cell of a table that is sorted by `value`."""

    value: float | str
    text: str
    spread: str = ""
    is_best: bool = False


def number(value: float | None, form: str = "") -> Number:
    """A dash where there is none."""
    return Number("", DASH) if value is None else Number(value, format(value, form))


def measured(cell: Cell | None, *, best: bool = False, scale: float = 100, form: str = ".1f") -> Number:
    """A mean with its spread over seeds; in percent, unless told otherwise."""
    if cell is None:
        return Number("", DASH)
    spread = "" if cell.std is None else f"±{format(scale * cell.std, form)}"
    return Number(cell.mean, format(scale * cell.mean, form), spread, best)
