"""Why a method wins, as far as the diagnostics tell: their key numbers by method, sentences that compare two, and the
section with the diagnostics by the question that they answer.

What goes together is said, never that one is the cause of the other: a handful of methods cannot show that.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape

from fedkeel.experiments.tables import Cell, Results, Row, apart, competes
from fedkeel.report.collect import Group
from fedkeel.report.diagnostics import CIRCUMSTANCES, QUESTIONS, DiagnosticFigures, place
from fedkeel.report.figures import Figures, first_shown
from fedkeel.report.html import DASH, accuracy, folded, table, table_row

NOT_FEDERATED = ("central", "standalone")


@dataclass(frozen=True)
class Reading:
    """The key number of a diagnostic: its value on each seed that has it, by method."""

    diagnostic: str
    label: str
    better: str | None  # "low", "high", or nothing where neither is
    is_percent: bool
    values: dict[str, list[float]] = field(default_factory=dict)

    @cached_property
    def methods(self) -> dict[str, Cell]:
        return {method: Cell.of(values) for method, values in self.values.items()}

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

    def best(self, methods: Sequence[str]) -> list[str]:
        """Those of these methods that have the best value, and those level with it; none where nothing is to choose."""
        there = [method for method in methods if method in self.methods]
        if self.better is None or len(there) < 2:
            return []
        choose = min if self.better == "low" else max
        top = choose(there, key=lambda method: self.methods[method].mean)
        best = self.methods[top]
        return [m for m in there if m == top or self.methods[m].is_level(best) or self.methods[m].mean == best.mean]

    def lead(self, one: str, other: str) -> float:
        """How far `one` is ahead of `other`: 1 clearly, -1 clearly behind, 0 within the spread or with no good way."""
        a, b = self.methods[one], self.methods[other]
        if self.better is None or not apart(a, b):
            return 0
        return 1 if (a.mean > b.mean) == (self.better == "high") else -1


def readings(group: Group) -> list[Reading]:
    """In the order of the diagnostics."""
    methods, found = {str(member): member.label for member in group.members}, dict[tuple[str, str], Reading]()
    for diagnostic in group.diagnostics:
        for run, figures in diagnostic.runs.items():
            for key in (figure["key"] for figure in figures if "key" in figure):
                reading = Reading(diagnostic.name, key["label"], key["better"], key["percent"])
                values = found.setdefault((reading.diagnostic, reading.label), reading).values
                values.setdefault(methods.get(run, run), []).append(key["value"])
    return list(found.values())


def rivals(results: Results, among: Collection[str] | None = None) -> tuple[Row, Row] | None:
    """The best federated method, and what it is held against: fedavg at its best, or else the last of them.

    `among`: only these methods, such as those of which something was recorded.
    """
    rows = [row for row in results.rows if among is None or row.method in among]
    federated = [row for row in rows if row.method.partition("@")[0] not in NOT_FEDERATED]
    if len(federated) < 2:
        return None
    ranked = sorted(federated, key=lambda row: -row.average.mean)
    baseline = [row for row in ranked[1:] if row.method.partition("@")[0] == "fedavg"]
    return ranked[0], baseline[0] if baseline else ranked[-1]


def sentence(reading: Reading, results: Results) -> str:
    """How the best method that has it differs from the baseline, and whether that speaks for it; without two methods,
    the number by itself where a single run has it, else nothing."""
    pair, points = rivals(results, reading.methods), " points" if reading.is_percent else ""
    label = reading.label[0].upper() + reading.label[1:]
    way = {"low": "lower is better", "high": "higher is better"}.get(reading.better or "", "")
    if pair is None:
        single, *others = (value for values in reading.values.values() for value in values)
        text = f"{label}: {reading.number(single)}{points}"
        return "" if others else f"{text}; {way}." if way else f"{text}."
    best, other = pair
    name, base = results.name(best), results.name(other)
    text = f"{label}: {name} {reading.text(best.method)}, {base} {reading.text(other.method)}{points}"
    if not way:
        return f"{text}."
    if not (ahead := reading.lead(best.method, other.method)):
        return f"{text}; that is within the spread of the seeds."
    if not apart(best.average, other.average):
        return f"{text}; their accuracies are level within the spread."
    verb = "goes with" if ahead > 0 else "does not explain"
    return f"{text}. {way.capitalize()}, so this {verb} the lead of {name}."


def explanations(group: Group) -> list[str]:
    """For the top of the page: what goes with the lead of the best method, and what does not."""
    results = group.results
    pair = rivals(results)
    if pair is None or not apart(pair[0].average, pair[1].average):
        return []
    one, other = (row.method for row in pair)
    leads: dict[float, list[str]] = {}
    for reading in readings(group):
        if one in reading.methods and other in reading.methods:
            numbers = (reading.number(reading.methods[method].mean) for method in (one, other))
            leads.setdefault(reading.lead(one, other), []).append(f"{reading.label} ({' against '.join(numbers)})")
    sentences = []
    if 1 in leads:
        names = " over ".join(map(results.name, pair))
        sentences.append(f"What goes with the lead of {names}: {', '.join(leads[1])}.")
    if -1 in leads:
        sentences.append(f"What speaks against it: {', '.join(leads[-1])}.")
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
        "\u2193 lower is better, \u2191 higher is better, bold the best and what is level with it."
        f"{few} What goes with accuracy need not cause it."
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
