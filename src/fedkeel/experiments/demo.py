"""The demo: what a shift of looks and a shift of labels do to federated learning, on the embedded digits.

Two ordinary comparisons, a report of both, and sentences that say what the numbers show. In each part a method stands
where the difference it makes is larger than what another seed, another processor or other test images change.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedkeel import analysis
from fedkeel.analysis.diagnostic import FOLDER
from fedkeel.experiments.comparison import Comparison, compare
from fedkeel.experiments.findings import REFERENCES
from fedkeel.experiments.jobs import JobsObserver

# The digits are 8 x 8 scans drawn at 32 px; at 16 px a round takes a quarter of the time.
TRANSFORM = "resize(size=16)+normalise(mean=0.5, std=0.5)"
RATE = 0.02
SETTINGS: dict[str, Any] = {
    "rounds": 16,
    "batch_size": 16,
    "learning_rate": RATE,
    "momentum": 0.9,
    "schedule": "cosine",  # the last rounds change little, so that the last one is no accident
    "evaluate_every": 4,
    "checkpoint_every": 16,
}
CALIBRATED = "4,16,64"  # images of a site, without labels
QUICK: dict[str, Any] = {"rounds": 3, "evaluate_every": 1, "subsample": 32, "model": "simple_cnn(width=4)"}


@dataclass(frozen=True)
class Part:
    """One of the comparisons: its folder and what it shows."""

    name: str
    title: str
    methods: tuple[str, ...]
    quick: tuple[str, ...]
    settings: dict[str, Any]
    claimed: str = ""  # where the papers claim what does not show here


def drawn_small(data: str) -> str:
    return f"{data}(train_transform='{TRANSFORM}', test_transform='{TRANSFORM}')"


def at_rates(**rates: float) -> tuple[str, ...]:
    """Methods at the learning rates that 'fedkeel tune' chose for each on validation data: see docs/cli.md."""
    return tuple(name if rate == RATE else f"{name}@learning_rate={rate}" for name, rate in rates.items())


PARTS = (
    Part(
        "feature-shift",
        "Feature shift: four clients, each with digits of another look; no client has the look 'street'.",
        at_rates(central=0.02, fedavg=0.05, fedbn=0.05, greg=0.03, fedwon=0.1, fedcoda=0.03),
        ("central", "fedavg", "fedbn"),
        # What every method here has and what costs next to nothing, so that the report can say why one is ahead.
        {
            "data": drawn_small("digits-shift"),
            "unseen": "street",
            "model": "simple_cnn",
            "record": f"representation-divergence,calibration(images='{CALIBRATED}')",
            "record_every": 16,
        },
    ),
    Part(
        "label-shift",
        "Label shift: ten clients with digits of one look, each with three of the ten digits.",
        at_rates(central=0.01, standalone=0.02, fedavg=0.05, hbn=0.02, univarfl=0.02),
        ("standalone", "fedavg"),
        {
            "data": drawn_small("digits"),
            "partition": "shards(clients=10, classes_per_client=3)",
            "model": "simple_cnn(projector=128)",  # UniVarFL spreads the features of a projector, as in its paper
        },
        "HBN's paper claims its gain on photographs in small batches, UniVarFL's where clients share next to no "
        "class. What came of both here: docs/results.md.",
    ),
)


def demo(
    directory: str | Path = "runs/demo",
    *,
    seeds: int | Sequence[int] = 3,
    jobs: int | None = None,
    quick: bool = False,
    observer: JobsObserver | None = None,
) -> list[Comparison]:
    """Compare the methods under both shifts. The same call again does what is not finished yet."""
    return [
        compare(
            part.quick if quick else part.methods,
            seeds=1 if quick else seeds,
            directory=Path(directory) / part.name,
            jobs=jobs,
            observer=observer,
            verbose=False,
            **{**SETTINGS, **part.settings, **(QUICK if quick else {})},
        )
        for part in PARTS
    ]


def calibrated(comparison: Comparison) -> list[str]:
    """What calibration changed, in a sentence: means over seeds, of the methods that have something to calibrate."""
    found: dict[str, list[tuple[float, float]]] = {}
    last = CALIBRATED.rpartition(",")[2]
    for trial in comparison.trials:
        name, path = trial.label.partition("@")[0], trial.directory / FOLDER / "calibration.json"
        document = json.loads(path.read_text()) if path.exists() and name not in REFERENCES else {"rounds": []}
        before, after = (analysis.number(document, at) for at in ("as it is", f"rule {last}"))
        if before is not None and after is not None:
            found.setdefault(name, []).append((before, after))
    means = {name: [fmean(numbers) for numbers in zip(*each, strict=True)] for name, each in found.items()}
    told = [f"{name} {before:.1f} to {after:.1f}" for name, (before, after) in means.items() if before != after]
    return [f"Calibrated to each site on {last} of its images, without labels: {', '.join(told)}."] if told else []


def introduction(*, quick: bool) -> str:
    if quick:
        return "A quick look: few methods, one seed, three rounds. The numbers mean nothing yet."
    return (
        "Real handwritten digits on clients whose images look different, then on clients whose labels differ.\n"
        "Every client trains on its own digits, and only models travel. This takes about two minutes on two cores."
    )
