"""Where the blocks are run: a folder with the things that pages speak of, and runs that are cut short.

What a reader types is what is run, but for its size. Runs have two rounds, comparisons two seeds, clients few images;
`demo` gets its `--quick`; clients run in this process. Nothing else is changed.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

import fedkeel
from fedkeel import models
from fedkeel.config import Config
from fedkeel.data import partition
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.load import Cut
from fedkeel.data.population import Split
from fedkeel.data.reader import PUBLISHED
from fedkeel.experiments.rows import read_seeds
from fedkeel.registry import REGISTRIES

ROUNDS, SEEDS, TRAINED, TESTED = 2, 2, 16, 10  # at most: rounds of a run, seeds of a comparison, images of a domain
TRIALS = 2  # at most, of a search
QUICKLY: Mapping[str, Any] = {"executor": "serial", "threads": 1}


# -- runs are cut short ----------------------------------------------------------------------------------------------
@contextmanager
def cut_short() -> Iterator[None]:
    """Runs by whatever way have few rounds and few images; what blocks register is forgotten afterwards."""
    simulate, compare, resume, federation = fedkeel.simulate, fedkeel.compare, fedkeel.resume, Cut.federation
    tune = fedkeel.tune

    def short(options: Mapping[str, Any], config: Config) -> dict[str, Any]:
        rounds = options.get("rounds", config.rounds)
        quickly = QUICKLY if options.get("executor", config.executor) == "auto" else {}
        return {**options, **quickly, "rounds": min(rounds, ROUNDS)}

    def of_one(config: Any = None, **options: Any) -> fedkeel.Run:
        return simulate(config, **short(options, config if isinstance(config, Config) else Config()))

    def of_several(methods: Any, **options: Any) -> Any:
        seeds = read_seeds(options.get("seeds", SEEDS))[:SEEDS]
        return compare(methods, **short(options, Config()) | {"seeds": seeds, "jobs": options.get("jobs") or 1})

    def of_a_search(methods: Any, **options: Any) -> Any:
        fewest = {"trials": min(options.get("trials", TRIALS), TRIALS), "seeds": 1, "jobs": 1}
        return tune(methods, **short(options, Config()) | fewest)

    def more(directory: Any, *, rounds: int | None = None, **options: Any) -> fedkeel.Run:
        fewer = rounds and min(rounds, fedkeel.Run(directory).rounds_done + 1)
        return resume(directory, rounds=fewer, **options)

    def fewer(cut: Cut, dataset: Dataset) -> Federation:
        divided = cut.partition != partition.build("domains")  # over several clients, each of which needs some
        train = len(dataset.images) if divided else max(TRAINED, cut.subsample or 0)
        domains = {
            name: Split(some(split.train, train), some(split.validation, TESTED), some(split.test, TESTED))
            for name, split in dataset.domains.items()
        }
        return federation(cut, replace(dataset, domains=domains))

    with (
        mock.patch.multiple(fedkeel, simulate=of_one, compare=of_several, tune=of_a_search, resume=more),
        mock.patch.object(Cut, "federation", fewer),
        forgetting(),
    ):
        yield


def some(indices: torch.Tensor, most: int) -> torch.Tensor:
    """So many of them, from the whole of it: they may be in the order of their classes."""
    count = min(most, len(indices))
    return indices[torch.linspace(0, max(len(indices) - 1, 0), count).long()]


@contextmanager
def forgetting() -> Iterator[None]:
    before = {group: dict(registry._entries) for group, registry in REGISTRIES.items()}
    try:
        with mock.patch.dict(PUBLISHED):
            yield
    finally:
        for group, entries in before.items():
            REGISTRIES[group]._entries = entries


# -- the things that pages speak of ----------------------------------------------------------------------------------
def provide(text: str, shelf: Path) -> None:
    """Put what the text names, and is not there, into the present folder. `shelf` keeps what takes time to make."""
    written = re.sub(r"(--out|--output|-o)[ =]\S+", "", text)  # a command makes these itself
    for pattern, make in THINGS.items():
        for found in re.finditer(pattern, written):
            place = Path(found[0])
            if place.exists():
                continue
            kept = shelf / place
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                make(kept)
            place.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if kept.is_dir() else shutil.copyfile)(kept, place)


def draw(folder: Path, count: int, first: int = 0) -> None:
    """Pictures of noise, two of each patient."""
    folder.mkdir(parents=True)
    for number in range(first, first + count):
        draw_one(folder / f"patient{number // 2:02}_{number % 2}.png", number)


def draw_one(place: Path, number: int = 0) -> None:
    pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(place)


def make_tree(domains: tuple[str, ...], classes: tuple[str, ...], place: Path) -> None:
    for number, (domain, name) in enumerate(itertools.product(domains, classes)):
        draw(place / domain / name, 20, first=20 * number)


def make_classes(place: Path) -> None:
    make_tree((".",), ("benign", "malignant"), place)


def make_run(place: Path) -> None:
    named = re.fullmatch(r"digits-shift-(.+)-seed(\d+)", place.name)
    method, seed = (named[1], int(named[2])) if named else ("fedavg", 0)
    fedkeel.simulate(method=method, seed=seed, directory=place, verbose=False)


def make_comparison(place: Path) -> None:
    fedkeel.compare(["fedavg", "fedbn"], seeds=2, directory=place, verbose=False, record="label-distribution")


def make_table(place: Path) -> None:
    """The table of images of the page on data."""
    images = place.with_suffix(".folder")
    draw(images, 40)
    lines = ["path,label,site,group,split"]
    for number, image in enumerate(sorted(images.iterdir())):
        label, site = ("benign", "malignant")[number // 2 % 2], f"hospital_{'ab'[number // 4 % 2]}"
        lines.append(
            f"{image},{label},{site},{image.name[:9]},{('train', 'train', 'test', 'validation')[number // 8 % 4]}"
        )
    place.write_text("\n".join(lines) + "\n")


def make_patients(place: Path) -> None:
    """A table of numbers."""
    rows = [f"{20 + n},{n / 7},{('ill', 'well')[n % 2]},{('north', 'south')[n // 30]},{n // 2}" for n in range(60)]
    place.write_text("\n".join(["age,dose,diagnosis,hospital,patient", *rows]) + "\n")


def make_weights(network: str, place: Path) -> None:
    torch.save(models.build(network, num_classes=2, image_size=224).state_dict(), place)


OWN_METHOD = """
from dataclasses import dataclass

