"""The demo: the methods compared on the embedded digits, in about three minutes on two cores.

It is an ordinary comparison. What it adds is the choice of methods, settings in which each of them learns in the
little time there is, and sentences that say what the numbers show.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import FILE, Comparison, compare, read_comparison
from fedkeel.experiments.jobs import JobsObserver
from fedkeel.experiments.tables import Cell, Results, Row, apart, rounded
from fedkeel.files import explained
from fedkeel.methods import METHODS

MARK = ".fedkeel-demo"  # in a directory that the demo made and may therefore replace

BASELINES = ("central", "standalone", "fedavg", "fedbn", "gn")
PAPERS = ("greg", "hbn", "fedwon", "fedcoda", "univarfl")  # those that are registered take part

# The digits are 8 x 8 scans drawn at 32 px; at 16 px a round takes a quarter of the time.
TRANSFORM = "resize(size=16)+normalise(mean=0.5, std=0.5)"
SETTINGS: dict[str, Any] = {
    "data": f"digits-shift(train_transform='{TRANSFORM}', test_transform='{TRANSFORM}')",
    "model": "simple_cnn",
    "rounds": 12,
    "batch_size": 16,
    "learning_rate": 0.02,
    "momentum": 0.9,
    "evaluate_every": 6,
    "checkpoint_every": 6,
    # What every method here has and what costs next to nothing, so that the report can say why one is ahead.
    "record": "fairness,representation-divergence",
}
OWN_SETTINGS = {
    "fedwon": "fedwon@learning_rate=0.05",  # a higher one than batch norm takes, as in its paper
    "univarfl": "univarfl@model=simple_cnn(projector=128)",  # it spreads the features of a projector, as in its paper
}
QUICK: dict[str, Any] = {"rounds": 2, "evaluate_every": 1, "subsample": 32, "model": "simple_cnn(width=4)"}
QUICK_METHODS = ("central", "standalone", "fedavg", "fedbn")


def demo(
    directory: str | Path = "runs/demo",
    *,
    seeds: int | Sequence[int] = 3,
    jobs: int | None = None,
    quick: bool = False,
    resume: bool = False,
    observer: JobsObserver | None = None,
) -> Comparison:
    """Compare the methods on digits-shift. An earlier demo in `directory` is replaced, or with `resume` continued."""
    place = Path(directory)
    claim(place, keep=resume)
    if quick:
        return compare(
            QUICK_METHODS,
            seeds=1,
            directory=place,
            jobs=jobs,
            observer=observer,
            verbose=False,
            **{**SETTINGS, **QUICK},
        )
    return compare(methods(), seeds=seeds, directory=place, jobs=jobs, observer=observer, verbose=False, **SETTINGS)


def methods() -> list[str]:
    """The baselines, and whichever of the papers' methods there are, each with its own settings."""
    names = [*BASELINES, *(name for name in PAPERS if name in METHODS)]
    return [OWN_SETTINGS.get(name, name) for name in names]


def introduction(*, quick: bool) -> str:
    if quick:
        return "A quick look: four methods, one seed, two rounds. The numbers mean nothing yet."
    return (
        f"{len(methods())} methods on digits-shift: real handwritten digits on five clients, each with a look of its "
        "own.\nEvery client trains on its own digits, and only models travel. This takes about three minutes."
    )


def claim(place: Path, *, keep: bool) -> None:
    """Make the directory the demo's own; one that it did not make is never touched."""
    mark = place / MARK
    if place.exists() and not mark.exists() and (not place.is_dir() or any(place.iterdir())):
        raise FedkeelError(f"'{place}' is not empty and was not made by the demo: choose another directory with --out.")
    with explained(place):
        if mark.exists() and not keep and (place / FILE).exists():
            for run in read_comparison(place).trials:
                # Only the runs go: whatever else someone put there stays.
                inside = place.resolve() in run.directory.resolve().parents
                if inside and (run.directory / "config.toml").exists():
                    shutil.rmtree(run.directory)
            (place / FILE).unlink()
        place.mkdir(parents=True, exist_ok=True)
        mark.write_text("Made by 'fedkeel demo', which replaces the runs in this directory.\n")


