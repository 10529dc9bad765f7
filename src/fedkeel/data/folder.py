"""A tree of images, `root/<domain>/<class>/*.png`: one's own data, PACS, Office-Caltech-10.

Where `root/splits/<domain>_train.txt` and `<domain>_test.txt` exist, they say which images are for what; otherwise
each class of each domain is split at random by `split_seed`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedkeel.data.cache import fingerprint
from fedkeel.data.images import decode_all
from fedkeel.data.source import (
    DATASETS,
    IntArray,
    Source,
    Split,
    find_root,
    fractions,
    indices,
    names,
    stratified_split,
    whole,
)
from fedkeel.data.split_lists import read_lists
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError, nearest

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
LAYOUT = "root/<domain>/<class>/*.png (or jpg, jpeg, bmp, webp)"
AnyPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Tree:
    """The image files below a root, in a fixed order, with each one's domain and class."""

    root: Path
    files: list[Path]
    domains: list[str]
    classes: tuple[str, ...]
    domain_of: IntArray
    class_of: IntArray


@DATASETS.register("folder")
def read_folder(
    root: AnyPath | None = None,
    size: int = 32,
    validation: float = 0.15,
    test: float = 0.25,
    split_seed: int = 0,
    classes: str | Sequence[str] | None = None,
) -> Source:
    """Your own images, in folders root/<domain>/<class>/, resized to size x size pixels.

    `classes` fixes the label order, for sites that do not have every class; by default it is every class folder of
    any domain, sorted. `validation` and `test` are shares of each class of a domain.
    """
    if root is None:
        raise DataError(f"folder needs the path of your images: give root=PATH, a folder laid out as {LAYOUT}.")
    tree = scan_tree("folder", find_root("folder", root, ()), classes)
    return read_tree("folder", tree, size, validation, test, split_seed, train="flip+normalise", tested="normalise")


@DATASETS.register("pacs", paper="Li et al., ICCV 2017 (arXiv:1710.03077)")
def read_pacs(
    root: AnyPath | None = None, size: int = 224, validation: float = 0.1, test: float = 0.2, split_seed: int = 0
) -> Source:
    """PACS: 9,991 images of 7 classes in photo, art painting, cartoon and sketch."""
    tree = scan_tree("pacs", find_root("pacs", root, ("pacs", "PACS")), None)
    expect_domains("pacs", tree, ("art_painting", "cartoon", "photo", "sketch"))
    train = "resized-crop(scale=(0.7, 1.0))+flip+jitter(brightness=0.4, contrast=0.4, saturation=0.4)"
    train += "+grayscale(p=0.1)+normalise(like=imagenet)"
    return read_tree("pacs", tree, size, validation, test, split_seed, train=train, tested="normalise(like=imagenet)")


@DATASETS.register("office-caltech-10", paper="Gong et al., CVPR 2012; transforms and lists of FedBN")
def read_office_caltech_10(
    root: AnyPath | None = None,
    size: int = 256,
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    subset: str | None = None,
) -> Source:
    """Office-Caltech-10: 2,533 images of 10 classes in amazon, caltech, dslr and webcam.

    `subset="fedbn"` takes what FedBN takes of its training lists: half of the smallest one for training (the first
    62 of each) and 40 % of it for validation (the last 50).
    """
    folders = ("office-caltech-10", "office_caltech_10")
    tree = scan_tree("office-caltech-10", find_root("office-caltech-10", root, folders), None)
    expect_domains("office-caltech-10", tree, ("amazon", "caltech", "dslr", "webcam"))
    if subset not in (None, "fedbn"):
        raise DataError(f"subset is {subset!r}: choose 'fedbn', or leave it out for every image.")
    if subset and not (tree.root / "splits").is_dir():
        raise DataError(f"subset='fedbn' needs FedBN's lists, and '{tree.root}' has no folder 'splits': leave it out.")
    held = 0.0 if subset else validation
    source = read_tree(
        "office-caltech-10", tree, size, held, test, split_seed, train="flip+rotation(degrees=30)", tested=""
    )
    return fedbn_subset(source) if subset else source


