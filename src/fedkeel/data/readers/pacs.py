"""PACS (Li et al., ICCV 2017): photos, art paintings, cartoons and sketches of seven things.

The authors' lists `<domain>_{train,crossval,test}_kfold.txt` are used where they lie beside the images. Their test
list is the whole domain, for the protocol that leaves one domain out: `unseen=sketch` tests on exactly that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedkeel.data import rules
from fedkeel.data.formats.split_lists import read_kfold, read_lists
from fedkeel.data.formats.trees import scan_tree
from fedkeel.data.listing import Findings, Listing, Parts, assemble, step_into
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root
from fedkeel.errors import DataError

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
LISTS = "Train val splits and h5py files pre-read"
# FedDG-GA's (Zhang et al., CVPR 2023).
TRAIN = "resized-crop(scale=(0.7, 1.0))+flip+jitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.4)"
TRAIN += "+grayscale(p=0.1)+normalise(like=imagenet)"


def scan(root: Path, findings: Findings, crossval: str = "validation") -> Listing:
    images = step_into(root, "kfold", "images")
    places = (images, root, root / "splits", root / LISTS)

    def lists(domain: str, position: Mapping[str, int], labels: Sequence[int]) -> Parts | None:
        kfold = None if crossval == "unused" else read_kfold(places, domain, position, labels)
        if kfold is None:
            return read_lists(images, domain, position)
        empty = np.empty(0, np.int64)
        return (kfold[0], kfold[1], empty) if crossval == "validation" else (kfold[0], empty, kfold[1])

    return scan_tree("pacs", images, DOMAINS, CLASSES, findings, lists=lists, beside=("kfold", LISTS))


PACS = publish(
    Published(
        name="pacs",
        what="Seven things in four styles, 227 px: the usual data set of domain generalisation.",
        home="https://domaingeneralization.github.io",
        licence="none stated; for research",
        layout="pacs/<domain>/<class>/*.jpg   with the domains art_painting, cartoon, photo, sketch\n"
        "pacs/<domain>_{train,crossval,test}_kfold.txt   the authors' lists, if you have them: to hold a domain out\n"
        "with unseen=sketch; without that take pacs(crossval=test), or pacs(crossval=unused) for a split of your own",
        folders=("pacs", "PACS"),
        classes=7,
        sizes={
            "art_painting": {"images": 2048},
            "cartoon": {"images": 2344},
            "photo": {"images": 1670},
            "sketch": {"images": 3929},
        },
        scan=scan,
    )
)


@DATASETS.register("pacs", paper="Li et al., ICCV 2017 (arXiv:1710.03077)")
def read_pacs(
    root: str | os.PathLike[str] | None = None,
    size: int | None = None,
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    subset: str | None = None,
    crossval: str = "validation",
) -> Source:
    """PACS: 9,991 images of 7 classes in photo, art painting, cartoon and sketch.

    `subset="greg"` takes 584 / 233 images of each domain to train / validate and tests on 30 %, with FedBN's
    transforms and size (256, else 224); `subset="fedcoda"` splits 80 / 20. `crossval` says what the authors'
    cross-validation lists are used for, "validation" or "test"; "unused" leaves all of their lists aside.
    """
    rules.check_subset("pacs", subset, ("greg", "fedcoda"))
    if crossval not in ("validation", "test", "unused"):
        raise DataError(f"crossval is {crossval!r}: choose 'validation', 'test' or 'unused'.")
    listing = scanned(PACS, find_root("pacs", root, PACS.folders), crossval=crossval)
    if subset == "greg":
        parts = rules.equal_shares(rules.unsplit(listing.domains), 0.5, 0.2, 0.3, split_seed)
        return assemble(listing, parts, 256 if size is None else size, train="flip+rotation(degrees=30)", test="")
    if subset == "fedcoda":
        parts = rules.by_shares(listing.domains, 0, 0.2, split_seed, official=False)
    else:
        parts = rules.by_shares(listing.domains, validation, test, split_seed)
    return assemble(listing, parts, 224 if size is None else size, train=TRAIN, test="normalise(like=imagenet)")