def findings(results: Results) -> list[str]:
    """What the table shows, a sentence each, all from its numbers as printed; of differences those that are `apart`."""
    rows: dict[str, Row] = {}
    federated: list[Row] = []  # the best first
    for row in sorted(results.rows, key=lambda row: -row.average.mean):
        method, domains = row.method.partition("@")[0], {name: printed(cell) for name, cell in row.domains.items()}
        shown = replace(row, method=results.name(row), average=printed(row.average), domains=domains)
        rows.setdefault(method, shown)  # of one that is there with several options, the best
        if method not in ("central", "standalone"):
            federated.append(shown)
    if not federated:
        return []
    if all(row.average.std is None for row in results.rows):
        return ["One seed tells no two methods apart: give several with --seeds."]
    sentences = [_best(federated)] if len(federated) > 1 else []
    if "central" in rows and "fedavg" in rows:
        sentences.append(_gap(rows["central"], rows["fedavg"]))
    if "fedavg" in rows and len(federated) > 1:
        sentences.append(_ahead(rows["fedavg"], federated))
    if "standalone" in rows:
        sentences.append(_gain(rows["standalone"], federated, results.domains))
    return [*sentences, *_hardest(federated, results.domains)]


def _best(federated: Sequence[Row]) -> str:
    first, *others = federated
    if level := [row for row in others if not apart(first.average, row.average)]:
        return f"Level within the spread: {listed([first, *level])}."
    return f"Best on average, by more than the spread: {listed([first])}."


def _gap(central: Row, fedavg: Row) -> str:
    pooled = f"training on the pooled data ({central.average.mean:.1f})"
    if not apart(central.average, fedavg.average):
        return f"{listed([fedavg])} and {pooled} are level within the spread."
    points = central.average.mean - fedavg.average.mean
    if points < 0:
        return f"{listed([fedavg])} is ahead of {pooled}."
    return f"The shift costs {fedavg.method} {points:.1f} points against {pooled}."


def _ahead(fedavg: Row, federated: Sequence[Row]) -> str:
    if ahead := [row for row in federated if is_above(row.average, fedavg.average)]:
        return f"Ahead of {fedavg.method} by more than the spread: {listed(ahead)}."
    return f"No method here is ahead of {fedavg.method} by more than the spread."


def _gain(alone: Row, federated: Sequence[Row], domains: Sequence[str]) -> str:
    def is_most(domain: str) -> bool:
        column = [row.domains[domain] for row in federated if domain in row.domains]
        return 2 * sum(is_above(cell, alone.domains[domain]) for cell in column) > len(federated)

    if most := [f"'{domain}'" for domain in domains if domain in alone.domains and is_most(domain)]:
        return f"Most methods are ahead of the client that trains alone by more than the spread on {', '.join(most)}."
    return "On no domain are most methods ahead of the client that trains alone by more than the spread."


def _hardest(federated: Sequence[Row], domains: Sequence[str]) -> list[str]:
    """Over the federated methods, with the mean of their spreads; of the domains that each of them was tested on."""
    means = {}
    for domain in domains:
        column = [row.domains[domain] for row in federated if domain in row.domains]
        if len(column) == len(federated):
            means[domain] = Cell(fmean(cell.mean for cell in column), fmean(cell.std or 0.0 for cell in column))
    hardest, *others = sorted(means, key=lambda domain: means[domain].mean) or [""]
    if not others or not apart(means[hardest], means[others[0]]):
        return []
    return [f"The hardest domain is '{hardest}': {means[hardest].mean:.1f} % over the federated methods."]


def printed(cell: Cell) -> Cell:
    """In % as it stands in the table, so that a reader who does the sums finds the same."""
    return Cell(rounded(cell), None if cell.std is None else rounded(Cell(cell.std, None)))


def is_above(one: Cell, other: Cell) -> bool:
    return one.mean > other.mean and apart(one, other)


def listed(rows: Sequence[Row]) -> str:
    """Names with their averages. A method's options are in its name only where another row has the same method."""
    return ", ".join(f"{row.method} ({row.average.mean:.1f})" for row in rows)
