"""Why a method wins, as far as the diagnostics tell: their key numbers by method, and sentences that compare two.

What goes together is said, never that one is the cause of the other: a handful of methods cannot show that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fedkeel.experiments.tables import Cell, Results, Row, apart
from fedkeel.report.collect import Group
from fedkeel.report.diagnostics import ALL_RUNS, DiagnosticFigures

NOT_FEDERATED = ("central", "standalone")


@dataclass(frozen=True)
class Reading:
    """The key number of a diagnostic: its value over the seeds that have it, by method."""

    diagnostic: str
    label: str
    better: str | None  # "low", "high", or nothing where neither is
    is_percent: bool
    methods: dict[str, Cell] = field(default_factory=dict)

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
        """Those of these methods that have the best value, as it is printed; none where there is nothing to choose."""
        there = [method for method in methods if method in self.methods]
        if self.better is None or len(there) < 2:
            return []
        choose = min if self.better == "low" else max
        top = self.number(choose(self.methods[method].mean for method in there))
        return [method for method in there if self.number(self.methods[method].mean) == top]

    def lead(self, one: str, other: str) -> float:
        """How far `one` is ahead of `other`: 1 clearly, -1 clearly behind, 0 within the spread or with no good way."""
        a, b = self.methods[one], self.methods[other]
        if self.better is None or not apart(a, b):
            return 0
        return 1 if (a.mean > b.mean) == (self.better == "high") else -1


def readings(group: Group) -> list[Reading]:
    """In the order of the diagnostics; those that two methods have at least."""
    labels = {str(member): member.label for member in group.members}
    found = []
    for diagnostic in group.diagnostics:
        found += [reading for reading in _of(diagnostic, labels) if len(reading.methods) > 1]
    return found


def _of(diagnostic: DiagnosticFigures, labels: dict[str, str]) -> list[Reading]:
    values: dict[str, dict[str, list[float]]] = {}
    about: dict[str, Reading] = {}
    for run, figures in diagnostic.runs.items():
        for key in (figure["key"] for figure in figures if "key" in figure and run != ALL_RUNS):
            label = key["label"]
            about.setdefault(label, Reading(diagnostic.name, label, key["better"], key["percent"]))
            values.setdefault(label, {}).setdefault(labels[run], []).append(key["value"])
    for label, reading in about.items():
        reading.methods.update({method: Cell.of(every) for method, every in values[label].items()})
    return list(about.values())


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
    """How the best method that has it differs from the baseline, and whether that speaks for it; empty without two."""
    pair = rivals(results, reading.methods)
    if pair is None:
        return ""
    best, other = pair
    name, base = results.name(best), results.name(other)
    points = " points" if reading.is_percent else ""
    label = reading.label[0].upper() + reading.label[1:]
    text = f"{label}: {name} {reading.text(best.method)}, {base} {reading.text(other.method)}{points}"
    if reading.better is None:
        return f"{text}."
    if not (ahead := reading.lead(best.method, other.method)):
        return f"{text}; that is within the spread of the seeds."
    if not apart(best.average, other.average):
        return f"{text}; their accuracies are level within the spread."
    way = "lower" if reading.better == "low" else "higher"
    if ahead > 0:
        return f"{text}. {way.capitalize()} is better, so this goes with the lead of {name}."
    return f"{text}. {way.capitalize()} is better, so this does not explain the lead of {name}."


def explanations(group: Group) -> list[str]:
    """For the top of the page: what goes with the lead of the best method, and what does not."""
    results = group.results
    pair = rivals(results)
    if pair is None or not apart(pair[0].average, pair[1].average):
        return []
    best, other = pair
    held = [r for r in readings(group) if best.method in r.methods and other.method in r.methods]

    def listed(ahead: float) -> str:
        chosen = [r for r in held if r.lead(best.method, other.method) == ahead]
        shown = (f"{r.label} ({_short(r, best.method)} against {_short(r, other.method)})" for r in chosen)
        return ", ".join(shown)

    sentences = []
    if goes := listed(1):
        sentences.append(f"What goes with the lead of {results.name(best)} over {results.name(other)}: {goes}.")
    if against := listed(-1):
        sentences.append(f"What speaks against it: {against}.")
    return sentences


def _short(reading: Reading, method: str) -> str:
    return reading.number(reading.methods[method].mean)
