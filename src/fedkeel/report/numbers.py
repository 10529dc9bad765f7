"""The numbers that `page.js` draws, as the page has them: accuracies in percent, rounded to what can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedkeel.config import from_one
from fedkeel.experiments.tables import Results, Row
from fedkeel.report.collect import Group, Metric, most_rounds
from fedkeel.report.diagnostics import short

SHOWN_AT_FIRST = 10  # curves; more of them hide each other


def numbers(groups: Sequence[Group]) -> dict[str, Any]:
    most = most_rounds(groups)
    return {"groups": [group_numbers(group, most) for group in groups]}


def group_numbers(group: Group, most: int) -> dict[str, Any]:
    results = group.results
    rows = {row.method: row for row in results.rows}
    shown = first_shown(group, rows)
    # Those that are seen first have colours of their own.
    colours = sorted(group.labels, key=lambda label: label not in shown)
    series = [
        {
            "name": name_in(results, rows, label),
            "label": label,
            "colour": colours.index(label),
            "shown": label in shown,
            "curves": {metric.key: curve_numbers(group, label, metric, most) for metric in group.metrics},
        }
        for label in group.labels
    ]
    return {
        "metrics": [{"key": m.key, "name": m.name, "percent": m.is_percent} for m in group.metrics],
        "series": series,
        "panels": panels(group, results),
        "diagnostics": [
            {"runs": [{"name": run, "figures": figures} for run, figures in diagnostic.runs.items()]}
            for diagnostic in group.diagnostics
        ],
    }


def curve_numbers(group: Group, label: str, metric: Metric, most: int) -> dict[str, Any]:
    curve = group.curve(label, metric).thinned(most)
    scale = 100 if metric.is_percent else 1
    document: dict[str, Any] = {
        "x": [from_one(r) for r in curve.rounds],
        "y": [short(scale * value) for value in curve.mean],
    }
    if any(std is not None for std in curve.std):
        document["spread"] = [None if std is None else float(f"{scale * std:.3g}") for std in curve.std]
        document["seeds"] = curve.seeds if len(set(curve.seeds)) > 1 else curve.seeds[0]
    return document


def panels(group: Group, results: Results) -> list[dict[str, Any]]:
    """A panel of bars for the average and for each domain: mean, spread and each seed's own value, in percent."""

    def values(label: str, domain: str | None) -> list[float]:
        summaries = [m.summary for m in group.of(label) if m.summary is not None]
        found = [s["accuracy"] if domain is None else s["domains"].get(domain) for s in summaries]
        return [round(100 * value, 3) for value in found if value is not None]

    def panel(title: str, domain: str | None) -> dict[str, Any]:
        bars = []
        for row in results.rows:
            cell = row.average if domain is None else row.domains.get(domain)
            if cell is not None:
                entry = {"mean": round(100 * cell.mean, 3), "values": values(row.method, domain)}
                bars.append({"label": row.method, **entry, "spread": _percent(cell.std)})
        return {"title": title, "bars": bars}

    headed = zip(results.domains, results.headings[1:], strict=False)
    average = "average over domains" if not results.unseen else "average over trained domains"
    return [panel(average, None), *(panel(title, domain) for domain, title in headed)] if results.rows else []


def _percent(std: float | None) -> float | None:
    return None if std is None else float(f"{100 * std:.4g}")


def first_shown(group: Group, rows: dict[str, Row]) -> set[str]:
    """All methods when they are few; else the best, the baselines among them."""
    if len(group.labels) <= SHOWN_AT_FIRST:
        return set(group.labels)
    ranked = sorted(group.labels, key=lambda label: -rows[label].average.mean if label in rows else 1.0)
    # Of a baseline that is there with several options, the best: all of them would leave no room for the others.
    baselines = [next((x for x in ranked if x.partition("@")[0] == name), ranked[0]) for name in ("central", "fedavg")]
    return set(list(dict.fromkeys([*baselines, *ranked]))[:SHOWN_AT_FIRST])


def name_in(results: Results, rows: dict[str, Row], label: str) -> str:
    return results.name(rows[label]) if label in rows else label
