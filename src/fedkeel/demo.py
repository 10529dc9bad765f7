"""The demo: the methods compared on the embedded digits, in about three minutes on two cores.

It is an ordinary comparison. What it adds is the choice of methods, settings in which each of them learns in the
little time there is, and sentences that say what the numbers show.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fedkeel.comparison import FILE, Comparison, compare, read_comparison
from fedkeel.durable import explained
from fedkeel.errors import FedkeelError
from fedkeel.jobs import JobsObserver
from fedkeel.methods import METHODS
from fedkeel.tables import Results, Row, percent

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
# FedWon takes a higher learning rate than batch norm does, as in its paper. UniVarFL spreads the features of a
# projector, which the networks of its paper have.
ENTRIES = {
    "fedwon": "fedwon@learning_rate=0.05",
    "univarfl": "univarfl@model=simple_cnn(projector=128)",
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
        return compare(QUICK_METHODS, seeds=1, directory=place, jobs=jobs, observer=observer, **{**SETTINGS, **QUICK})
    return compare(methods(), seeds=seeds, directory=place, jobs=jobs, observer=observer, **SETTINGS)


def methods() -> list[str]:
    """The baselines, and whichever of the papers' methods there are, each with its own settings."""
    names = [*BASELINES, *(name for name in PAPERS if name in METHODS)]
    return [ENTRIES.get(name, name) for name in names]


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
            for run in read_comparison(place).places:
                # Only the runs go: whatever else someone put there stays.
                inside = place.resolve() in run.directory.resolve().parents
                if inside and (run.directory / "config.toml").exists():
                    shutil.rmtree(run.directory)
            (place / FILE).unlink()
        place.mkdir(parents=True, exist_ok=True)
        mark.write_text("Made by 'fedkeel demo', which replaces the runs in this directory.\n")


class Tabulated(Protocol):
    """A comparison, or whatever else has a table of results."""

    @property
    def results(self) -> Results: ...


def findings(comparison: Tabulated) -> list[str]:
    """What the table shows, a sentence each, all from its numbers."""
    results = comparison.results
    rows: dict[str, Row] = {}
    federated: list[Row] = []
    for row in sorted(results.rows, key=lambda row: -row.average.mean):
        method, shown = row.method.partition("@")[0], replace(row, method=results.name(row))
        rows.setdefault(method, shown)  # of one that is there with several options, the best
        if method not in ("central", "standalone"):
            federated.append(shown)
    if not federated:
        return []
    return [
        sentence
        for sentence in (
            _best(federated),
            _gap(rows, federated),
            _gain(rows, federated, results.domains),
            _hardest(federated, results.domains),
        )
        if sentence
    ]


def _best(federated: Sequence[Row]) -> str:
    ranked = sorted(federated, key=lambda row: -row.average.mean)
    first = ranked[0]
    sentence = f"Best on average: {name(first)} with {percent(first.average.mean)} %"
    # Two means that differ by less than their spread are not told apart by three seeds.
    near = [
        f"{name(row)} ({percent(row.average.mean)})"
        for row in ranked[1:]
        if first.average.mean - row.average.mean <= max(first.average.std or 0.0, row.average.std or 0.0)
    ]
    return f"{sentence}; within the spread of it: {', '.join(near)}." if near else f"{sentence}."


def _gap(rows: dict[str, Row], federated: Sequence[Row]) -> str:
    central, fedavg = rows.get("central"), rows.get("fedavg")
    if central is None or fedavg is None:
        return ""
    gap = central.average.mean - fedavg.average.mean
    if gap <= 0:
        return f"{name(fedavg)} is not behind training on the pooled data ({percent(central.average.mean)} %) here."
    sentence = f"The shift costs {name(fedavg)} {percent(gap)} points against training on the pooled data"
    best = max(federated, key=lambda row: row.average.mean)
    closed = (best.average.mean - fedavg.average.mean) / gap
    if best.method == fedavg.method or closed <= 0:
        return f"{sentence}, and no other method here wins any of them back."
    if closed >= 1:
        return f"{sentence}; {name(best)} wins all of them back."
    return f"{sentence}; {name(best)} wins {100 * closed:.0f} % of them back."


def _gain(rows: dict[str, Row], federated: Sequence[Row], domains: Sequence[str]) -> str:
    alone = rows.get("standalone")
    if alone is None:
        return ""
    gains = {
        (row.domains[domain].mean - alone.domains[domain].mean, domain, name(row))
        for row in federated
        for domain in domains
        if domain in row.domains and domain in alone.domains
    }
    gain, domain, method = max(gains)
    if gain <= 0:
        return "On no domain does a federation beat the client that trains alone."
    lone = percent(alone.domains[domain].mean)
    return (
        f"Federation helps most on '{domain}': {method} reaches {percent(alone.domains[domain].mean + gain)} %, "
        f"the client alone {lone} %."
    )


def _hardest(federated: Sequence[Row], domains: Sequence[str]) -> str:
    means = {
        domain: sum(row.domains[domain].mean for row in federated) / len(federated)
        for domain in domains
        if all(domain in row.domains for row in federated)
    }
    if not means:
        return ""
    hardest = min(means, key=lambda domain: means[domain])
    best = max(federated, key=lambda row: row.domains[hardest].mean)
    return (
        f"The hardest domain is '{hardest}' ({percent(means[hardest])} % over the federated methods); "
        f"best there is {name(best)} with {percent(best.domains[hardest].mean)} %."
    )


def name(row: Row) -> str:
    """Its options are in it only where another row has the same method."""
    return row.method
