"""The numbers that `page.js` draws, as the page has them: accuracies in percent, rounded to what can be seen."""

import sys
from collections.abc import Sequence
from typing import Any

from fedkeel.config import from_one
from fedkeel.report.collect import Group, Metric
from fedkeel.report.diagnostics import short

SHOWN_AT_FIRST = 10  # curves; more of them hide each other
MOST_NUMBERS = 240_000  # of all curves together: about two megabytes


def numbers(groups: Sequence[Group]) -> dict[str, Any]:
    curves = sum(len(group.labels) * len(group.metrics) for group in groups)
    most_rounds = max(50, MOST_NUMBERS // (2 * max(1, curves)))
    return {"groups": [group_numbers(group, most_rounds) for group in groups]}


def group_numbers(group: Group, most_rounds: int) -> dict[str, Any]:
    shown, names = first_shown(group), {row.method: group.results.name(row) for row in group.results.rows}
    # Those that are seen first have colours of their own.
    colours = sorted(group.labels, key=lambda label: label not in shown)
    return {
        "metrics": [{"key": m.key, "name": m.name, "percent": m.is_percent} for m in group.metrics],
        "series": [
            {
                "name": names.get(label, label),
                "label": label,
                "colour": colours.index(label),
                "shown": label in shown,
                "curves": {metric.key: curve_numbers(group, label, metric, most_rounds) for metric in group.metrics},
            }
            for label in group.labels
        ],
        "panels": panels(group),
        "diagnostics": [
            {"runs": [{"name": run, "figures": figures} for run, figures in diagnostic.runs.items()]}
            for diagnostic in group.diagnostics
        ],
    }


def curve_numbers(group: Group, label: str, metric: Metric, most_rounds: int = sys.maxsize) -> dict[str, Any]:
    curve = group.curve(label, metric).thinned(most_rounds)
    scale = 100 if metric.is_percent else 1
    document: dict[str, Any] = {
        "x": [from_one(r) for r in curve.rounds],
        "y": [short(scale * value) for value in curve.mean],
    }
    if any(std is not None for std in curve.std):
        document["spread"] = [None if std is None else float(f"{scale * std:.3g}") for std in curve.std]
        document["seeds"] = curve.seeds if len(set(curve.seeds)) > 1 else curve.seeds[0]
    return document


def panels(group: Group) -> list[dict[str, Any]]:
    """A panel of bars for the average and for each domain: mean, spread and each seed's own value, in percent."""
    results = group.results

    def panel(title: str, domain: str | None) -> dict[str, Any]:
        bars = []
        for row in results.rows:
            cell = row.average if domain is None else row.domains.get(domain)
            if cell is not None:
                summaries = [m.summary for m in group.of(row.method) if m.summary is not None]
                found = [s["accuracy"] if domain is None else s["domains"].get(domain) for s in summaries]
                values = [round(100 * value, 3) for value in found if value is not None]
                spread = None if cell.std is None else float(f"{100 * cell.std:.4g}")
                bars.append(
                    {"label": row.method, "mean": round(100 * cell.mean, 3), "values": values, "spread": spread}
                )
        return {"title": title, "bars": bars}

    average = "average over domains" if not results.unseen else "average over trained domains"
    headed = zip(results.domains, results.headings[1:], strict=False)
    return [panel(average, None), *(panel(title, domain) for domain, title in headed)] if results.rows else []


def first_shown(group: Group) -> set[str]:
    """All methods when they are few; else the best, the baselines among them."""
    if len(group.labels) <= SHOWN_AT_FIRST:
        return set(group.labels)
    average = {row.method: row.average.mean for row in group.results.rows}
    ranked = sorted(group.labels, key=lambda label: -average.get(label, -1.0))
    # Of a baseline that is there with several options, the best: all of them would leave no room for the others.
    baselines = [next((x for x in ranked if x.partition("@")[0] == name), ranked[0]) for name in ("central", "fedavg")]
    return set(list(dict.fromkeys([*baselines, *ranked]))[:SHOWN_AT_FIRST])
