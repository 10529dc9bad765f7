"""Why a method wins, as far as the diagnostics tell: their key numbers by method, sentences that compare two, and the
section with the diagnostics by the question that they answer.

What goes together is said, never that one is the cause of the other: a handful of methods cannot show that.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape

from fedkeel.experiments.difference import AHEAD, BEHIND, RULE, Cell, Difference, unbeaten
from fedkeel.experiments.findings import federated
from fedkeel.experiments.tables import Results, Row, competes
from fedkeel.report.collect import Group
from fedkeel.report.diagnostics import CIRCUMSTANCES, QUESTIONS, DiagnosticFigures, place
from fedkeel.report.figures import Figures, first_shown
from fedkeel.report.html import DASH, accuracy, folded, table, table_row


@dataclass(frozen=True)
class Reading:
    """The key number of a diagnostic, by method and seed."""

    diagnostic: str
    label: str
    better: str | None  # "low", "high", or nothing where neither is
    is_percent: bool
    values: dict[str, dict[int, float]] = field(default_factory=dict)

    @cached_property
    def methods(self) -> dict[str, Cell]:
        return {method: Cell(values) for method, values in self.values.items()}

    def text(self, method: str) -> str:
        cell = self.methods[method]
        return self.number(cell.mean) + (f" \u00b1{self.number(cell.std, 2)}" if cell.std is not None else "")

    def number(self, value: float, digits: int = 3) -> str:
        if self.is_percent:
            return f"{100 * value:.1f}"
        return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"

    @property
    def heading(self) -> str:
        unit = ", points" if self.is_percent else ""
        return self.label + unit + {"low": " \u2193", "high": " \u2191"}.get(self.better or "", "")

    def best(self, methods: Sequence[str]) -> set[str]:
        """Those of these methods that none of them is ahead of."""
        there = {method: self.methods[method] for method in methods if method in self.methods and self.better}
        return unbeaten(there, lower=self.better == "low")

    def verdict(self, one: str, other: str) -> str:
        """Of `one` against `other`; nothing where neither way is the better one."""
        a, b = (self.methods[method] for method in ((other, one) if self.better == "low" else (one, other)))
        return Difference.of(a, b).verdict if self.better else ""


def readings(group: Group) -> list[Reading]:
    """In the order of the diagnostics."""
    members = {str(member): (member.label, member.seed) for member in group.members}
    found: dict[tuple[str, str], Reading] = {}
    for diagnostic in group.diagnostics:
        for run, figures in diagnostic.runs.items():
            for key in (figure["key"] for figure in figures if "key" in figure):
                reading = Reading(diagnostic.name, key["label"], key["better"], key["percent"])
                method, seed = members.get(run, (run, 0))
                known = found.setdefault((reading.diagnostic, reading.label), reading)
                known.values.setdefault(method, {})[seed] = key["value"]
    return list(found.values())


def rivals(results: Results, among: Collection[str] | None = None) -> tuple[Row, Row] | None:
    """The best federated method, and what it is held against: fedavg at its best, or else the last of them.

    `among`: only these methods, such as those of which something was recorded.
    """
    rows = [row for row in federated(results) if among is None or row.method in among]
    if len(rows) < 2:
        return None
    ranked = sorted(rows, key=lambda row: -row.average.mean)
    baseline = [row for row in ranked[1:] if row.method.partition("@")[0] == "fedavg"]
    return ranked[0], baseline[0] if baseline else ranked[-1]


def sentence(reading: Reading, results: Results) -> str:
    """How the best method that has it compares with the baseline; without two methods, the number by itself where a
    single run has it, else nothing."""
    pair, points = rivals(results, reading.methods), " points" if reading.is_percent else ""
    label = reading.label[0].upper() + reading.label[1:]
    way = {"low": "lower is better", "high": "higher is better"}.get(reading.better or "", "")
    if pair is None:
        single, *others = (value for values in reading.values.values() for value in values.values())
        text = f"{label}: {reading.number(single)}{points}"
        return "" if others else f"{text}; {way}." if way else f"{text}."
    best, other = pair
    name, base = results.name(best), results.name(other)
    text = f"{label}: {name} {reading.text(best.method)}, {base} {reading.text(other.method)}{points}"
    if not way:
        return f"{text}."
    verdict = reading.verdict(best.method, other.method)
    return f"{text}; {way}: {f'{name} is {verdict}' if verdict in (AHEAD, BEHIND) else verdict}."


def explanations(group: Group) -> list[str]:
    """For the top of the page: what goes with the lead of the best method, and what does not."""
    results = group.results
    pair = rivals(results)
    if pair is None or not results.leads(pair[0], pair[1:]):
        return []
    one, other = (row.method for row in pair)
    leads: dict[str, list[str]] = {}
    for reading in readings(group):
        if one in reading.methods and other in reading.methods:
            numbers = (reading.number(reading.methods[method].mean) for method in (one, other))
            leads.setdefault(reading.verdict(one, other), []).append(f"{reading.label} ({' against '.join(numbers)})")
    sentences = []
    if AHEAD in leads:
        names = " over ".join(map(results.name, pair))
        sentences.append(f"What goes with the lead of {names}: {', '.join(leads[AHEAD])}.")
    if BEHIND in leads:
        sentences.append(f"What speaks against it: {', '.join(leads[BEHIND])}.")
    return sentences


# -- the section -----------------------------------------------------------------------------------------------------
def why_section(group: Group, page: Figures) -> str:
    found, results = readings(group), group.results
    asked: dict[str, list[str]] = {}
    for diagnostic in group.diagnostics:
        mine = [sentence(reading, results) for reading in found if reading.diagnostic == diagnostic.name]
        block = diagnostic_block(diagnostic, page, [*filter(None, mine)], group)
        asked.setdefault(list(QUESTIONS)[place(diagnostic.name)[0]], []).append(block)
    compared = [reading for reading in found if len(reading.methods) > 1]
    parts = [key_table(group, compared)] if compared and results.rows else []
    for question, blocks in asked.items():
        title, body = f"<h4>{question}</h4>", "".join(blocks)
        is_folded = question == CIRCUMSTANCES and len(asked) > 1
        kind = ' class="question"'
        parts.append(folded(title, body, kind) if is_folded else f"<div{kind}>{title}{body}</div>")
    return "".join(parts)


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
        "\u2193 lower is better, \u2191 higher is better; bold: no other is ahead of it, "
        f"{RULE}; none where nothing is decided.{few} What goes with accuracy need not cause it."
    )
    body = table(["", *(results.name(row) for row in columns)], rows, caption, sortable=False)
    return f'<div class="keys">{body}</div>'


def reading_cell(reading: Reading, method: str, *, best: bool) -> str:
    if method not in reading.methods:
        return f'<td class="n">{DASH}</td>'
    mean, _, spread = reading.text(method).partition(" ")
    mean = f"<b>{mean}</b>" if best else mean
    return f'<td class="n">{mean} <span class="spread">{spread}</span></td>'


def first_two(group: Group, runs: Iterable[str]) -> tuple[int, int | None]:
    """The places of the runs that are beside each other at first: those of two methods."""
    methods, first = {str(member): member.label for member in group.members}, dict[str | None, int]()
    for number, run in enumerate(runs):
        first.setdefault(methods.get(run), number)
    pair = rivals(group.results, [method for method in first if method is not None])
    one, other = [first[row.method] for row in pair] if pair else [*first.values(), None][:2]
    return one or 0, other


def diagnostic_block(diagnostic: DiagnosticFigures, page: Figures, sentences: Sequence[str], group: Group) -> str:
    paper = f' <span class="paper">{escape(diagnostic.paper)}</span>' if diagnostic.paper else ""
    findings = "".join(f'<p class="finding">{escape(text)}</p>' for text in sentences)
    figures = page.beside(diagnostic.runs, *first_two(group, diagnostic.runs))
    return (
        f'<article class="diagnostic"><h5>{escape(diagnostic.title)}</h5>{findings}'
        f'<p class="what">{escape(diagnostic.what)}{paper}</p>{figures}</article>'
    )
