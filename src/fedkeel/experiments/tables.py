"""The results of runs as a table: method by domain, mean and spread over seeds.

Numbers only; `fedkeel.cli.terminal.output` draws them on a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedkeel.core.naming import markdown_text, visible
from fedkeel.core.readable import DASH as DASH
from fedkeel.core.readable import csv_table
from fedkeel.core.readable import percent as percent
from fedkeel.experiments.difference import AHEAD, FEWEST, RULE, Cell, Difference, unbeaten
from fedkeel.runs.summary import RULES, SHARES, SOURCES, by_metric, tested_images, weakest

if TYPE_CHECKING:
    from fedkeel.runs.run import Run


@dataclass(frozen=True)
class RoundCost:
    """What a round costs on the network, on average over rounds and seeds.

    Bytes from and to all of its clients together, everything that a method sends or asks included, and exchanges with
    them beside the training itself. Sending the model out to be tested is not counted.
    """

    bytes_up: float
    bytes_down: float
    extra_exchanges: float

    @staticmethod
    def of(summaries: Sequence[Mapping[str, Any]]) -> RoundCost | None:
        """None where a run has not counted it."""
        keys = ("bytes_up", "bytes_down", "questions")
        if any(key not in summary for summary in summaries for key in (*keys, "rounds")):
            return None
        rounds = sum(summary["rounds"] for summary in summaries)
        return RoundCost(*(sum(summary[key] for summary in summaries) / rounds for key in keys))

    @property
    def megabytes(self) -> str:
        count = (self.bytes_up + self.bytes_down) / 1e6
        return f"{count:.3g}" if count < 100 else f"{count:.0f}"


@dataclass(frozen=True)
class Row:
    """One method's results over its seeds."""

    method: str
    seeds: list[int]
    domains: dict[str, Cell]
    average: Cell
    traffic: RoundCost | None = None
    epsilon: float | None = None  # the largest of its seeds, where runs were private
    randomness: str | None = None  # what that rests on: the run's seed, if it does for one of its seeds
    diverged: tuple[str, ...] = ()  # domains on which the test loss of a seed is not finite

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "seeds": self.seeds,
            "domains": {name: cell.to_dict() for name, cell in self.domains.items()},
            "average": self.average.to_dict(),
            "traffic_per_round": asdict(self.traffic) if self.traffic else None,
            **({"epsilon": self.epsilon, "randomness": self.randomness} if self.epsilon is not None else {}),
            **({"diverged_domains": list(self.diverged)} if self.diverged else {}),
        }