import fedkeel


@fedkeel.register("mine")
@dataclass
class Mine(fedkeel.Method):
    \"\"\"Gradients are halved.\"\"\"

    half: float = 100.0

    def gradients(self, client, recompute):
        for parameter in client.model.parameters():
            parameter.grad.mul_(0.5)
"""
OWN_MODEL = """
from fedkeel import models
from fedkeel.models.cnn import SimpleCNN


@models.network("my-net", paper="")
class MyNet(SimpleCNN):
    \"\"\"A network of one's own.\"\"\"
"""


# What a page may name without saying how to make it, and how it is made.
THINGS: Mapping[str, Callable[[Path], None]] = {
    r"\bruns/(?:demo|compare-[\w-]+)": make_comparison,
    r"\bruns/(?!demo|compare-)\w[\w-]*": make_run,
    r"(?<![\w/-])(?:\./)?images\b(?!\.)": functools.partial(make_tree, ("photo", "sketch"), ("cat", "dog")),
    r"\bscans\b": make_classes,
    r"\bimages\.csv\b": make_table,
    r"\bpatients\.csv\b": make_patients,
    r"\./data\b": Path.mkdir,
    r"\bnew(?:-images)?/": functools.partial(draw, count=2),
    r"\b[ab]\.png\b": draw_one,
    r"\bmy_methods\.py\b": lambda place: place.write_text(OWN_METHOD) and None,
    r"\bmy_models\.py\b": lambda place: place.write_text(OWN_MODEL) and None,
    r"\b(?:resnet18|imagenet)\.pth\b": functools.partial(make_weights, "resnet18"),
}
