"""The pieces of HTML that the sections of a page are made of."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from fedkeel.experiments.difference import Cell
from fedkeel.experiments.tables import percent

DASH = "–"


def table(headings: Iterable[str], rows: Iterable[str], caption: str, *, sortable: bool = True) -> str:
    broken = (named(text) if len(text) > 20 else escape(text).replace("/", "/<wbr>") for text in headings)
    heads = "".join(f'<th scope="col">{text}</th>' for text in broken)
    kind = "sortable" if sortable else "plain"
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="note" aria-hidden="true">{escape(caption)}</p>'
    )


def table_row(heading: str, cells: Iterable[str], attributes: str = "") -> str:
    return f'<tr><th scope="row"{attributes}>{heading}</th>{"".join(cells)}</tr>'


def number(text: object, shown: object = None) -> str:
    """A cell that sorts by `text` and shows it, or something else."""
    return f'<td class="n" data-v="{escape(str(text))}">{escape(str(text)) if shown is None else shown}</td>'


def accuracy(cell: Cell | None, *, best: bool = False) -> str:
    if cell is None:
        return number("", DASH)
    spread = f' <span class="spread">±{percent(cell.std)}</span>' if cell.std is not None else ""
    mean = f"<b>{percent(cell.mean)}</b>" if best else percent(cell.mean)
    return number(f"{cell.mean:.6f}", f"{mean}{spread}")


def named(text: str) -> str:
    """A name that may be long: it breaks where its parts meet, if it must."""
    broken = re.sub(r"([_(,+@=])", r"\1<wbr>", escape(text))
    return f'<span class="name">{broken}</span>'


def code(text: str) -> str:
    return f'<div class="code"><pre tabindex="0"><code>{escape(text)}</code></pre></div>'


def folded(summary: str, body: str, attributes: str = "") -> str:
    return f"<details{attributes}><summary>{summary}</summary>{body}</details>"


def listed(texts: Sequence[str], attributes: str = "") -> str:
    return f"<ul{attributes}>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
