"""Office-Caltech-10 (Gong et al., CVPR 2012): ten things in a shop's pictures, web pictures, and from two cameras."""

from __future__ import annotations

import os
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.formats.trees import scan_tree
from fedkeel.data.listing import Findings, Listing, assemble
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root

DOMAINS = ("amazon", "caltech", "dslr", "webcam")
CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug",
    "projector",
)  # fmt: skip


def scan(root: Path, findings: Findings) -> Listing:
    return scan_tree("office-caltech-10", root, DOMAINS, CLASSES, findings, aliases={"Caltech10": "caltech"})


OFFICE = publish(
    Published(
        name="office-caltech-10",
        what="The ten classes that Office-31 and Caltech-256 share, in four domains.",
        home="https://github.com/med-air/FedBN",
        licence="none stated; for research",
        layout="office_caltech_10/<domain>/<class>/*.jpg   with the domains amazon, caltech, dslr, webcam\n"
        "office_caltech_10/splits/<domain>_{train,test}.txt   FedBN's lists as text, if you have them",
        folders=("office-caltech-10", "office_caltech_10"),
        classes=10,
        sizes={
            "amazon": {"images": 958, "train": 766, "test": 192},
            "caltech": {"images": 1123, "train": 898, "test": 225},
            "dslr": {"images": 157, "train": 125, "test": 32},
            "webcam": {"images": 295, "train": 236, "test": 59},
        },
        scan=scan,
    )
)


@DATASETS.register("office-caltech-10", paper="Gong et al., CVPR 2012; transforms and lists of FedBN")
def read_office_caltech_10(
    root: str | os.PathLike[str] | None = None,
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
    rules.check_subset("office-caltech-10", subset, ("fedbn",))
    listing = scanned(OFFICE, find_root("office-caltech-10", root, OFFICE.folders))
    if subset:
        rules.without_lists("office-caltech-10", listing.domains)
        parts = rules.equal_shares(listing.domains, 0.5, 0.4, 0.2, split_seed)
    else:
        parts = rules.by_shares(listing.domains, validation, test, split_seed)
    return assemble(listing, parts, size, train="flip+rotation(degrees=30)", test="")
