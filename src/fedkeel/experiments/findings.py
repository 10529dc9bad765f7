"""What a table of results shows, in sentences: which method is ahead, by the rule of `experiments.difference`.

They name methods in the order of the table, so that they are the same wherever the conclusions are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fedkeel.experiments.difference import AHEAD, BEHIND, FEWEST, TOO_FEW, UNDECIDED
from fedkeel.experiments.tables import Results, Row, percent

REFERENCES = ("central", "standalone")  # what a federation is measured against
AGAINST = {AHEAD: "Ahead of", BEHIND: "Behind", UNDECIDED: "Undecided against", TOO_FEW: "Too few seeds against"}


def federated(results: Results) -> list[Row]:
    return [row for row in results.rows if row.method.partition("@")[0] not in REFERENCES]


def findings(results: Results) -> list[str]:
    """A sentence for each conclusion, and the rule that they go by."""
    rows = federated(results)
    if not rows:
        return []
    if all(results.difference(*pair).verdict == TOO_FEW for pair in combinations(results.rows, 2)):
        return [f"Fewer than {FEWEST} seeds in common decide nothing: give {FEWEST} or more with --seeds."]
    named: dict[str, Row] = {}  # of one that is there with several options, the best
    for row in sorted(results.rows, key=lambda row: -row.average.mean):
        named.setdefault(row.method.partition("@")[0], row)
    table = Table(results, rows, named.get("fedavg"), named.get("central"))
    sentences = [*table.gap(), *table.against_fedavg(), *table.best()]
    for domain in sorted(results.unseen & {name for row in rows for name in row.domains}):
        sentences += table.unseen(domain)
    return [*sentences, f"Ahead: {results.rule_in_words}."]


@dataclass(frozen=True)
class Table:
    """The rows that are spoken of: on average, or on one domain."""

    results: Results
    federated: Sequence[Row]
    fedavg: Row | None
    central: Row | None
    domain: str | None = None

    def gap(self) -> list[str]:
        if self.central is None or self.fedavg is None:
            return []
        central, own = (percent(row.average.mean) for row in (self.central, self.fedavg))
        name, pooled = self.results.name(self.fedavg), f"training on the pooled data ({central})"
        verdict = self.results.difference(self.fedavg, self.central).verdict
        if verdict == BEHIND:
            return [f"The shift costs {name} {float(central) - float(own):.1f} points against {pooled}."]
        return [f"{name} ({own}) against {pooled}: {verdict}."]

    def against_fedavg(self) -> list[str]:
        if self.fedavg is None:
            return []
        name, found = self.results.name(self.fedavg), dict[str, list[Row]]()
        for row in (row for row in self.federated if row is not self.fedavg):
            found.setdefault(self.results.difference(row, self.fedavg, self.domain).verdict, []).append(row)
        return [f"{words} {name}: {self.listed(found[key])}." for key, words in AGAINST.items() if key in found]

    def best(self) -> list[str]:
        """Where that is more than what was said of fedavg."""
        said = [row for row in self.federated if row is self.fedavg]
        leader = [row for row in self.federated if self.results.leads(row, self.federated, self.domain)]
        if not leader or leader == said or len(self.federated) < 2 + len(said):
            return []
        return [f"Ahead of every other federated method: {self.listed(leader)}."]

    def unseen(self, domain: str) -> list[str]:
        """The same questions of a domain that no client has."""
        own = replace(self, domain=domain, federated=[row for row in self.federated if domain in row.domains])
        said = [*own.against_fedavg(), *own.best()]
        return [f"On '{domain}', which no client has: {text[0].lower()}{text[1:]}" for text in said]

    def listed(self, rows: Sequence[Row]) -> str:
        """With their numbers. A method's options are in its name only where another row has the same method."""
        cells = ((row, row.domains[self.domain] if self.domain else row.average) for row in rows)
        return ", ".join(f"{self.results.name(row)} ({percent(cell.mean)})" for row, cell in cells)