@dataclass(frozen=True)
class Results:
    """A table of results: a row for each method, in the order given, and a column for each domain."""

    rows: list[Row]
    domains: list[str]
    unseen: frozenset[str]  # domains that were never trained on and do not count in the average
    rule: tuple[str, ...]  # which round the numbers are from, `Config.result`; several, when the runs differ
    untested: frozenset[str] = frozenset()  # domains in which a run has no number
    metric: str = "accuracy"
    lower: bool = False  # is better
    on: tuple[str, ...] = ("test",)  # samples that the numbers are of
    images: Mapping[str, int] = field(default_factory=dict)  # that each domain was tested on, where that is known

    @staticmethod
    def of(summaries: Iterable[tuple[str, int, Mapping[str, Any]]]) -> Results:
        """From (label, seed, summary) of finished runs; runs with one label make one row."""
        by_label: dict[str, dict[int, Mapping[str, Any]]] = {}
        for label, seed, summary in summaries:
            by_label.setdefault(label, {})[seed] = summary
        every = [summary for group in by_label.values() for summary in group.values()]
        untested, unseen = _names(every, "untested_domains"), frozenset(_names(every, "unseen_domains"))
        return Results(
            rows=[_row(label, group) for label, group in by_label.items()],
            # The unseen domains last, beside the average that leaves them out.
            domains=sorted(_names(every, "domains") | untested, key=lambda name: name in unseen),
            unseen=unseen,
            rule=tuple(dict.fromkeys(str(summary["result"]) for summary in every)),
            untested=frozenset(untested),
            on=tuple(dict.fromkeys(str(summary.get("evaluated_on", "test")) for summary in every)) or ("test",),
        )

    @staticmethod
    def by(metric: str, runs: Sequence[tuple[str, Run]]) -> Results:
        """From finished runs with their labels, by a measure that all of them have."""
        lower = metric != "accuracy" and any(metric in run.measures.lower_is_better for _, run in runs)
        found = Results.of((label, run.config.seed, by_metric(run, metric)) for label, run in runs)
        # Only what is an accuracy, and can be told from another one, is asked what other images could change.
        asked = metric == "accuracy" and len([row for row in found.rows if len(row.seeds) >= FEWEST]) > 1
        known = filter(None, (tested_images(run) for _, run in runs if asked))
        return replace(found, metric=metric, lower=lower, images=next(known, {}))

    @property
    def headings(self) -> list[str]:
        columns = (f"{name} (unseen)" if name in self.unseen else name for name in self.domains)
        return ["method", *columns, "average", *self.costs]

    @property
    def costs(self) -> list[str]:
        """The columns of what a round costs, as far as the runs have something to say there."""
        shown = {
            "MB/round": any(row.traffic for row in self.rows),
            "exchanges/round": any(row.traffic and row.traffic.extra_exchanges for row in self.rows),
            "epsilon": any(row.epsilon is not None for row in self.rows),
        }
        return [name for name, is_shown in shown.items() if is_shown]

    def traffic(self, row: Row) -> list[str]:
        """A row's entries in `costs`."""
        entries = {"epsilon": "" if row.epsilon is None else f"{row.epsilon:.3g}"}
        if row.traffic:  # the training itself is an exchange
            entries |= {"MB/round": row.traffic.megabytes, "exchanges/round": f"{1 + row.traffic.extra_exchanges:.3g}"}
        return [entries.get(column, "") for column in self.costs]

    def cells(self, row: Row) -> list[Cell | None]:
        """A row's cells, in the order of the columns."""
        return [*(row.domains.get(name) for name in self.domains), row.average]

    def name(self, row: Row) -> str:
        """The row's method without its own options, unless two rows would read the same."""
        short = row.method.partition("@")[0]
        return short if sum(other.method.partition("@")[0] == short for other in self.rows) == 1 else row.method

    def difference(self, one: Row, other: Row, domain: str | None = None) -> Difference:
        """Of two methods, on average or on a domain; positive where the first is better."""
        cells = [row.domains.get(domain) if domain else row.average for row in (one, other)]
        a, b = (cell or Cell({}) for cell in (reversed(cells) if self.lower else cells))
        return Difference.of(a, b, self._images(domain))

    def leads(self, row: Row, others: Iterable[Row], domain: str | None = None) -> bool:
        """Whether it is ahead of each of these; of itself it need not be."""
        return all(self.difference(row, other, domain).verdict == AHEAD for other in others if other is not row)

    def _images(self, domain: str | None) -> list[int]:
        names = [domain] if domain else [name for name in self.domains if name not in self.unseen]
        return [self.images.get(name, 0) for name in names]

    @cached_property
    def _best(self) -> list[set[str]]:
        """The methods that are marked, column by column; training on the pooled data does not compete."""
        found = []
        for place, domain in enumerate([*self.domains, None]):
            cells = {row.method: self.cells(row)[place] for row in self.rows if competes(row)}
            column = {name: cell for name, cell in cells.items() if cell}
            found.append(unbeaten(column, self._images(domain), lower=self.lower))
        return found

    def marked(self, row: Row) -> list[tuple[Cell | None, bool]]:
        """A row's cells, each with whether no other method is ahead of it; of few seeds none is marked."""
        return [(cell, row.method in best) for cell, best in zip(self.cells(row), self._best, strict=True)]

    @property
    def rule_in_words(self) -> str:
        return RULE + (" and more than other test images could change" if self.images else "")

    @property
    def caption(self) -> str:
        if not self.rows:
            return "No run is finished yet."
        rule = " or ".join(RULES.get(name, name) for name in self.rule)
        fewest, most = min(len(row.seeds) for row in self.rows), max(len(row.seeds) for row in self.rows)
        number = f"over {fewest} to {most} seeds" if fewest < most else f"over {most} seeds"
        seeds = "one seed" if most == 1 else f"mean and standard deviation {number}"
        extra = "; the average leaves the unseen domains out" if self.unseen else ""
        own = [row.method.replace("@", " with ") for row in self.rows if self.name(row) != row.method]
        diverged = [f"{self.name(row)} on {', '.join(row.diverged)}" for row in self.rows if row.diverged]
        sources = {row.randomness for row in self.rows}
        unit = ("in %" if self.metric in SHARES else "times 100") + (", lower is better" if self.lower else "")
        sentences = [
            f"{' or '.join(self.on).capitalize()} {self.metric.replace('-', ' ')} {unit}, {rule}; {seeds}{extra}."
        ]
        if own:
            sentences.append(f"{'; '.join(own)}.")
        if self.untested:
            untested = ", ".join(name for name in self.domains if name in self.untested)
            sentences.append(f"Not tested, {DASH}: {untested}.")
        if diverged:
            sentences.append(f"Diverged, the test loss is not finite: {'; '.join(diverged)}.")
        return " ".join([*sentences, *(f"Epsilon: {SOURCES[source]}." for source in SOURCES if source in sources)])

    def legend(self, mark: str = "*") -> str:
        """The caption, and what a star means or bold, where there is some."""
        said = f" {mark}: no other is ahead of it, {self.rule_in_words}; none where nothing is decided."
        return self.caption + (said if any(self._best) else "")

    def _lines(self, text: Callable[[str], str], cell: Callable[[Cell | None, bool], str]) -> list[list[str]]:
        """The headings and the rows, as a kind of document writes names, and numbers that may be the best."""
        lines = [[text(heading) for heading in self.headings]]
        for row in self.rows:
            lines.append([text(self.name(row)), *(cell(*marked) for marked in self.marked(row)), *self.traffic(row)])
        return lines

    def lines(self, text: Callable[[str], str] = str) -> list[list[str]]:
        """Headings and rows as plain text, the best of each column with a star."""
        other = " " if any(self._best) else ""  # so that numbers stay below each other
        return self._lines(text, lambda cell, best: f"{cell or DASH}{'*' if best else other}")

    def text(self) -> str:
        lines = self.lines(visible)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
        return "\n".join([*padded, "", visible(self.legend())])

    def markdown(self) -> str:
        """A table for a README or a paper's notes, the best of each column in bold."""
        lines = self._lines(markdown_text, lambda cell, best: f"**{cell}**" if best else str(cell or DASH))
        lines.insert(1, ["---"] * len(self.headings))
        return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", markdown_text(self.legend("Bold"))])

    def latex(self) -> str:
        """A table for a paper, with the package booktabs: the best of each column in bold, the spread beside it."""
        headings, *rows = (" & ".join(line) + r" \\" for line in self._lines(latex_text, _latex_cell))
        lines = [
            "% needs \\usepackage{booktabs}",
            *("\\begin{table}", "\\centering", f"\\caption{{{latex_text(self.legend('Bold'))}}}"),
            f"\\begin{{tabular}}{{l{'r' * (len(self.headings) - 1)}}}",
            *("\\toprule", headings, "\\midrule", *rows, "\\bottomrule"),
            *("\\end{tabular}", "\\end{table}"),
        ]
        return "\n".join(lines) + "\n"

    def csv(self) -> str:
        """A line for each method: mean and std of each domain and of the average, as fractions, and what it sends."""
        counted = [entry.name for entry in fields(RoundCost)] if "MB/round" in self.costs else []
        private = ["epsilon"] if "epsilon" in self.costs else []
        numbers = [f"{name}_{part}" for name in (*self.domains, "average") for part in ("mean", "std")]
        lines: list[list[Any]] = [["method", "seeds", *numbers, *(f"{name}_per_round" for name in counted), *private]]
        for row in self.rows:
            cells = [number for cell in self.cells(row) for number in ((cell.mean, cell.std) if cell else ("", ""))]
            costs = [getattr(row.traffic, name, "") for name in counted]
            epsilon = [row.epsilon] if private else []
            lines.append([row.method, len(row.seeds), *cells, *costs, *epsilon])
        return csv_table(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "result": list(self.rule),
            **({} if self.metric == "accuracy" else {"metric": self.metric}),
            "domains": self.domains,
            "unseen_domains": sorted(self.unseen),
            "untested_domains": sorted(self.untested),
            "rows": [row.to_dict() for row in self.rows],
        }


