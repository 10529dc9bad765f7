"""The figures of a report as files for a paper: curves, bars by domain, and the diagnostics, as SVG, PNG or PDF.

This is the one part of a report that needs matplotlib, the extra `report`.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel.analysis.figures import Figure
from fedkeel.core.naming import plot_text as text
from fedkeel.core.naming import slug
from fedkeel.errors import FedkeelError
from fedkeel.report import writing
from fedkeel.report.collect import Collected, Group, Metric
from fedkeel.report.numbers import curve_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

log = logging.getLogger("fedkeel")

WIDTH = 6.0  # inches: the text of a page with one column
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # text stays text: many journals ask for it
    "svg.fonttype": "none",
    "svg.hashsalt": "fedkeel",  # the same figure is the same file
}
COLOURS = ["#1c68cf", "#c2410c", "#0d7f57", "#8b3fc7", "#94700a", "#c2255c", "#0b7a8c", "#5f6874", "#7c4a1e", "#4a760f"]
DASHES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D", "v", "P"]


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise FedkeelError("Figures need matplotlib, which is not installed: pip install 'fedkeel[report]'.")


def write(collected: Collected, directory: str | Path, format: str = "svg") -> list[Path]:
    """Every figure as a file of its own; returns their paths."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure as Canvas  # no pyplot: it would look for a display and keep every figure

    place = Path(directory)
    written: list[Path] = []
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format, {})
    with matplotlib.rc_context(STYLE), writing(place, "--figures"), letters_told_once(format):
        place.mkdir(parents=True, exist_ok=True)
        for number, group in enumerate(collected.groups, start=1):
            prefix = "" if len(collected.groups) == 1 else f"data{number}-"
            for title, figure in figures_of(group):
                name = slug(f"{prefix}{title}".replace(",", "").replace(" ", "-"))
                canvas = Canvas(figsize=(WIDTH, _height(figure)), layout="constrained")
                _draw(canvas.subplots(), figure)
                # Names that differ only in what a file's name cannot hold must not overwrite each other.
                same = sum(path.stem == name or path.stem.rpartition("~")[0] == name for path in written)
                written.append(place / f"{name}{f'~{same + 1}' if same else ''}.{format}")
                canvas.savefig(written[-1], format=format, dpi=300, metadata=metadata)
    return written


