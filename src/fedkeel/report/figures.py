"""The figures of a report, each described once (see `fedkeel.drawing`), and how a page keeps them."""

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from html import escape
from typing import Any

from fedkeel.analysis.figures import Figure, matrix
from fedkeel.config import from_one
from fedkeel.drawing.theme import COLOURS, config
from fedkeel.drawing.vega import BAR, GAP, chart
from fedkeel.experiments.tables import Row
from fedkeel.formulas.measures import wilson
from fedkeel.report.collect import Group, Member, Metric
from fedkeel.report.diagnostics import short

SHOWN_AT_FIRST = len(COLOURS["light"])  # of methods; more of them hide each other
MOST_NUMBERS = 240_000  # of all curves together: about two megabytes
MOST_CLASSES = 40  # of a matrix or of bars that can be read


class Figures:
    """Those of a page, by number. A description, or data, that several of them share is there once."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []
        self._kept: dict[str, dict[str, int]] = {"specs": {}, "data": {}}

    def add(self, figure: Figure, hidden: Collection[str] = ()) -> int:
        """`hidden`: names that are not shown at first."""
        own = ("columns", "rows") if figure["kind"] == "table" else ()
        about = {key: figure[key] for key in ("kind", "title", "note", "x_label", "percent", *own) if figure.get(key)}
        if figure["kind"] != "table":
            drawn = chart(figure)
            about |= {"values": drawn.values | ({"hidden": list(hidden)} if hidden else {}), "legend": drawn.legend}
            about |= {"spec": self._keep("specs", drawn.spec), "data": self._keep("data", drawn.data)}
            about |= {"widest": drawn.widest, "groups": drawn.groups}
        self.figures.append(about)
        return len(self.figures) - 1

    def _keep(self, kind: str, value: Any) -> int:
        kept = self._kept[kind]
        return kept.setdefault(json.dumps(value, allow_nan=False), len(kept))

    def document(self) -> dict[str, Any]:
        kept = {kind: [json.loads(text) for text in texts] for kind, texts in self._kept.items()}
        themes = {theme: config(theme) for theme in COLOURS}
        return {"themes": themes, "bar": BAR, "gap": GAP, **kept, "figures": self.figures}

    def one_of(self, figures: Sequence[Figure], names: Sequence[str], hidden: Collection[str] = ()) -> str:
        """The place of a figure, with a list to choose it from where there are several."""
        options = "".join(f'<option value="{i}">{escape(name)}</option>' for i, name in enumerate(names))
        choice = f'<div class="controls" data-js hidden><label>Show <select>{options}</select></label></div>'
        numbers = [self.add(figure, hidden) for figure in figures]
        return f'<div>{choice if len(numbers) > 1 else ""}<div data-figures="{numbers}"></div></div>'

    def beside(self, runs: dict[str, list[Figure]], one: int, other: int | None) -> str:
        """The place for the figures of two runs beside each other, and lists to choose them from."""
        drawn = [{"name": name, "figures": [self.add(figure) for figure in own]} for name, own in runs.items()]

        def options(selected: int | None) -> str:
            marks = (" selected" if number == selected else "" for number in range(len(runs)))
            numbered = enumerate(zip(runs, marks, strict=True))
            return "".join(f'<option value="{i}"{mark}>{escape(run)}</option>' for i, (run, mark) in numbered)

        pick = f"<label>Run <select>{options(one)}</select></label>"
        if len(runs) > 1:
            pick += f'<label>beside <select><option value="">nothing</option>{options(other)}</select></label>'
        unseen = ' class="unseen"' if len(runs) == 1 else ""
        return (
            f'<div><div{unseen}><div class="controls" data-js hidden>{pick}</div></div>'
            f'<div class="beside" data-runs="{escape(json.dumps(drawn))}"></div></div>'
        )


# -- methods and their names ------------------------------------------------------------------------------------------
def first_shown(group: Group) -> set[str]:
    """All methods when they are few; else the best, the baselines among them."""
    if len(group.labels) <= SHOWN_AT_FIRST:
        return set(group.labels)
    average = {row.method: row.average.mean for row in group.results.rows}
    ranked = sorted(group.labels, key=lambda label: -average.get(label, -1.0))
    # Of a baseline that is there with several options, the best: all of them would leave no room for the others.
    baselines = [next((x for x in ranked if x.partition("@")[0] == name), ranked[0]) for name in ("central", "fedavg")]
    return set(list(dict.fromkeys([*baselines, *ranked]))[:SHOWN_AT_FIRST])


def names(group: Group) -> dict[str, str]:
    """Of methods by their labels, in the order of their colours: those that are seen first have one of their own."""
    known, shown = {row.method: group.results.name(row) for row in group.results.rows}, first_shown(group)
    return {label: known.get(label, label) for label in sorted(group.labels, key=lambda label: label not in shown)}


def hidden(group: Group) -> list[str]:
    shown = first_shown(group)
    return [name for label, name in names(group).items() if label not in shown]


# -- the figures of a group -------------------------------------------------------------------------------------------
def curves(group: Group, metric: Metric, most_rounds: int = sys.maxsize) -> Figure:
    scale, series = 100 if metric.is_percent else 1, []
    for label, name in names(group).items():
        curve = group.curve(label, metric).thinned(most_rounds)
        if not curve.rounds:
            continue
        one: dict[str, Any] = {"name": name, "x": [from_one(r) for r in curve.rounds]}
        one["y"] = [short(scale * value) for value in curve.mean]
        if any(std is not None for std in curve.std):
            one["spread"] = [None if std is None else float(f"{scale * std:.3g}") for std in curve.std]
            one["seeds"] = curve.seeds
        series.append(one)
    unit = {"y_label": f"{metric.name}, %", "percent": True} if metric.is_percent else {"y_label": metric.name}
    return {"kind": "lines", "series": series, "names": list(names(group).values()), "x_label": "round", **unit}


def by_round(group: Group, most_rounds: int) -> Figure | None:
    """Of a single method: accuracy on average, on unseen domains and of each domain, in one figure."""
    series: dict[str, Any] = {}
    for metric in group.metrics:
        kind, _, domain = metric.key.partition("domain ")
        name = domain or {"average": "average", "unseen": "average of unseen"}.get(kind, "")
        for one in curves(group, metric, most_rounds)["series"] if name else ():
            called = f"{name} (a domain)" if name in series else name
            series[called] = {**one, "name": called}
    about = {"x_label": "round", "y_label": "Test accuracy, %", "percent": True}
    return {"kind": "lines", "series": [*series.values()], **about} if len(series) > 1 else None


def by_domain(group: Group) -> Figure:
    """Bars for the average and for each domain: the mean, and whiskers of the spread over seeds, or, of a single seed,
    of the error that the number of test images leaves."""
    results, sizes, series = group.results, group.test_images, []
    average = "average of trained" if results.unseen else "average"
    domains = [None, *results.domains]

    def seeds(row: Row, domain: str | None) -> list[float]:
        summaries = [m.summary for m in group.of(row.method) if m.summary is not None]
        found = [s["accuracy"] if domain is None else s["domains"].get(domain) for s in summaries]
        return [round(100 * value, 3) for value in found if value is not None]

    for row in results.rows:
        cells = [row.average if domain is None else row.domains.get(domain) for domain in domains]
        one: dict[str, Any] = {"name": results.name(row)}
        one["values"] = [None if cell is None else round(100 * cell.mean, 3) for cell in cells]
        if row.average.std is None:
            ends = [interval(c.mean if c else None, sizes.get(d or "", 0)) for c, d in zip(cells, domains, strict=True)]
            one["low"], one["high"] = map(list, zip(*ends, strict=True))
        else:
            one["spread"] = [cell and cell.std and float(f"{100 * cell.std:.4g}") for cell in cells]
            one["seeds"] = [seeds(row, domain) for domain in domains]
        series.append(one)
    headings = dict(zip(results.domains, results.headings[1:], strict=False))
    categories = [average if domain is None else headings[domain] for domain in domains]
    about = {"names": list(names(group).values()), "y_label": "accuracy, %", "percent": True}
    return {"kind": "bars", "categories": categories, "series": series, **about}


def interval(share: float | None, number: int) -> tuple[float | None, float | None]:
    """In percent: Wilson's 95 % interval of a share of so many images; of none, the share itself."""
    if share is None:
        return None, None
    low, high = wilson(share, number)[1:].tolist() if number else (share, share)
    return round(100 * low, 2), round(100 * high, 2)


