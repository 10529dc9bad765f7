"""A table, CSV or parquet: of images, a row for each with its path; or of numbers, a row for each sample.

A column `group` (the patient) keeps the samples of a group in one split; a column `split` says what each is for.
Without it, each class of a site is split at random by `split_seed`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeel.data.dataset import Dataset, Domain, Images, Manifest, Parts, image_files, indices
from fedkeel.data.formats.arrays import from_parquet
from fedkeel.data.formats.lists import read_table
from fedkeel.data.population import USES, Split
from fedkeel.data.reader import DATASETS, Fraction, Reader, Root
from fedkeel.data.sources import vectors
from fedkeel.errors import DataError, nearest, numbered, quoted
from fedkeel.options import Count, as_path
from fedkeel.spec import names

ALSO = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "testing": "test"}


@DATASETS.register("table")
@dataclass(frozen=True)
class Table(Reader):
    """Your own images or numbers, in a CSV or parquet file with the columns path, label, site, group and split.

    `path`, `label`, `site`, `group` and `part` are the names of these columns, if they have others; all but the label
    may be missing. Paths are below `root`, by default the table's folder. Without paths, the other columns are numbers,
    and each row is a vector of them. `classes` fixes the label order. `called` reads all rows as one site of this name.
    """

    name = "table"
    transforms = ("flip+normalise", "normalise")

    file: Root = None  # the table
    size: Count = 32
    validation: Fraction = 0.15
    test: Fraction = 0.25
    classes: str | Sequence[str] | None = None
    path: str | None = None
    label: str = "label"
    site: str | None = None
    group: str | None = None
    part: str | None = None
    called: str | None = None

    @property
    def place(self) -> Path:
        if self.file is None or not as_path(self.file, "file").expanduser().is_file():
            raise DataError(
                f"table needs the file that lists your samples: give file=PATH, CSV or parquet, not {self.file}."
            )
        return Path(self.file).expanduser()

    def folder(self) -> Path:
        root = self.place.parent if self.root is None else Path(self.root).expanduser()
        if not root.is_dir():
            raise DataError(f"The root '{root}' of the table is not a folder: give the one that its paths begin in.")
        return root

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        parquet = self.place.suffix == ".parquet"
        rows = (
            from_parquet(self.place, lambda opened: opened.read()).to_pylist()
            if parquet
            else read_table(self.place, ())
        )
        if not rows:
            raise DataError(f"'{self.place}' has no rows: list a sample in each.")
        return list(rows)

    @cached_property
    def columns(self) -> dict[str, str]:
        """The names of the columns that say something of a sample, by what they say."""
        given = {"path": self.path, "label": self.label, "site": self.site, "group": self.group, "part": self.part}
        for what, name in given.items():
            if name and name not in self.rows[0]:
                present = ", ".join(filter(None, self.rows[0]))
                raise DataError(f"'{self.place}' has the columns {present}, and lacks '{name}': give {what}=NAME.")
        usual = {what: name or ("split" if what == "part" else what) for what, name in given.items()}
        return {what: name for what, name in usual.items() if name in self.rows[0]}

    @cached_property
    def cells(self) -> dict[str, list[str]]:
        """Those columns, all of which have something in every row."""
        found = {what: [text(row[name]) for row in self.rows] for what, name in self.columns.items()}
        empty = {what: [n for n, cell in enumerate(cells, start=1) if not cell] for what, cells in found.items()}
        lacking = [
            f"{numbered('row', lost)} of the column '{self.columns[what]}'" for what, lost in empty.items() if lost
        ]
        if lacking:
            raise DataError(
                f"'{self.place}' has nothing in {' and '.join(lacking)}: fill them in, or remove these rows."
            )
        return found

    def sites(self) -> dict[str, list[int]]:
        """The rows of each site, the sites sorted; without a column, all are of one that is called as the file."""
        everyone = range(len(self.rows))
        if self.called is not None or "site" not in self.cells:
            return {self.called or self.place.stem: [*everyone]}
        sites: dict[str, list[int]] = {site: [] for site in sorted(set(self.cells["site"]))}
        for row in everyone:
            sites[self.cells["site"][row]].append(row)
        return sites

    def scan(self, root: Path) -> Manifest:
        labels = self.cells["label"]
        classes = in_order(labels) if self.classes is None else names(self.classes)
        for row, label in enumerate(labels):
            self.refuse(row, "label", label, classes)
        files = self.files(root) if "path" in self.cells else []
        domains: dict[str, Domain] = {}
        for site, own in self.sites().items():
            found = np.array([classes.index(labels[row]) for row in own], np.int64)
            images = image_files([files[row] for row in own], found) if files else Images(found)
            groups = np.array([self.cells["group"][row] for row in own], np.str_) if "group" in self.cells else None
            domains[site] = Domain([images], self.parts(own) if "part" in self.cells else None, groups)
        return Manifest(self.name, root, tuple(classes), domains)

    def read(self) -> Dataset:
        if "path" in self.cells:
            return super().read()
        of_images = self.root, self.bits, self.size, self.tolerate
        if of_images != (None, None, Table.size, Table.tolerate):
            raise DataError(
                "'root', 'size', 'bits' and 'tolerate' are for images, and the table has no column 'path': leave them "
                "out."
            )
        manifest, sites = self.scan(self.folder()), self.sites()
        features = [str(name) for name in self.rows[0] if name and name not in self.columns.values()]
        if not features:
            raise DataError(f"'{self.place}' has neither a column of paths nor of numbers: give path=NAME.")
        labels = np.empty(len(self.rows), np.int64)
        splits = {}
        for site, cuts in self.split(manifest.domains).items():
            own = np.array(sites[site])
            labels[own] = manifest.domains[site].labels
            splits[site] = Split(*(indices(own[cut]) for cut in cuts))
        values = vectors({name: [row[name] for row in self.rows] for name in features}, "row", 1)
        made = Dataset(self.name, values, torch.from_numpy(labels), manifest.classes, splits, "", "")
        return replace(made, columns=tuple(features))

    def refuse(self, row: int, what: str, given: str, known: Sequence[str]) -> None:
        if given not in known:
            raise DataError(f"Row {row + 1} of '{self.place}' has the {what} '{given}': {nearest(given, known)}")

    def files(self, root: Path) -> list[Path]:
        found = [root / path for path in self.cells["path"]]
        for number, path in enumerate(self.cells["path"]):
            if "\\" in path and not found[number].is_file():  # as Windows writes it
                found[number] = root / path.replace("\\", "/")
        lost = [str(file) for file in found if not file.is_file()]
        if lost:
            raise DataError(
                f"{len(lost):,} of the {len(found):,} images in '{self.place}' are not there, {quoted(lost, 3)}: give "
                "root=DIR, the folder that the paths begin in, or remove their rows."
            )
        if len({*found}) < len(found):
            twice = next(file for number, file in enumerate(found) if file in found[:number])
            raise DataError(f"'{self.place}' lists '{twice}' twice: keep one.")
        return found

    def parts(self, own: Sequence[int]) -> Parts:
        uses = [ALSO.get(given.lower(), given.lower()) for given in (self.cells["part"][row] for row in own)]
        for row, use in zip(own, uses, strict=True):
            self.refuse(row, "split", use, USES)
        train, held, tested = (np.flatnonzero(np.array(uses) == use) for use in USES)
        return train, held, tested


def text(cell: Any) -> str:
    return "" if cell is None or cell != cell else str(cell).strip()  # parquet has numbers, and some that are none


def in_order(labels: Sequence[str]) -> list[str]:
    """Each once; numbers by their size."""
    each = set(labels)
    return sorted(each, key=int) if all(label.isdecimal() for label in each) else sorted(each)
