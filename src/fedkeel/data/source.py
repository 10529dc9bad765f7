"""A source: a data set as it was read, before it is cut into clients.

A *reader* (one function per data set, registered in `DATASETS`) gives a `Source`: every image once, and for each
domain which of them are for training, validation and testing. A *partition* then cuts each domain's training
images into clients (`fedkeel.data.partition`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeel import seeds
from fedkeel.data.federation import Transform, each_once
from fedkeel.errors import DataError
from fedkeel.registry import Registry

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """Indices into the store of one domain's images, by what they are for."""

    train: Tensor
    validation: Tensor
    test: Tensor

    def all(self) -> Tensor:
        """Every image of the domain, in the store's order."""
        return each_once([self.train, self.validation, self.test])


@dataclass(frozen=True)
class Source:
    """Images, labels and each domain's split, with the data set's usual transforms."""

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    domains: Mapping[str, Split]
    train_transform: Transform
    test_transform: Transform
    users: npt.NDArray[Any] | None = None  # whose each image is, whole numbers or text; for the partition by-user

    def __post_init__(self) -> None:
        if not self.domains:
            raise DataError(f"'{self.name}' has no domain: give at least one.")
        if self.users is not None and len(self.users) != len(self.images):
            raise DataError(f"'{self.name}' has {len(self.images)} images, but users of {len(self.users)}.")
        for domain, split in self.domains.items():
            if len(split.all()) < len(split.train) + len(split.validation) + len(split.test):
                raise DataError(
                    f"In '{self.name}' an image of the domain '{domain}' is in two of train, validation and test: "
                    "keep it in one."
                )


DATASETS: Registry[Source] = Registry("data set")


def stratified_split(
    labels: IntArray, *, validation: float, test: float, seed: int, purpose: str
) -> tuple[IntArray, IntArray, IntArray]:
    """Positions for training, validation and testing, with each class cut in the same proportions.

    A class that has any image keeps at least one for training.
    """
    generator = seeds.numpy_generator(seed, "split", purpose)
    parts: tuple[list[IntArray], ...] = ([], [], [])
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        tests = min(int(len(members) * test + 0.5), len(members) - 1)
        validations = min(int(len(members) * validation + 0.5), len(members) - 1 - tests)
        cuts = np.split(members, [tests, tests + validations])
        for part, cut in zip((parts[2], parts[1], parts[0]), cuts, strict=True):
            part.append(cut)
    train, held, tested = (np.sort(np.concatenate([np.empty(0, np.int64), *part])) for part in parts)
    return train, held, tested


def find_root(name: str, root: str | os.PathLike[str] | None, folders: Sequence[str]) -> Path:
    """Where a data set lies: `root` if given, else the first of `folders` that is in $FEDKEEL_DATA."""
    if root is not None:
        path = Path(root).expanduser()
        if not path.exists():
            raise DataError(f"The root '{root}' of '{name}' does not exist: give the path of the data set.")
        return path
    base = os.environ.get("FEDKEEL_DATA", "")
    if not base:
        raise DataError(
            f"'{name}' needs its data: give root=PATH, or set FEDKEEL_DATA to the folder that has '{folders[0]}' in it."
        )
    for folder in folders:
        path = Path(base).expanduser() / folder
        if path.exists():
            return path
    looked = " or ".join(f"'{folder}'" for folder in folders)
    raise DataError(f"FEDKEEL_DATA is '{base}', and there is no {looked} in it: give root=PATH or put the data there.")


def whole(what: str, value: object, minimum: int) -> int:
    """An option that counts something, or one sentence that says what it must be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise DataError(f"{what} is {value!r}: give a whole number of at least {minimum}.")
    return value


def number(what: str, value: object, low: float, high: float) -> float:
    """An option that measures something, or one sentence that says in which range it must be."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise DataError(f"{what} is {value!r}: give a number from {low:g} to {high:g}.")
    return value


def fractions(validation: float, test: float) -> None:
    """Refuse shares of validation and test images that leave nothing to train on."""
    for what, value in (("validation", validation), ("test", test)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise DataError(f"{what} is {value!r}: give the share of the images as a number from 0 to below 1.")
    if validation + test >= 1:
        raise DataError(
            f"validation={validation} and test={test} leave nothing to train on: their sum must be below 1."
        )


def indices(positions: npt.NDArray[np.integer] | Sequence[int]) -> Tensor:
    """Positions as the int64 index tensor that clients hold."""
    return torch.from_numpy(np.array(positions, dtype=np.int64))


def names(given: str | Sequence[str]) -> list[str]:
    """Names from a list, or from text as in `unseen=sketch` and `unseen=[art, sketch]`; each once."""
    if not isinstance(given, str | Iterable):
        given = str(given)  # a domain called 3
    parts = given.strip("[]() ").split(",") if isinstance(given, str) else [str(name) for name in given]
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