def by_class(group: Group) -> Figure | None:
    """How much of each class is found, over all trained sites, with the error that the number of images leaves."""
    if not group.measured:
        return None
    classes, called, series = group.measured[0].run.measures.classes, names(group), list[dict[str, Any]]()
    for member in (m for m in group.measured if m.run.measures.classes == classes):
        found = [
            [round(100 * n, 2) if n == n else None for n in one[:3]] for one in member.run.measures.by_class()["recall"]
        ]
        values, low, high = map(list, zip(*found, strict=True))
        series.append({"name": called[member.label], "values": values, "low": low, "high": high})
    least = [
        min((one["values"][i] for one in series if one["values"][i] is not None), default=101)
        for i in range(len(classes))
    ]
    shown = sorted(sorted(range(len(classes)), key=lambda i: least[i])[:MOST_CLASSES])
    for one in series:
        one |= {key: [one[key][i] for i in shown] for key in ("values", "low", "high")}
    few = f"The {MOST_CLASSES} of {len(classes)} classes that are found least." if len(shown) < len(classes) else ""
    about = {"names": list(called.values()), "y_label": "recall, %", "percent": True, "note": few}
    return {"kind": "bars", "categories": [classes[i] for i in shown], "series": series, **about}


def confusions(member: Member) -> dict[str, Figure]:
    """By site, all trained ones together first; none of classes that are too many to be seen."""
    measures, found = member.run.measures, {}
    if len(measures.classes) > MOST_CLASSES:
        return {}
    for site in (None, *measures.domains):
        counts = measures.confusion(site)
        shares = [[round(100 * n / sum(row), 1) if sum(row) else None for n in row] for row in counts.tolist()]
        title = "All trained sites" if site is None else f"{site} (unseen)" if site in measures.unseen else site
        note = f"In % of the samples of a class; {int(counts.sum())} samples."
        found[title] = matrix(title, measures.classes, measures.classes, shares, "taken for", "class", note=note)
    return found


def class_counts(member: Member) -> Figure | None:
    measures = member.run.measures
    if len(measures.classes) > MOST_CLASSES:
        return None
    counts = [measures.confusion(site).sum(1).tolist() for site in measures.domains]
    return matrix("Test samples of each class", list(measures.domains), measures.classes, counts, "class", "site")


def figures_of(group: Group) -> Iterator[tuple[str, Figure]]:
    """Each figure with a name for its file."""
    for metric in group.metrics:
        yield f"curve-{metric.key}", curves(group, metric)
    if group.results.rows:
        yield "domains", by_domain(group)
    if figure := by_class(group):
        yield "classes", figure
    for member in group.measured:
        for site, figure in confusions(member).items():
            yield f"confusion-{member}-{site}", figure
    for diagnostic in group.diagnostics:
        for run, figures in diagnostic.runs.items():
            for number, figure in enumerate(figures, start=1):
                if figure["kind"] != "table":
                    yield f"{diagnostic.name}-{run}-{number}", figure
