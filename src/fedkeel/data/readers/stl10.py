"""STL-10 (Coates et al., AISTATS 2011): ten classes of 96 px photographs in the authors' binary files."""

from __future__ import annotations

import os
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.formats.arrays import stl_items
from fedkeel.data.listing import Findings, Items, Listing, assemble, step_into, train_and_test
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root

CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")


def scan(root: Path, findings: Findings) -> Listing:
    folder = step_into(root, "stl10_binary")
    parts: list[list[Items]] = []
    for use in ("train", "test"):
        part: list[Items] = []
        images, labels = folder / f"{use}_X.bin", folder / f"{use}_y.bin"
        for file in (images, labels):
            if not file.is_file():
                findings.missing(f"'{file}' is missing: stl10 needs train_X.bin, train_y.bin, test_X.bin, test_y.bin.")
        if images.is_file() and labels.is_file():
            with findings.part():
                part.append(stl_items(f"stl10-{use}", images, labels))
        parts.append(part)
    return Listing("stl10", folder, CLASSES, {"stl10": train_and_test(*parts)})


STL10 = publish(
    Published(
        name="stl10",
        what="Ten classes of 96 px photographs, one domain; its unlabelled images are not used.",
        home="https://cs.stanford.edu/~acoates/stl10/",
        licence="as ImageNet, from which it is taken: for research",
        layout="stl10_binary/{train,test}_{X,y}.bin   the binary version",
        folders=("stl10", "stl10_binary", "STL10", "stl-10"),
        classes=10,
        sizes={"stl10": {"train": 5000, "test": 8000}},
        scan=scan,
    )
)


@DATASETS.register("stl10", paper="Coates et al., AISTATS 2011; transforms of FedUV")
def read_stl10(
    root: str | os.PathLike[str] | None = None, size: int = 96, validation: float = 0.0, split_seed: int = 0
) -> Source:
    """STL-10: 5,000 + 8,000 images of 10 classes, one domain, with the official test set.

    `validation` is a share of the training set, none by default: UniVarFL takes 0.1.
    """
    listing = scanned(STL10, find_root("stl10", root, STL10.folders))
    parts = rules.by_shares(listing.domains, validation, 0.0, split_seed)
    return assemble(listing, parts, size, train="crop(padding=4)+flip+normalise", test="normalise")