def scan_tree(name: str, root: Path, classes: str | Sequence[str] | None) -> Tree:
    """Find the images, and refuse a tree of another layout with a sentence that says which one is expected."""
    domains = [path for path in visible_folders(root) if path.name != "splits"]
    flat = [path.name for path in domains if images_in(path)]
    if flat:
        raise DataError(
            f"'{root / flat[0]}' has images right in it, but the layout must be {LAYOUT}: if '{flat[0]}' is a class, "
            f"put the class folders of '{root}' into a folder named after their domain."
        )
    found: list[tuple[Path, str, str]] = []
    folders: set[str] = set()
    for domain in domains:
        before = len(found)
        for folder in visible_folders(domain):
            folders.add(folder.name)
            found.extend((file, domain.name, folder.name) for file in images_in(folder))
        if len(found) == before:
            raise DataError(f"The domain '{domain}' of '{name}' has no images: the layout must be {LAYOUT}.")
    if not found:
        raise DataError(f"There are no images in '{root}': the layout must be {LAYOUT}.")
    order = tuple(sorted(folders)) if classes is None else tuple(names(classes))
    for label in sorted(folders):
        if label not in order:
            raise DataError(f"The class folder '{label}' of '{name}' is not in classes: {nearest(label, order)}")
    domain_names = [domain.name for domain in domains]
    return Tree(
        root=root,
        files=[file for file, _, _ in found],
        domains=domain_names,
        classes=order,
        domain_of=np.array([domain_names.index(domain) for _, domain, _ in found], np.int64),
        class_of=np.array([order.index(label) for _, _, label in found], np.int64),
    )


def read_tree(
    name: str,
    tree: Tree,
    size: int,
    validation: float,
    test: float,
    split_seed: int,
    *,
    train: str,
    tested: str,
) -> Source:
    """Decode a tree and split each of its domains."""
    whole(f"size in {name}", size, 1)
    fractions(validation, test)
    paths = [file.relative_to(tree.root).as_posix() for file in tree.files]
    # Lists and fractions refer to the tree as it is; only then the images that cannot be decoded are taken out.
    splits = {
        domain: split_domain(tree, paths, number, validation, test, split_seed)
        for number, domain in enumerate(tree.domains)
    }
    key = [fingerprint(file.absolute()) for file in tree.files]
    images, kept = decode_all(name, key, len(paths), lambda: tree.files, lambda i: str(tree.files[i]), size)
    position = np.full(len(paths), -1)
    position[kept] = np.arange(len(kept))
    domains = {}
    for domain, parts in splits.items():
        stored = [position[part] for part in parts]
        domains[domain] = Split(*(indices(part[part >= 0]) for part in stored))
    return Source(
        name=name,
        images=torch.from_numpy(images),
        labels=torch.from_numpy(tree.class_of[kept]),
        classes=tree.classes,
        domains=domains,
        train_transform=parse_transforms(train),
        test_transform=parse_transforms(tested),
    )


Parts = tuple[IntArray, IntArray, IntArray]


def split_domain(tree: Tree, paths: list[str], number: int, validation: float, test: float, seed: int) -> Parts:
    """Train, validation and test positions of one domain, those of lists in the lists' order."""
    domain = tree.domains[number]
    members = np.flatnonzero(tree.domain_of == number)
    listed = read_lists(tree.root, domain, {paths[i]: int(i) for i in members})
    if listed is None:
        cuts = stratified_split(tree.class_of[members], validation=validation, test=test, seed=seed, purpose=domain)
        return members[cuts[0]], members[cuts[1]], members[cuts[2]]
    training, held, tested = listed
    if len(held) == 0 and validation:
        labels = tree.class_of[training]
        cuts = stratified_split(labels, validation=validation, test=0, seed=seed, purpose=domain)
        training, held = training[cuts[0]], training[cuts[1]]
    return training, held, tested


def fedbn_subset(source: Source) -> Source:
    """FedBN's rule: as many images as half and as 40 % of the smallest training list, from its start and its end."""
    smallest = min(len(split.train) for split in source.domains.values())
    trained, held = int(smallest * 0.5), int(smallest * 0.4)
    domains = {
        domain: Split(split.train[:trained], split.train[len(split.train) - held :], split.test)
        for domain, split in source.domains.items()
    }
    return replace(source, domains=domains)


def expect_domains(name: str, tree: Tree, expected: Sequence[str]) -> None:
    if sorted(tree.domains) != sorted(expected):
        raise DataError(
            f"'{tree.root}' has the domains {', '.join(tree.domains)}, but {name} has {', '.join(expected)}: "
            "give the root of that data set, or read other trees with folder(root=PATH)."
        )


def visible_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"'{path}' is not a folder: the layout must be {LAYOUT}.")
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def images_in(path: Path) -> list[Path]:
    return sorted(
        child for child in path.iterdir() if child.suffix.lower() in SUFFIXES and not child.name.startswith(".")
    )
