"""Camelyon17 of WILDS (Koh et al., ICML 2021): patches of lymph nodes from five hospitals, tumour or not.

The domains are the hospitals, H1 to H5 as in GReg: the column `center`, which counts from 0.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from fedkeel import seeds
from fedkeel.data import rules
from fedkeel.data.formats.metadata import read_table
from fedkeel.data.listing import Domain, Findings, Listing, assemble, image_files, step_into
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root, number
from fedkeel.errors import DataError

CLASSES = ("normal", "tumor")
HOSPITALS = ("H1", "H2", "H3", "H4", "H5")
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")
VERSION = "camelyon17_v1.0"


def scan(root: Path, findings: Findings, share: float = 1.0, split_seed: int = 0) -> Listing:
    """`share` of each hospital's patches, drawn before any is looked for: there are 455,954 of them."""
    folder = step_into(root, VERSION)
    table = folder / "metadata.csv"
    if not table.is_file():
        findings.missing(f"'{table}' is missing: camelyon17 needs metadata.csv and the folder patches.")
        return Listing("camelyon17", folder, CLASSES)
    rows: dict[str, list[tuple[Path, int]]] = {hospital: [] for hospital in HOSPITALS}
    with findings.part():
        for line, row in enumerate(read_table(table, COLUMNS), start=2):
            centre, tumour = row["center"], row["tumor"]
            if centre not in ("0", "1", "2", "3", "4") or tumour not in ("0", "1"):
                raise DataError(
                    f"Line {line} of '{table}' has the center '{centre}' and the tumor '{tumour}', but 0 to 4 and 0 or "
                    "1 are expected."
                )
            rows[HOSPITALS[int(centre)]].append((patch(folder, row), int(tumour)))
    domains = {}
    for hospital, listed in rows.items():
        if not listed:
            findings.missing(f"The hospital {hospital} has no patch in '{table}': get the complete file.")
            continue
        labels = np.array([tumour for _, tumour in listed], np.int64)
        drawn = np.arange(len(labels))
        if share < 1:
            generator = seeds.numpy_generator(split_seed, "share", hospital)
            drawn = rules.in_proportion(labels, math.ceil(len(labels) * share - 1e-9), generator)
        files = [listed[i][0] for i in drawn]
        there = np.array([file.is_file() for file in files])
        if not there.all():
            first = files[int(np.flatnonzero(~there)[0])]
            findings.missing(
                f"{int((~there).sum())} of {len(files)} patches of {hospital} are missing, '{first}' among them: "
                "unpack all of the archive."
            )
        kept = np.flatnonzero(there)
        domains[hospital] = Domain([image_files([files[i] for i in kept], labels[drawn[kept]])])
    return Listing("camelyon17", folder, CLASSES, domains)


def patch(folder: Path, row: dict[str, str]) -> Path:
    """Where WILDS keeps a patch: patients have three digits, which some programs drop when they rewrite the table."""
    slide = f"patient_{row['patient'].zfill(3)}_node_{row['node']}"
    return folder / "patches" / slide / f"patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"


CAMELYON17 = publish(
    Published(
        name="camelyon17",
        what="Patches of lymph nodes, tumour or not, 96 px, from five hospitals (WILDS version 1.0).",
        home="https://wilds.stanford.edu/datasets/",
        licence="public domain (CC0)",
        layout="camelyon17_v1.0/metadata.csv\n"
        "camelyon17_v1.0/patches/patient_<p>_node_<n>/patch_patient_<p>_node_<n>_x_<x>_y_<y>.png",
        folders=("camelyon17", "camelyon17_v1.0"),
        classes=2,
        sizes={
            "H1": {"images": 59436},
            "H2": {"images": 34904},
            "H3": {"images": 85054},
            "H4": {"images": 129838},
            "H5": {"images": 146722},
        },
        scan=scan,
    )
)


@DATASETS.register("camelyon17", paper="Koh et al., ICML 2021 (arXiv:2012.07421); transforms of FedBN, as in GReg")
def read_camelyon17(
    root: str | os.PathLike[str] | None = None,
    size: int | None = None,
    share: float = 1.0,
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    subset: str | None = None,
) -> Source:
    """Camelyon17: 455,954 patches of tissue from five hospitals, H1 to H5, with or without a tumour.

    `share` reads that part of each hospital's patches (0.03 in GReg). `subset="greg"` does so and takes 293 / 293 of
    each hospital to train / validate and 30 % to test on, at 256 px as FedBN (else 96).
    """
    rules.check_subset("camelyon17", subset, ("greg",))
    number("share in camelyon17", share, 1e-6, 1)
    if subset and share == 1:
        share = 0.03
    listing = scanned(CAMELYON17, find_root("camelyon17", root, CAMELYON17.folders), share=share, split_seed=split_seed)
    if subset:
        parts = rules.equal_shares(listing.domains, 0.4, 0.4, 0.3, split_seed)
    else:
        parts = rules.by_shares(listing.domains, validation, test, split_seed)
    side = (256 if subset else 96) if size is None else size
    return assemble(listing, parts, side, train="flip+rotation(degrees=30)", test="")
