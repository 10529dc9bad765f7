"""Why a method wins, as far as the diagnostics tell: their key numbers by method, and sentences that compare two.

What goes together is said, never that one is the cause of the other: a handful of methods cannot show that.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fedkeel.experiments.tables import Cell, Results, Row, apart
from fedkeel.report.collect import Group
from fedkeel.report.diagnostics import ALL_RUNS

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
        values: dict[str, dict[str, list[float]]] = {}
        about: dict[str, Reading] = {}
        for run, figures in diagnostic.runs.items():
            for key in (figure["key"] for figure in figures if "key" in figure and run != ALL_RUNS):
                label = key["label"]
                about.setdefault(label, Reading(diagnostic.name, label, key["better"], key["percent"]))
                values.setdefault(label, {}).setdefault(labels[run], []).append(key["value"])
        for label, reading in about.items():
            reading.methods.update({method: Cell.of(every) for method, every in values[label].items()})
        found += [reading for reading in about.values() if len(reading.methods) > 1]
    return found


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
    way = "Lower" if reading.better == "low" else "Higher"
    verb = "goes with" if ahead > 0 else "does not explain"
    return f"{text}. {way} is better, so this {verb} the lead of {name}."


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
