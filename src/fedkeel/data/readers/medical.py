"""Camelyon17, whose domains are five hospitals, and HAM10000, whose domains are four sources: a table says what each
image is."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np

from fedkeel import seeds
from fedkeel.data.dataset import Domain, Manifest, Parts, image_files
from fedkeel.data.formats.folders import images_in, visible_folders
from fedkeel.data.formats.lists import read_table
from fedkeel.data.partition import in_proportion
from fedkeel.data.reader import FEDBN, Fraction, Reader, published
from fedkeel.data.splits import equal_shares, shares_of
from fedkeel.errors import DataError
from fedkeel.options import Count, Range

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

    validation: Fraction = 0.1
    test: Fraction = 0.2
    share: Annotated[float, Range(1e-6, 1)] = 1.0
    subset: Literal["greg"] | None = None

    def pixels(self) -> int:
        return self.size or (256 if self.subset else 96)

    def scan(self, root: Path) -> Manifest:
        table = self.require(root / "metadata.csv")
        rows: dict[str, list[dict[str, str]]] = {hospital: [] for hospital in self.sizes}
        for number, row in enumerate(read_table(table, COLUMNS), start=1):
            hospital = f"H{int(row['center']) + 1}" if row["center"].isdecimal() else ""
            if hospital not in rows or row["tumor"] not in ("0", "1"):
                raise DataError(
                    f"Row {number} of '{table}' has the center '{row['center']}' and the tumor '{row['tumor']}': 0 to "
                    "4 and 0 or 1 are expected."
                )
            rows[hospital].append(row)
        domains = {hospital: self.domain(hospital, root, listed) for hospital, listed in rows.items()}
        return Manifest(self.name, root, self.class_names, domains)

    def domain(self, hospital: str, root: Path, rows: list[dict[str, str]]) -> Domain:
        """The `share` is drawn before any patch is looked for: there are 455,954 of them."""
        share = 0.03 if self.subset and self.share == 1 else self.share
        labels = np.array([int(row["tumor"]) for row in rows], np.int64)
        if share < 1:
            generator = seeds.numpy_generator(self.split_seed, "share", hospital)
            chosen = in_proportion(labels, math.ceil(len(labels) * share - 1e-9), generator)
            rows, labels = [rows[i] for i in chosen], labels[chosen]
        return Domain([image_files([self.require(patch(root, row)) for row in rows], labels)])


def patch(folder: Path, row: dict[str, str]) -> Path:
    """Where WILDS keeps a patch: patients have three digits, which some programs drop when they rewrite the table."""
    slide = f"patient_{row['patient'].zfill(3)}_node_{row['node']}"
    return folder / "patches" / slide / f"patch_{slide}_x_{row['x_coord']}_y_{row['y_coord']}.png"


@published
@dataclass(frozen=True)
class HAM10000(Reader):
    """HAM10000: 10,015 images of 7 kinds of skin lesions in rosendahl, vidir_modern, vidir_molemax, vienna_dias.

    The images of one lesion stay together, in training or in testing; `by_lesion=false` splits image by image.
    """

    name = "ham10000"
    paper = "Tschandl et al., 2018 (arXiv:1803.10417); domains as in FedUV and UniVarFL"
    home = "https://doi.org/10.7910/DVN/DBW86T"
    licence = "CC BY-NC 4.0"
    layout = (
        "ham10000/HAM10000_metadata   the authors' table, with the column dataset; .csv or .tab may follow\n"
        "ham10000/HAM10000_images_part_{1,2}/*.jpg   or any folders"
    )
    folders = ("ham10000", "HAM10000", "HAM10K")
    class_names = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    sizes = {"rosendahl": 2259, "vidir_modern": 3363, "vidir_molemax": 3954, "vienna_dias": 439}
    transforms = ("flip+rotation(degrees=30)+normalise(like=imagenet)", "normalise(like=imagenet)")

    size: Count = 224
    validation: Fraction = 0.1
    test: Fraction = 0.2
    by_lesion: bool = True

    def split(self, domains: Mapping[str, Domain]) -> dict[str, Parts]:
        """Of each lesion, which has one diagnosis, all images or none."""
        cuts: dict[str, Parts] = {}
        for name, domain in domains.items():
            images = domain.groups if self.by_lesion else np.arange(len(domain.labels))
            _, first, lesion = np.unique(np.asarray(images), return_index=True, return_inverse=True)
            parts = shares_of(name, domain.labels[first], None, None, self.validation, self.test, self.split_seed)
            train, held, tested = (np.flatnonzero(np.isin(lesion, part)) for part in parts)
            cuts[name] = (train, held, tested)
        return cuts

    def scan(self, root: Path) -> Manifest:
        tables = [root / f"HAM10000_metadata{ending}" for ending in ("", ".csv", ".tab", ".txt")]
        table = next(filter(Path.is_file, tables), tables[0])
        there = {file.stem: file for folder in (root, *visible_folders(root)) for file in images_in(folder)}
        rows = read_table(self.require(table), ("lesion_id", "image_id", "dx", "dataset"))
        for number, row in enumerate(rows, start=1):
            for column, known in (("dataset", self.sizes), ("dx", self.class_names), ("image_id", there)):
                if row[column] not in known:
                    what = "is none of the images" if known is there else f"is none of {', '.join(known)}"
                    raise DataError(f"Row {number} of '{table}' has the {column} '{row[column]}', which {what}.")
        domains: dict[str, Domain] = {}
        for domain in self.sizes:
            own = [row for row in rows if row["dataset"] == domain]
            labels = [self.class_names.index(row["dx"]) for row in own]
            images = image_files([there[row["image_id"]] for row in own], labels)
            domains[domain] = Domain([images], groups=np.array([row["lesion_id"] for row in own], np.str_))
        return Manifest(self.name, root, self.class_names, domains)