@contextmanager
def letters_told_once(format: str) -> Iterator[None]:
    """Letters that the font lacks: one sentence for all of them, and none for SVG, where text stays text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    about_letters = [warning for warning in caught if "missing from font" in str(warning.message)]
    for warning in caught:
        if warning not in about_letters:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if about_letters and format != "svg":
        log.warning("Some letters are not in matplotlib's font and show as boxes: --format svg keeps them as text.")


# -- what is drawn ---------------------------------------------------------------------------------------------------
def figures_of(group: Group) -> Iterator[tuple[str, Figure]]:
    """Each figure with a name for its file."""
    for metric in group.metrics:
        yield f"curve-{metric.key}", _curves(group, metric)
    if group.results.rows:
        yield "domains", _domains(group)
    for diagnostic in group.diagnostics:
        for run, figures in diagnostic.runs.items():
            for number, figure in enumerate(figures, start=1):
                if figure["kind"] != "table":
                    yield f"{diagnostic.name}-{run}-{number}", figure


def _curves(group: Group, metric: Metric) -> Figure:
    series = [{"name": label, **curve_numbers(group, label, metric)} for label in group.labels]
    unit = " (%)" if metric.is_percent else ""
    return {"kind": "lines", "series": series, "x_label": "round", "y_label": f"{metric.name}{unit}"}


def _domains(group: Group) -> Figure:
    results = group.results
    categories = results.headings[1 : len(results.domains) + 2]
    series = []
    for row in results.rows:
        cells = results.cells(row)
        values = [None if cell is None else 100 * cell.mean for cell in cells]
        spread = [None if cell is None or cell.std is None else 100 * cell.std for cell in cells]
        series.append({"name": results.name(row), "values": values, "spread": spread})
    return {"kind": "bars", "categories": categories, "series": series, "y_label": "test accuracy (%)"}


# -- how it is drawn -------------------------------------------------------------------------------------------------
def _draw(axes: Axes, figure: Figure) -> None:
    DRAW[figure["kind"]](axes, figure)
    for key, put in (("title", axes.set_title), ("x_label", axes.set_xlabel), ("y_label", axes.set_ylabel)):
        if figure.get(key):
            put(text(figure[key]))
    if figure.get("log_y"):
        axes.set_yscale("log")


def _height(figure: Figure) -> float:
    """So that the legend, or the names of the rows, have room."""
    return max(3.2, 0.2 * len([*figure.get("rows", ()), *figure.get("series", ())]))


def _colour(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)]}


def _legend(axes: Axes, entries: int) -> None:
    if entries > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _lines(axes: Axes, figure: Figure) -> None:
    for index, series in enumerate(figure["series"]):
        if not series["x"]:
            continue
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        y = _nan(series["y"])
        axes.plot(series["x"], y, label=text(series["name"]), linestyle=dash, linewidth=1.4, **_colour(index))
        if spread := series.get("spread"):
            low, high = (
                [mean + side * (half or 0.0) for mean, half in zip(y, spread, strict=True)] for side in (-1, 1)
            )
            axes.fill_between(series["x"], low, high, alpha=0.15, linewidth=0, **_colour(index))
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)
    _legend(axes, len(figure["series"]))


def _bars(axes: Axes, figure: Figure) -> None:
    count = len(figure["series"])
    width = 0.8 / max(1, count)
    caps = {"elinewidth": 0.8, "capsize": min(2.0, 12 * width)}
    for index, series in enumerate(figure["series"]):
        places = [i - 0.4 + width * (index + 0.5) for i in range(len(figure["categories"]))]
        spread = series.get("spread") or ()
        error = _nan(spread) if any(value is not None for value in spread) else None
        values, label = _nan(series["values"]), text(series["name"])
        axes.bar(places, values, width, yerr=error, label=label, error_kw=caps, **_colour(index))
    names = [text(name) for name in figure["categories"]]
    crowded = sum(map(len, names)) > 60
    axes.set_xticks(range(len(names)), names, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    _legend(axes, count)


def _matrix(axes: Axes, figure: Figure) -> None:
    known = [value for row in figure["values"] for value in row if value is not None]
    largest = max(map(abs, known), default=1.0)
    signed = bool(known) and min(known) < 0 < max(known)
    limits: dict[str, Any] = {"vmin": -largest, "vmax": largest, "cmap": "PuOr"} if signed else {"cmap": "Blues"}
    image = axes.imshow([_nan(row) for row in figure["values"]], aspect="auto", **limits)
    axes.set_xticks(range(len(figure["columns"])), [text(name) for name in figure["columns"]], rotation=45, ha="right")
    axes.set_yticks(range(len(figure["rows"])), [text(name) for name in figure["rows"]])
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _points(axes: Axes, figure: Figure) -> None:
    classes, domains = (list(dict.fromkeys(figure[key])) for key in ("class", "domain"))
    points = list(zip(*(figure[key] for key in ("x", "y", "class", "domain")), strict=True))
    for c, name in enumerate(classes):
        for d, domain in enumerate(domains):
            shown = [(x, y) for x, y, *of in points if of == [name, domain] and None not in (x, y)]
            label = text(", ".join(filter(None, (name, domain)))) or None
            x, y = zip(*shown, strict=True) if shown else ((), ())
            axes.scatter(x, y, s=9, marker=MARKERS[d % len(MARKERS)], linewidths=0, label=label, **_colour(c))
    _legend(axes, len(classes) * len(domains))


def _nan(values: Any) -> list[float]:
    return [float("nan") if value is None else value for value in values]


DRAW: dict[str, Callable[[Any, Figure], None]] = {"lines": _lines, "bars": _bars, "matrix": _matrix, "points": _points}
