"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): the binary version, parquet, or folders of images.

The version for Python is pickled. Pickles can run any code when they are read, so they are not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.formats.arrays import cifar_items
from fedkeel.data.formats.parquet import parquet_domain, parquet_files
from fedkeel.data.listing import (
    Domain,
    Findings,
    Items,
    Listing,
    assemble,
    class_files,
    image_files,
    step_into,
    train_and_test,
)
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root
from fedkeel.errors import DataError

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
CIFAR100 = tuple(CIFAR100_NAMES.split())
BINARIES = {
    "cifar10": ([f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]),
    "cifar100": (["train.bin"], ["test.bin"]),
}
TRAIN, TEST = "crop(padding=4)+flip+normalise(like=cifar10)", "normalise(like=cifar10)"


def scanner(name: str, classes: tuple[str, ...], binary: str, pickled: str) -> Callable[..., Listing]:
    def scan(root: Path, findings: Findings) -> Listing:
        domains: dict[str, Domain] = {}
        with findings.part():
            domains[name] = read_domain(
                name, classes, root, step_into(root, binary), step_into(root, pickled), findings
            )
        return Listing(name, root, classes, domains)

    return scan


def read_domain(
    name: str, classes: tuple[str, ...], root: Path, binary: Path, pickled: Path, findings: Findings
) -> Domain:
    if parquet_files(root, "train") or parquet_files(root, "test"):
        return train_and_test(*parquet_domain(name, root, len(classes)))
    files = BINARIES[name]
    if any((binary / file).is_file() for part in files for file in part):
        parts: list[list[Items]] = [[], []]
        for part, wanted in zip(parts, files, strict=True):
            for file in wanted:
                if not (binary / file).is_file():
                    findings.missing(f"'{binary / file}' is missing: put it beside the other files of {name}.")
                    continue
                part.append(cifar_items(name, binary / file, 1 if name == "cifar10" else 2, len(classes)))
        return train_and_test(*parts)
    trees_there = [(root / use).is_dir() for use in ("train", "test")]
    if any(trees_there) and not all(trees_there):
        lost = root / ("test" if trees_there[0] else "train")
        raise DataError(f"'{lost}' is missing: {name} has the folders train/<class>/ and test/<class>/.")
    if all(trees_there):
        trees = [image_files(*class_files(name, root / use, classes, findings)) for use in ("train", "test")]
        return train_and_test([trees[0]], [trees[1]])
    if any((pickled / file).is_file() for file in ("data_batch_1", "test_batch", "train", "test")):
        raise DataError(
            f"'{pickled}' is the pickled version of {name}, which is not read because pickles can run any code: get "
            "the binary version from the same page."
        )
    raise DataError(f"There is no {name} in '{root}': 'fedkeel data list {name}' shows how its folder must look.")


def describe(name: str, classes: tuple[str, ...], binary: str, pickled: str, what: str) -> Published:
    train, test = ("data_batch_{1..5}.bin", "test_batch.bin") if name == "cifar10" else ("train.bin", "test.bin")
    return publish(
        Published(
            name=name,
            what=what,
            home="https://www.cs.toronto.edu/~kriz/cifar.html",
            licence="none stated",
            layout=f"{name}/{binary}/{train} and {test}   the binary version\n"
            f"or {name}/{{train,test}}.parquet, or {name}/{{train,test}}/<class>/*.png",
            folders=(name, binary, name.replace("cifar", "CIFAR"), name.replace("cifar", "cifar-"), pickled),
            classes=len(classes),
            sizes={name: {"train": 50000, "test": 10000}},
            scan=scanner(name, classes, binary, pickled),
        )
    )


TEN = describe(
    "cifar10", CIFAR10, "cifar-10-batches-bin", "cifar-10-batches-py", "Ten classes of 32 px photographs, one domain."
)
HUNDRED = describe(
    "cifar100", CIFAR100, "cifar-100-binary", "cifar-100-python", "A hundred classes of 32 px photographs, one domain."
)


@DATASETS.register("cifar10", paper="Krizhevsky, 2009")
def read_cifar10(
    root: str | os.PathLike[str] | None = None, size: int = 32, validation: float = 0.0, split_seed: int = 0
) -> Source:
    """CIFAR-10: 50,000 + 10,000 images of 10 classes, one domain, with the official test set.

    `validation` is a share of the training set, none by default.
    """
    return read(TEN, root, size, validation, split_seed)


@DATASETS.register("cifar100", paper="Krizhevsky, 2009")
def read_cifar100(
    root: str | os.PathLike[str] | None = None, size: int = 32, validation: float = 0.0, split_seed: int = 0
) -> Source:
    """CIFAR-100: 50,000 + 10,000 images of 100 classes, one domain, with the official test set.

    Normalised as CIFAR-10, as HBN does. `validation` is a share of the training set: UniVarFL takes 0.1.
    """
    return read(HUNDRED, root, size, validation, split_seed)


def read(entry: Published, root: str | os.PathLike[str] | None, size: int, validation: float, seed: int) -> Source:
    listing = scanned(entry, find_root(entry.name, root, entry.folders))
    return assemble(listing, rules.by_shares(listing.domains, validation, 0.0, seed), size, train=TRAIN, test=TEST)
