"""What a table of results shows, in sentences: only what its spread and its test images bear out.

Two numbers count as different where both hold: their ranges over seeds, mean plus and minus deviation, do not touch;
and they differ by more than another draw of as many test images could change, the 95 % interval of a difference of two
shares. Sentences name methods in the order of the table, so that they are the same wherever the conclusions are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean

from fedkeel.experiments.tables import Cell, Results, Row, apart, rounded

REFERENCES = ("central", "standalone")  # what a federation is measured against


def findings(results: Results, images: Mapping[str, int] | None = None) -> list[str]:
    """A sentence for each conclusion, from the numbers as printed. `images`: the test images of each domain."""
    rows = [
        replace(
            row,
            method=results.name(row),
            average=printed(row.average),
            domains={name: printed(cell) for name, cell in row.domains.items()},
        )
        for row in results.rows
    ]
    named: dict[str, Row] = {}  # of one that is there with several options, the best
    for row in sorted(rows, key=lambda row: -row.average.mean):
        named.setdefault(row.method.partition("@")[0], row)
    federated = [row for row in rows if row.method.partition("@")[0] not in REFERENCES]
    if not federated:
        return []
    if all(row.average.std is None for row in rows):
        return ["One seed tells no two methods apart: give several with --seeds."]
    seen = [domain for domain in results.domains if domain not in results.unseen]
    table = Table(federated, named.get("fedavg"), named.get("central"), named.get("standalone"), images or {})
    sentences = [*table.gap(seen), *table.ahead(seen), *table.ends(seen), *table.gain(seen), *table.hardest(seen)]
    for domain in sorted(results.unseen & {name for row in federated for name in row.domains}):
        sentences += table.unseen(domain)
    return sentences


@dataclass(frozen=True)
class Table:
    """The rows that are spoken of, in %."""

    federated: Sequence[Row]
    fedavg: Row | None
    central: Row | None
    standalone: Row | None
    images: Mapping[str, int]

    def above(self, one: Cell, other: Cell, domains: Sequence[str]) -> bool:
        """Whether the first is higher, of two accuracies that are means over these domains."""
        sizes = [self.images.get(name, 0) for name in domains]
        return apart(one, other) and one.mean - other.mean > margin(one, other, sizes)

    def gap(self, domains: Sequence[str]) -> list[str]:
        if self.central is None or self.fedavg is None:
            return []
        central, own = self.central.average, self.fedavg.average
        pooled = f"training on the pooled data ({central.mean:.1f})"
        if self.above(own, central, domains):
            return [f"{listed([self.fedavg])} is ahead of {pooled}."]
        if self.above(central, own, domains):
            return [f"The shift costs {self.fedavg.method} {central.mean - own.mean:.1f} points against {pooled}."]
        return [f"{listed([self.fedavg])} and {pooled} are level within the spread."]

    def ahead(self, domains: Sequence[str]) -> list[str]:
        if self.fedavg is None or len(self.federated) < 2:
            return []
        if ahead := [row for row in self.federated if self.above(row.average, self.fedavg.average, domains)]:
            return [f"Ahead of {self.fedavg.method} by more than the spread: {listed(ahead)}."]
        return [f"No method here is ahead of {self.fedavg.method} by more than the spread."]

    def ends(self, domains: Sequence[str]) -> list[str]:
        """The first and the last, where they stand apart from all others; what others are ahead of is said before."""
        found = []
        for row in self.federated:
            others = [other for other in self.federated if other is not row]
            if others and all(self.above(row.average, other.average, domains) for other in others):
                found.append(f"Best on average, by more than the spread: {listed([row])}.")
            is_last = len(others) > 1 and all(self.above(other.average, row.average, domains) for other in others)
            if is_last and (self.fedavg is None or row.method != self.fedavg.method):
                found.append(f"Last on average, by more than the spread: {listed([row])}.")
        return sorted(found)

    def gain(self, domains: Sequence[str]) -> list[str]:
        if self.standalone is None:
            return []
        alone, most = self.standalone.domains, []
        for domain in (name for name in domains if name in alone):
            column = [row.domains[domain] for row in self.federated if domain in row.domains]
            if 2 * sum(self.above(cell, alone[domain], [domain]) for cell in column) > len(self.federated):
                most.append(f"'{domain}' ({alone[domain].mean:.1f} alone)")
        if most:
            named = ", ".join(most)
            return [f"Most methods are ahead of the client that trains alone by more than the spread on {named}."]
        return ["On no domain are most methods ahead of the client that trains alone by more than the spread."]

    def hardest(self, domains: Sequence[str]) -> list[str]:
        """Over the federated methods, with the mean of their spreads; of domains that each of them was tested on."""
        means = {}
        for domain in domains:
            column = [row.domains[domain] for row in self.federated if domain in row.domains]
            if len(column) == len(self.federated):
                means[domain] = Cell(fmean(cell.mean for cell in column), fmean(cell.std or 0.0 for cell in column))
        hardest, *rest = sorted(means, key=lambda domain: means[domain].mean) or [""]
        fewest = min((hardest, *rest[:1]), key=lambda domain: self.images.get(domain, 0))
        if not rest or not self.above(means[rest[0]], means[hardest], [fewest]):
            return []
        return [f"The hardest domain is '{hardest}': {means[hardest].mean:.1f} % over the federated methods."]

    def unseen(self, domain: str) -> list[str]:
        """The same questions of a domain that no client has."""
        here = [replace(row, average=row.domains[domain]) for row in self.federated if domain in row.domains]
        fedavg = [row for row in here if self.fedavg and row.method == self.fedavg.method]
        own = replace(self, federated=here, fedavg=fedavg[0] if fedavg else None)
        said = [*own.ahead([domain]), *own.ends([domain])]
        texts = [text[0].lower() + text[1:].replace(" on average", "") for text in said]
        return [f"On '{domain}', which no client has: {text}" for text in texts]


def margin(one: Cell, other: Cell, images: Sequence[int]) -> float:
    """How far two means over domains, in %, can be apart for the choice of their test images alone.

    >>> round(margin(Cell(80.0, 1.0), Cell(80.0, 1.0), [90, 90, 90, 90]), 1)
    5.8
    """
    if not images or not all(images):
        return 0.0
    p = (one.mean + other.mean) / 200
    return 196 * sqrt(2 * p * (1 - p) * fmean(1 / count for count in images) / len(images))


def printed(cell: Cell) -> Cell:
    """In % as it stands in the table, so that a reader who does the sums finds the same."""
    return Cell(rounded(cell), None if cell.std is None else rounded(Cell(cell.std, None)))


def listed(rows: Sequence[Row]) -> str:
    """Names with their averages. A method's options are in its name only where another row has the same method."""
    return ", ".join(f"{row.method} ({row.average.mean:.1f})" for row in rows)
