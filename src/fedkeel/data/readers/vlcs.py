"""VLCS (Fang et al., ICCV 2013): five classes of photographs from four older data sets.

Two layouts are in use: DomainBed's `<domain>/<class>/`, and `<domain>/{train,crossval,test}/<0 to 4>/`, which has
a split of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fedkeel.data import rules
from fedkeel.data.formats.trees import scan_tree
from fedkeel.data.listing import Domain, Findings, Listing, assemble, class_files, image_files, visible_folders
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root

DOMAINS = ("Caltech101", "LabelMe", "SUN09", "VOC2007")
CLASSES = ("bird", "car", "chair", "dog", "person")
ALIASES = {
    "CALTECH": "Caltech101", "LABELME": "LabelMe", "SUN": "SUN09", "PASCAL": "VOC2007",
    "caltech": "Caltech101", "labelme": "LabelMe", "sun": "SUN09", "pascal": "VOC2007",
}  # fmt: skip
USES = ("train", "crossval", "test")


def scan(root: Path, findings: Findings) -> Listing:
    present = [folder for folder in visible_folders(root) if ALIASES.get(folder.name, folder.name) in DOMAINS]
    if not any((folder / "train").is_dir() for folder in present):
        return scan_tree("vlcs", root, DOMAINS, CLASSES, findings, aliases=ALIASES)
    found = {ALIASES.get(folder.name, folder.name): folder for folder in present}
    domains = {}
    for domain in DOMAINS:
        if domain not in found:
            findings.missing(f"The domain '{domain}' of vlcs is missing: put its images into '{root / domain}'.")
            continue
        items, parts, start = [], [], 0
        for use in USES:
            folder = found[domain] / use
            if not folder.is_dir():
                findings.missing(f"The folder '{folder}' of vlcs is missing: every domain needs {', '.join(USES)}.")
                continue
            # A class may be absent from the smallest part: only the training images must have all.
            files, labels = class_files("vlcs", folder, tuple("01234"), findings, needed=use == "train")
            items.append(image_files(files, labels))
            parts.append(start + np.arange(len(files)))
            start += len(files)
        domains[domain] = Domain(items, (parts[0], parts[1], parts[2]) if len(parts) == len(USES) else None)
    return Listing("vlcs", root, CLASSES, domains)


VLCS = publish(
    Published(
        name="vlcs",
        what="Bird, car, chair, dog and person in the photographs of four data sets.",
        home="https://github.com/facebookresearch/DomainBed",
        licence="none stated; for research",
        layout="VLCS/<domain>/<class>/*.jpg   with the domains Caltech101, LabelMe, SUN09, VOC2007\n"
        "or VLCS/<domain>/{train,crossval,test}/<0 to 4>/*.jpg   with CALTECH, LABELME, SUN, PASCAL",
        folders=("vlcs", "VLCS"),
        classes=5,
        sizes={
            "Caltech101": {"images": 1415},
            "LabelMe": {"images": 2656},
            "SUN09": {"images": 3282},
            "VOC2007": {"images": 3376},
        },
        scan=scan,
    )
)


@DATASETS.register("vlcs", paper="Fang et al., ICCV 2013; transforms of FedBN, as in GReg")
def read_vlcs(
    root: str | os.PathLike[str] | None = None,
    size: int = 256,
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    subset: str | None = None,
) -> Source:
    """VLCS: 10,729 photographs of 5 classes from Caltech101, LabelMe, SUN09 and VOC2007.

    `subset="greg"` takes 297 / 297 images of each domain to train / validate, and tests on 30 %.
    """
    rules.check_subset("vlcs", subset, ("greg",))
    listing = scanned(VLCS, find_root("vlcs", root, VLCS.folders))
    if subset:
        parts = rules.equal_shares(rules.unsplit(listing.domains), 0.3, 0.3, 0.3, split_seed)
    else:
        parts = rules.by_shares(listing.domains, validation, test, split_seed)
    return assemble(listing, parts, size, train="flip+rotation(degrees=30)", test="")
