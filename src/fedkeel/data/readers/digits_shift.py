"""digits-shift, the embedded default: real handwritten digits that look different on every client.

The 1,797 digits of scikit-learn (8 x 8 pixels, Alpaydin and Kaynak, 1998), dealt without overlap to five domains in
the manner of Digits-Five: each digit is in one domain only. Drawn at 32 x 32 in colour when loaded, and the same
bits on every machine: all arithmetic is on integers, and the random numbers are the generator's raw 64-bit words.
"""

from __future__ import annotations

import gzip
import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch

from fedkeel import seeds
from fedkeel.data.dataset import Dataset, Split, indices
from fedkeel.data.population import IntArray
from fedkeel.data.reader import DATASETS
from fedkeel.data.readers.digits_styles import STYLES, Draws
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError

TEST_PER_CLASS = 9
VALIDATION_PER_CLASS = 5


@DATASETS.register("digits-shift", paper="Digits of Alpaydin and Kaynak (UCI, 1998); domains after Digits-Five")
def read_digits_shift() -> Dataset:
    """Embedded: 1,797 real handwritten digits in five domains that look different (32 px, nothing to download)."""
    return draw_all()


@cache
def draw_all() -> Dataset:
    glyphs, labels = read_glyphs()
    images = np.zeros((len(labels), 3, 32, 32), np.uint8)
    domains = {}
    owners = deal_to_domains(labels)
    for number, (name, style) in enumerate(STYLES.items()):
        members = np.flatnonzero(owners == number)
        images[members] = style(glyphs[members], Draws(seeds.numpy_generator(0, "digits-shift", name)))
        domains[name] = fixed_split(members, labels[members])
    plain = parse_transforms("normalise")
    return Dataset(
        name="digits-shift",
        images=torch.from_numpy(images),
        labels=torch.from_numpy(labels),
        classes=tuple("0123456789"),
        domains=domains,
        train_transform=plain,
        test_transform=plain,
    )


def read_glyphs() -> tuple[IntArray, IntArray]:
    """The digits (N, 8, 8) with values 0 to 16 and their labels, from the installed scikit-learn."""
    # Importing sklearn.datasets takes a second; the file alone does not.
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise DataError(
            "digits-shift reads its digits from scikit-learn, which is not installed: install scikit-learn."
        )
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        raise DataError(f"scikit-learn's digits are not at '{file}': install scikit-learn 1.4 or newer again.")
    with gzip.open(file, "rt") as lines:
        table = np.array([line.split(",") for line in lines], dtype=np.int64)
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].copy()


def deal_to_domains(labels: IntArray) -> IntArray:
    """Each digit's domain: every class is dealt in turn, in an order of its own."""
    owners = np.zeros(len(labels), np.int64)
    draws = Draws(seeds.numpy_generator(0, "digits-shift", "domains"))
    for label in range(10):
        members = np.flatnonzero(labels == label)
        order = np.argsort(draws.words(len(members)), kind="stable")
        # Starting at another domain for each class keeps the domains' sizes alike.
        owners[members[order]] = (np.arange(len(members)) + label) % len(STYLES)
    return owners


def fixed_split(members: IntArray, labels: IntArray) -> Split:
    """The same number of each class for testing and for validation, the rest for training.

    `members` are in the order of the data set, in which a writer's digits lie together. Taking the test digits
    from places spread over it keeps all writers in all three.
    """
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    held = TEST_PER_CLASS + VALIDATION_PER_CLASS
    for label in range(10):
        own = members[labels == label]
        places = [position * len(own) // held for position in range(held)]
        for turn, place in enumerate(places):
            # Of 14 places, 9 are for testing, evenly spread: those where floor(9 t / 14) steps.
            stepped = (turn + 1) * TEST_PER_CLASS // held > turn * TEST_PER_CLASS // held
            parts["test" if stepped else "validation"].append(int(own[place]))
        parts["train"].extend(int(own[place]) for place in range(len(own)) if place not in places)
    return Split(**{name: indices(sorted(positions)) for name, positions in parts.items()})
