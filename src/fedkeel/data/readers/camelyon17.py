"""Camelyon17 of WILDS (Koh et al., ICML 2021): patches of lymph nodes from five hospitals, tumour or not.

The domains are the hospitals, H1 to H5 as in GReg: the column `center`, which counts from 0.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from fedkeel import seeds
from fedkeel.data.dataset import Domain, Manifest, image_files
from fedkeel.data.formats.lists import read_table
from fedkeel.data.partition import in_proportion
from fedkeel.data.reader import FEDBN, Fraction, Reader, published
from fedkeel.data.splits import equal_shares
from fedkeel.errors import DataError
from fedkeel.options import Range

HOSPITALS = ("H1", "H2", "H3", "H4", "H5")
COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center")


@published
@dataclass(frozen=True)
class Camelyon17(Reader):
    """Camelyon17: 455,954 patches of tissue from five hospitals, H1 to H5, with or without a tumour.

    `share` reads that part of each hospital's patches (0.03 in GReg). `subset="greg"` does so and takes 293 / 293 of
    each hospital to train / validate and 30 % to test on, at 256 px as FedBN (else 96).
    """

    name = "camelyon17"
    paper = "Koh et al., ICML 2021 (arXiv:2012.07421); transforms of FedBN, as in GReg"
    what = "Patches of lymph nodes, tumour or not, 96 px, from five hospitals (WILDS version 1.0)."
    home = "https://wilds.stanford.edu/datasets/"
    licence = "public domain (CC0)"
    layout = (
        "camelyon17_v1.0/metadata.csv\n"
        "camelyon17_v1.0/patches/patient_<p>_node_<n>/patch_patient_<p>_node_<n>_x_<x>_y_<y>.png"
    )
    folders = ("camelyon17", "camelyon17_v1.0")
    inside = ("camelyon17_v1.0",)
    class_names = ("normal", "tumor")
    sizes = {"H1": 59436, "H2": 34904, "H3": 85054, "H4": 129838, "H5": 146722}
    transforms = FEDBN
    subsets = {"greg": partial(equal_shares, train=0.4, validation=0.4, test=0.3)}
    scan_options = ("share", "split_seed")

    validation: Fraction = 0.1
    test: Fraction = 0.2
    share: Annotated[float, Range(1e-6, 1)] = 1.0
    subset: Literal["greg"] | None = None

    def pixels(self) -> int:
        return self.size or (256 if self.subset else 96)

    def scan(self, root: Path) -> Manifest:
        table = root / "metadata.csv"
        if not table.is_file():
            raise DataError(f"'{table}' is missing: camelyon17 needs metadata.csv and the folder patches.")
        rows: dict[str, list[tuple[Path, int]]] = {hospital: [] for hospital in HOSPITALS}
        for line, row in enumerate(read_table(table, COLUMNS), start=2):
            centre, tumour = row["center"], row["tumor"]
            if centre not in ("0", "1", "2", "3", "4") or tumour not in ("0", "1"):
                raise DataError(
                    f"Line {line} of '{table}' has the center '{centre}' and the tumor '{tumour}', but 0 to 4 and "
                    "0 or 1 are expected."
                )
            rows[HOSPITALS[int(centre)]].append((patch(root, row), int(tumour)))
        domains = {hospital: self.domain(hospital, listed) for hospital, listed in rows.items()}
        return Manifest(self.name, root, self.class_names, domains)

    def domain(self, hospital: str, listed: list[tuple[Path, int]]) -> Domain:
        """The `share` is drawn before any patch is looked for: there are 455,954 of them."""
        share = 0.03 if self.subset and self.share == 1 else self.share
        if share < 1:
            generator = seeds.numpy_generator(self.split_seed, "share", hospital)
            labels = np.array([tumour for _, tumour in listed], np.int64)
            listed = [listed[i] for i in in_proportion(labels, math.ceil(len(labels) * share - 1e-9), generator)]
        lost = [file for file, _ in listed if not file.is_file()]
        if lost or not listed:
            named = f", '{lost[0]}' among them" if lost else ""
            raise DataError(
                f"{len(lost)} of {len(listed)} patches of {hospital} are missing{named}: unpack all of the archive."
            )
        return Domain([image_files([file for file, _ in listed], [tumour for _, tumour in listed])])


def patch(folder: Path, row: dict[str, str]) -> Path:
    """Where WILDS keeps a patch: patients have three digits, which some programs drop when they rewrite the table."""
    slide = f"patient_{row['patient'].zfill(3)}_node_{row['node']}"
    return folder / "patches" / slide / f"patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"
