"""The section that says why: the key numbers of all methods, then the diagnostics by the question that they answer."""

from collections.abc import Sequence
from html import escape

from fedkeel.experiments.tables import competes
from fedkeel.report.collect import Group
from fedkeel.report.diagnostics import ALL_RUNS, CIRCUMSTANCES, QUESTIONS, DiagnosticFigures, place
from fedkeel.report.html import DASH, accuracy, folded, section, table, table_row
from fedkeel.report.numbers import first_shown
from fedkeel.report.why import Reading, readings, rivals, sentence


def why_section(group: Group, name: str) -> str:
    found, results = readings(group), group.results
    asked: dict[str, list[str]] = {}
    for number, diagnostic in enumerate(group.diagnostics):
        mine = [reading for reading in found if reading.diagnostic == diagnostic.name]
        sentences = [text for reading in mine if (text := sentence(reading, results))] or single_readings(diagnostic)
        block = diagnostic_block(diagnostic, f"{name} {number}", sentences, group)
        asked.setdefault(list(QUESTIONS)[place(diagnostic.name)[0]], []).append(block)
    parts = [key_table(group, found)] if found and results.rows else []
    for question, blocks in asked.items():
        title, body = f"<h4>{question}</h4>", "".join(blocks)
        is_folded = question == CIRCUMSTANCES and len(asked) > 1
        kind = ' class="question"'
        parts.append(folded(title, body, kind) if is_folded else f"<div{kind}>{title}{body}</div>")
    return section(f"{name}-diagnostics", "Why: what the diagnostics say", "".join(parts))


def key_table(group: Group, found: Sequence[Reading]) -> str:
    """A row for each number: their names are long, and those of methods are short."""
    results, shown, pair = group.results, first_shown(group), rivals(group.results) or ()
    # The two that the sentences are about come first, so that a phone shows them.
    columns = [*pair, *(row for row in results.rows if row.method in shown and row not in pair)]
    competing = [row.method for row in results.rows if competes(row)]
    rows = [table_row("accuracy, %", (accuracy(row.average) for row in columns))]
    for reading in found:
        top = reading.best(competing)
        cells = (reading_cell(reading, row.method, best=row.method in top) for row in columns)
        rows.append(table_row(escape(reading.heading), cells))
    few = f" Of {len(results.rows)} methods {len(columns)} are shown." if len(columns) < len(results.rows) else ""
    caption = (
        "One number of each diagnostic, at the last round it was recorded in; mean over the seeds that have it. "
        f"\u2193 lower is better, \u2191 higher is better, the best in bold.{few} What goes with accuracy need not "
        "cause it."
    )
    body = table(["", *(results.name(row) for row in columns)], rows, caption, sortable=False)
    return f'<div class="keys">{body}</div>'


def reading_cell(reading: Reading, method: str, *, best: bool) -> str:
    if method not in reading.methods:
        return f'<td class="n">{DASH}</td>'
    mean, _, spread = reading.text(method).partition(" ")
    mean = f"<b>{mean}</b>" if best else mean
    return f'<td class="n">{mean} <span class="spread">{spread}</span></td>'


def single_readings(diagnostic: DiagnosticFigures) -> list[str]:
    """Of a report in which no two methods can be compared: the number by itself."""
    if len(diagnostic.runs) > 1:
        return []
    keys = [figure["key"] for figures in diagnostic.runs.values() for figure in figures if "key" in figure]
    way = {"low": "; lower is better", "high": "; higher is better"}
    return [
        f"{key['label'][0].upper()}{key['label'][1:]}: "
        + (f"{100 * key['value']:.1f} points" if key["percent"] else f"{key['value']:.3g}")
        + f"{way.get(key['better'], '')}."
        for key in keys
    ]


def diagnostic_block(diagnostic: DiagnosticFigures, anchor: str, sentences: Sequence[str], group: Group) -> str:
    """What the diagnostic says, and which runs' figures are beside each other at first: those of two methods."""
    runs = list(diagnostic.runs)
    methods = {str(member): member.label for member in group.members}
    first: dict[str | None, int] = {}  # run of each method
    for number, run in enumerate(runs):
        first.setdefault(methods.get(run), number)
    pair = rivals(group.results, [method for method in first if method is not None])
    one, other = [first[row.method] for row in pair] if pair else [*first.values(), None][:2]

    def options(selected: int | None) -> str:
        marks = (" selected" if number == selected else "" for number in range(len(runs)))
        numbered = enumerate(zip(runs, marks, strict=True))
        return "".join(f'<option value="{i}"{mark}>{escape(run)}</option>' for i, (run, mark) in numbered)

    pick = f'<label>Run <select data-run="0">{options(one)}</select></label>'
    if len(runs) > 1:
        every = f'<option value="">nothing</option>{options(other)}'
        pick += f'<label>beside <select data-run="1">{every}</select></label>'
    hidden = "" if runs != [ALL_RUNS] else ' class="unseen"'
    paper = f' <span class="paper">{escape(diagnostic.paper)}</span>' if diagnostic.paper else ""
    findings = "".join(f'<p class="finding">{escape(text)}</p>' for text in sentences)
    return (
        f'<article class="diagnostic" data-diagnostic="{anchor}"><h5>{escape(diagnostic.title)}</h5>{findings}'
        f'<p class="what">{escape(diagnostic.what)}{paper}</p>'
        f'<div{hidden}><div class="controls" data-js hidden>{pick}</div></div><div class="beside"></div></article>'
    )