def _row(label: str, by_seed: Mapping[int, Mapping[str, Any]]) -> Row:
    summaries = list(by_seed.values())
    private = [summary for summary in summaries if summary.get("epsilon")]
    by_domain: dict[str, dict[int, float]] = {}
    for seed, summary in by_seed.items():
        for name, accuracy in summary["domains"].items():
            by_domain.setdefault(name, {})[seed] = accuracy
    return Row(
        method=label,
        seeds=sorted(by_seed),
        domains={name: Cell(accuracies) for name, accuracies in by_domain.items()},
        average=Cell({seed: summary["accuracy"] for seed, summary in by_seed.items()}),
        traffic=RoundCost.of(summaries),
        epsilon=max((summary["epsilon"] for summary in private), default=None),
        randomness=weakest(private),
        diverged=tuple(_names(summaries, "diverged_domains")),
    )


def _names(summaries: Iterable[Mapping[str, Any]], kind: str) -> dict[str, None]:
    """Of domains, in the order in which they come; an earlier version's summary may not have that kind."""
    return dict.fromkeys(name for summary in summaries for name in summary.get(kind) or ())


def latex_text(text: str) -> str:
    r"""With LaTeX's own characters escaped.

    >>> print(latex_text("fedprox(mu=0.1)_50%"))
    fedprox(mu=0.1)\_50\%
    """
    return re.sub(r"([&%$#_{}])", r"\\\1", text).replace("±", r"$\pm$")


def _latex_cell(cell: Cell | None, best: bool) -> str:
    if cell is None:
        return "--"
    mean = rf"\textbf{{{percent(cell.mean)}}}" if best else percent(cell.mean)
    return mean if cell.std is None else rf"{mean} {{\scriptsize $\pm$ {percent(cell.std)}}}"


def competes(row: Row) -> bool:
    """Training on the pooled data is what a federation is measured against, not one of the methods for it."""
    return row.method.partition("@")[0] != "central"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A curve in one line of text, from its lowest to its highest value.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if len(values) > width:  # the last value is always among those shown
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[int((value - low) * scale + 0.5)] for value in values)
