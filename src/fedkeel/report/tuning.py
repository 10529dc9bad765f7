"""How the settings of a comparison were chosen: the trials of `fedkeel tune`, from what it wrote; Optuna is not needed.

A page shows this of runs that lie in the folder `best` of a search, wherever it was copied to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from fedkeel.analysis.figures import Figure, bars, lines, points
from fedkeel.config import from_one
from fedkeel.core.readable import percent
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import CHOSEN, SEARCH, read_search
from fedkeel.report.collect import Group
from fedkeel.report.diagnostics import short
from fedkeel.report.figures import Figures
from fedkeel.report.html import DASH, folded, named, number, table, table_row
from fedkeel.runs.summary import SHARES

Given = Mapping[str, Any]


def search_of(group: Group) -> Path | None:
    """The folder of the search that chose the settings of these runs."""
    above = {member.run.directory.resolve().parent.parent for member in group.members}
    place = next(iter(above))
    return place.parent if len(above) == 1 and place.name == CHOSEN and (place.parent / SEARCH).exists() else None


def searches(group: Group) -> tuple[str, list[tuple[Given, dict[str, Figure]]]]:
    """What the settings were chosen by, and each method's trials with their figures by name."""
    folder = search_of(group)
    if folder is None:
        return "", []
    try:
        document = read_search(folder)
        by = str(document["select_by"])
        return by, [(method, dict(_figures(method, by))) for method in document["methods"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        problem = (
            str(error) if isinstance(error, FedkeelError) else f"'{folder / SEARCH}' is not as a search writes it."
        )
        raise FedkeelError(problem) from error


def search_figures(group: Group) -> Iterator[tuple[str, Figure]]:
    """Each figure with a name for its file."""
    for method, figures in searches(group)[1]:
        for name, figure in figures.items():
            yield f"tuning-{method['method']}-{name}", figure


def _figures(method: Given, by: str) -> Iterator[tuple[str, Figure]]:
    share = by in SHARES
    unit, scale = (f"validation {by}{', %' if share else ''}"), 100 if share else 1
    trials = [trial for trial in method["trials"] if trial["curve"]]
    curves = {
        _name(trial, method): (
            [from_one(round) for round, _ in trial["curve"]],
            [None if value is None else short(scale * value) for _, value in trial["curve"]],
        )
        # The chosen one first: it has the first colour.
        for trial in sorted(trials, key=lambda trial: trial["number"] != method["best"])
    }
    if curves:
        yield "curves", lines("Trials by round", "round", unit, curves, percent=share)
    scored = [trial for trial in trials if trial["score"] is not None]
    for option in method["space"] if scored else ():
        values = [trial["params"][option] for trial in scored]
        scores = [short(scale * trial["score"]) for trial in scored]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            log = method["space"][option].startswith("log") or (min(values) > 0 and max(values) >= 30 * min(values))
            states = ["chosen" if trial["number"] == method["best"] else trial["state"] for trial in scored]
            about = {"x_label": option, "y_label": unit, "log_x": log}
            yield option, points(f"{by} by {option}", values, scores, states, [""] * len(values), **about)
        else:
            best = {str(v): max(s for s, w in zip(scores, values, strict=True) if w == v) for v in values}
            yield option, bars(f"The best {by} by {option}", unit, {option: best}, percent=share)
    if weights := method["importance"]:
        shares = {name: round(100 * weight, 1) for name, weight in weights.items()}
        title = "How much of the difference between finished trials each option explains, %"
        yield "importance", bars(title, "importance, %", {"importance": shares}, percent=True)


def _name(trial: Given, method: Given) -> str:
    mark = "chosen" if trial["number"] == method["best"] else trial["state"] if trial["state"] != "finished" else ""
    return f"trial {trial['number']}{f', {mark}' if mark else ''}"


def tuning_section(group: Group, page: Figures) -> str:
    try:
        by, found = searches(group)
    except FedkeelError as error:
        return f'<p class="notice">{escape(str(error))}</p>'
    parts = []
    for method, figures in found:
        parts.append(f"<h4>{named(method['method'])}</h4><p>{escape(_sentence(method, by))}</p>")
        if figures:
            called = {"curves": "Trials by round", "importance": "Importance"}
            parts.append(page.one_of([*figures.values()], [called.get(name, f"By {name}") for name in figures]))
        parts.append(folded(f"{len(method['trials'])} trials", _table(method, by)))
    intro = (
        "Settings were chosen on validation samples alone, with a seed of its own; the other parts of this page are of "
        "other seeds, tested once. Trials that fell behind the others ended early."
    )
    return f'<p class="what">{intro}</p>{"".join(parts)}' if parts else ""


def _sentence(method: Given, by: str) -> str:
    best = next((trial for trial in method["trials"] if trial["number"] == method["best"]), None)
    states = [trial["state"] for trial in method["trials"]]
    kinds = [f"{states.count(state)} {state}" for state in ("finished", "pruned", "failed", "running")]
    counts = ", ".join(kind for kind in kinds if not kind.startswith("0 "))
    grid = "all there are" if method["grid"] else "drawn"
    if best is None:
        return f"{len(states)} trials, {grid}: {counts}. None can be chosen yet."
    values = ", ".join(f"{name}={value}" for name, value in best["params"].items()) or "its settings as they are"
    ends = "".join(f" {name} is at the {end} end of {method['space'][name]}." for name, end in method["edges"].items())
    return (
        f"Of {len(states)} trials, {grid} ({counts}), trial {best['number']}: {values}, {by} {_score(best, by)}.{ends}"
    )


def _score(trial: Given, by: str) -> str:
    if trial["score"] is None:
        return DASH
    return f"{percent(trial['score'])} %" if by in SHARES else f"{trial['score']:.4g}"


def _table(method: Given, by: str) -> str:
    rows = []
    for trial in method["trials"]:
        rounds = from_one(max((round for round, _ in trial["curve"]), default=-1))
        values = [number(str(trial["params"][name])) for name in method["space"]]
        score = "" if trial["score"] is None else str(trial["score"])
        reason = f' title="{escape(str(trial["problem"]))}"' if trial.get("problem") else ""
        state = "chosen" if trial["number"] == method["best"] else str(trial["state"])
        cells = [f"<td{reason}>{escape(state)}</td>", number(rounds), number(score, _score(trial, by)), *values]
        rows.append(table_row(str(int(trial["number"])), cells))
    return table(["trial", "state", "rounds", by, *method["space"]], rows, f"The trials of {method['method']}.")
