"""Tables of what a model does by site and by class, for a terminal and a page: headings, rows and a caption."""

from collections.abc import Mapping

from fedkeel.experiments.tables import DASH
from fedkeel.formulas.measures import Measure
from fedkeel.runs.measures import Measures, interval
from fedkeel.runs.summary import SHARES

Drawn = tuple[list[str], list[list[str]], str]  # what `cli.terminal.output.Table` is made of
BESIDE = ("balanced-accuracy", "f1", "auc", "ece")
MOST_CLASSES = 12  # of a confusion matrix that can be read


def site_table(measures: Measures, metric: str = "accuracy") -> Drawn:
    """The metric with its interval and, beside accuracy, the usual others."""
    beside = [name for name in BESIDE if name != metric and name in measures.names]
    found = {name: measures.of(name) for name in (metric, *beside)}
    rows = []
    for site in measures.domains:
        name = f"{site} (unseen)" if site in measures.unseen else site
        cells = _cells({one: of_sites[site] for one, of_sites in found.items()})
        rows.append([name, f"{measures.samples(site)}", *cells])
    averages = {name: measures.average(name) for name in found}
    rows.append(["average", f"{sum(map(measures.samples, measures.trained))}", *_cells(averages)])
    caption = "By site, the resulting model; in brackets the 95 % interval that the number of samples leaves."
    if measures.unseen:
        caption += " The average leaves the unseen out."
    return ["site", "samples", *map(_heading, found)], rows, caption


def class_table(measures: Measures) -> Drawn:
    by_class, counts = measures.by_class(), measures.confusion()
    rows = []
    for place, name in enumerate(measures.classes):
        cells = _cells({one: of_classes[place] for one, of_classes in by_class.items()})
        rows.append([name, f"{counts[place].sum()}", f"{counts[:, place].sum()}", *cells])
    caption = f"By class, over all trained sites; {DASH} where there are no samples of it."
    return ["class", "samples", "predicted", *map(_heading, by_class)], rows, caption


def confusion_table(measures: Measures) -> Drawn:
    """Of all trained sites together; of very many classes those that are confused most."""
    counts, names = measures.confusion(), measures.classes
    if len(names) <= MOST_CLASSES:
        rows = [[name, *(f"{count}" for count in row)] for name, row in zip(names, counts, strict=True)]
        return ["is \\ is taken for", *names], rows, "Confusion matrix, over all trained sites, in test samples."
    wrong = [(int(counts[i, j]), i, j) for i, j in zip(*counts.nonzero(), strict=True) if i != j]
    worst = sorted(wrong, reverse=True)[:MOST_CLASSES]
    rows = [[names[i], names[j], f"{count}", f"{int(counts[i].sum())}"] for count, i, j in worst]
    return ["is", "is taken for", "samples", "of"], rows, "What is confused most, over all trained sites."


def _heading(name: str) -> str:
    shown = {"f1": "F1", "auc": "AUC", "ece": "ECE"}.get(name, name.replace("-", " "))
    return f"{shown} %" if name in SHARES else shown


def _cells(row: Mapping[str, Measure]) -> list[str]:
    """The first with its interval, the others alone."""
    first, *others = (interval(measure, 100 if name in SHARES else 1) for name, measure in row.items())
    return [first, *(text.partition(" (")[0] for text in others)]
