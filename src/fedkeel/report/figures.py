"""The figures of a group, each described once (see `fedkeel.drawing`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from fedkeel.analysis.figures import Figure, matrix
from fedkeel.config import from_one
from fedkeel.formulas.measures import wilson
from fedkeel.report.collect import Group, Member, Metric
from fedkeel.report.diagnostics import short

MOST_CLASSES = 40  # of a matrix or of bars that can be read


def _methods(group: Group) -> dict[str, Any]:
    """What every figure of methods has: their names in the order of their colours, and which are seen at first."""
    return {"names": list(group.names.values()), "shown": [group.names[label] for label in group.shown]}


def curves(group: Group, metric: Metric, most_rounds: int = sys.maxsize) -> Figure:
    """Of very many rounds, one in so many, and the last."""
    scale, series = 100 if metric.is_percent else 1, []
    for label, name in group.names.items():
        curve = [*group.curve(label, metric).items()]
        curve = [*dict(curve[:: -(-len(curve) // most_rounds) or 1] + curve[-1:]).items()]
        most = max((len(cell.by_seed) for _, cell in curve), default=0)
        one: dict[str, Any] = {"name": name, "x": [from_one(round) for round, _ in curve]}
        one["y"] = [short(scale * cell.mean) for _, cell in curve]
        if most > 1:
            one["spread"] = [None if cell.std is None else short(scale * cell.std) for _, cell in curve]
            one["few"] = [f" ({len(cell.by_seed)} of {most} seeds)" * (len(cell.by_seed) < most) for _, cell in curve]
        series += [one] if curve else []
    unit = {"y_label": f"{metric.name}, %", "percent": True} if metric.is_percent else {"y_label": metric.name}
    return {"kind": "lines", "series": series, "x_label": "round", **_methods(group), **unit}


def by_domain(group: Group) -> Figure:
    """Bars for the average and for each domain: the mean, and whiskers of the spread over seeds, or, of a single seed,
    of the error that the number of test samples leaves."""
    results, series = group.results, []
    for row in results.rows:
        cells = [row.average, *(row.domains.get(domain) for domain in results.domains)]
        one: dict[str, Any] = {"name": results.name(row)}
        one["values"] = [None if cell is None else short(100 * cell.mean) for cell in cells]
        if row.average.std is None:
            sizes = [0, *(group.test_images.get(domain, 0) for domain in results.domains)]
            ends = [interval(cell.mean, n) if cell else (None, None) for cell, n in zip(cells, sizes, strict=True)]
            one["low"], one["high"] = map(list, zip(*ends, strict=True))
        else:
            one["spread"] = [cell and cell.std and short(100 * cell.std) for cell in cells]
            one["seeds"] = [[short(100 * v) for v in cell.by_seed.values()] if cell else [] for cell in cells]
        series.append(one)
    categories = [
        "average of trained" if results.unseen else "average",
        *results.headings[1 : 1 + len(results.domains)],
    ]
    about = {"y_label": "accuracy, %", "percent": True, **_methods(group)}
    return {"kind": "bars", "categories": categories, "series": series, **about}


def interval(share: float, number: int) -> tuple[float, float]:
    """In percent: Wilson's 95 % interval of a share of so many images; of none, the share itself."""
    low, high = wilson(share, number)[1:].tolist() if number else (share, share)
    return short(100 * low), short(100 * high)


def by_class(group: Group) -> Figure | None:
    """How much of each class is found, over all trained sites, with the error that the number of samples leaves; none
    of classes that are too many to be seen."""
    classes, series = group.measured[0].run.measures.classes if group.measured else (), []
    if not 0 < len(classes) <= MOST_CLASSES:
        return None
    for member in (m for m in group.measured if m.run.measures.classes == classes):
        recalls = member.run.measures.by_class()["recall"]
        found = [[short(100 * n) if n == n else None for n in recall[:3]] for recall in recalls]
        columns = dict(zip(("values", "low", "high"), map(list, zip(*found, strict=True)), strict=True))
        series.append({"name": group.names[member.label], **columns})
    about = {"y_label": "recall, %", "percent": True, **_methods(group)}
    return {"kind": "bars", "categories": list(classes), "series": series, **about}


def confusions(member: Member) -> Iterator[tuple[str, Figure]]:
    """By site, all trained ones together first."""
    measures = member.run.measures
    for site in (None, *measures.domains):
        counts = measures.confusion(site)
        shares = [[round(100 * n / sum(row), 1) if sum(row) else None for n in row] for row in counts.tolist()]
        title = "All trained sites" if site is None else f"{site} (unseen)" if site in measures.unseen else site
        note = f"In % of the samples of a class; {int(counts.sum())} samples."
        about = {"note": note, "ends": (0, 100)}
        yield title, matrix(title, measures.classes, measures.classes, shares, "taken for", "class", **about)


def class_counts(member: Member) -> Figure:
    measures = member.run.measures
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
            for site, matrix_of in confusions(member):
                yield f"confusion-{member}-{site}", matrix_of
    for diagnostic in group.diagnostics:
        for run, figures in diagnostic.runs.items():
            for number, figure in enumerate(figures, start=1):
                if figure["kind"] != "table":
                    yield f"{diagnostic.name}-{run}-{number}", figure
