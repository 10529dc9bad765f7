"""A table, CSV or parquet: of images, a row for each with its path; or of numbers, a row for each sample.

A column `group` (the patient) keeps the samples of a group in one split; a column `split` says what each is for.
Without it, each class of a site is split at random by `split_seed`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkeel.data import sources
from fedkeel.data.dataset import Dataset, Domain, Images, Manifest, Parts, image_files, indices
from fedkeel.data.formats.arrays import from_parquet
from fedkeel.data.formats.lists import read_table
from fedkeel.data.population import USES, Split
from fedkeel.data.reader import DATASETS, Fraction, Reader, Root
from fedkeel.data.splits import tell_shared_groups
from fedkeel.errors import DataError, nearest, numbered
from fedkeel.options import Count, as_path
from fedkeel.spec import names

ALSO = {"training": "train", "val": "validation", "valid": "validation", "dev": "validation", "testing": "test"}
NAMED = 3  # rows in a sentence


@DATASETS.register("table")
@dataclass(frozen=True)
class Table(Reader):
    """Your own images or numbers, in a CSV or parquet file with the columns path, label, site, group and split.

    `path`, `label`, `site`, `group` and `part` are the names of these columns, if they have others; all but the label
    may be missing. Paths are below `root`, by default the table's folder. Without paths, the other columns are numbers,
    and each row is a vector of them. `classes` fixes the label order.
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

    def folder(self) -> Path:
        if self.file is None:
            raise DataError("table needs the file that lists your samples: give file=samples.csv, or .parquet.")
        file = as_path(self.file, "file").expanduser()
        if not file.is_file():
            raise DataError(f"The table '{file}' is not there: give file=PATH, a CSV or parquet file.")
        root = file.parent if self.root is None else Path(self.root).expanduser()
        if not root.is_dir():
            raise DataError(f"The root '{root}' of the table is not a folder: give the one that its paths begin in.")
        return root

    @cached_property
    def rows(self) -> "Rows":
        given = {"path": self.path, "label": self.label, "site": self.site, "group": self.group, "split": self.part}
        return Rows(Path(self.file or "").expanduser(), given)

    def sites(self) -> dict[str, list[int]]:
        """The rows of each site, the sites sorted; without a column, all are of one that is called as the file."""
        rows, sites = self.rows, dict[str, list[int]]()
        for row in range(rows.count):
            sites.setdefault(rows.cells["site"][row] if "site" in rows.cells else rows.file.stem, []).append(row)
        return dict(sorted(sites.items()))

    def scan(self, root: Path) -> Manifest:
        rows = self.rows
        labels = rows.cells["label"]
        classes = tuple(in_order(labels) if self.classes is None else names(self.classes))
        known = {label: number for number, label in enumerate(classes)}
        for row, label in enumerate(labels):
            if label not in known:
                raise DataError(
                    f"{rows.place(row)} has the label '{label}', which no class has: {nearest(label, classes)}"
                )
        files = rows.files(root) if "path" in rows.cells else []
        domains: dict[str, Domain] = {}
        for site, own in self.sites().items():
            found = [known[labels[row]] for row in own]
            images = image_files([files[row] for row in own], found) if files else Images(np.array(found, np.int64))
            groups = np.array([rows.cells["group"][row] for row in own], np.str_) if "group" in rows.cells else None
            domains[site] = Domain([images], rows.parts(own), groups)
        tell_shared_groups(domains)
        return Manifest(self.name, root, classes, domains)

    def read(self) -> Dataset:
        folder, rows = self.folder(), self.rows
        if "path" in rows.cells:
            return super().read()
        manifest = self.scan(folder)
        given = {name for name in (self.root, self.bits) if name is not None}
        if given or self.size != Table.size:
            raise DataError(
                "'root', 'size' and 'bits' are for images, and the table has no column 'path': leave them out."
            )
        parts, sites = self.split(manifest.domains), self.sites()
        labels = np.empty(rows.count, np.int64)
        for site, own in sites.items():
            labels[own] = manifest.domains[site].labels
        columns = rows.numbers()
        return Dataset(
            name=self.name,
            images=sources.vectors(columns, "row", 1),
            labels=torch.from_numpy(labels),
            classes=manifest.classes,
            domains={
                site: Split(*(indices(np.array(sites[site])[cut]) for cut in cuts)) for site, cuts in parts.items()
            },
            train_transform="",
            test_transform="",
            columns=tuple(columns),
        )


class Rows:
    """The cells of a table, by what they say; all of them have something in them."""

    def __init__(self, file: Path, given: Mapping[str, str | None]) -> None:
        """`given` are the columns' names; one without a name may be missing."""
        self.file = file
        table = file.suffix == ".parquet"
        self.rows: list[dict[str, Any]] = (
            from_parquet(file, lambda opened: opened.read()).to_pylist() if table else list(read_table(file, ()))
        )
        if not self.rows:
            raise DataError(f"'{file}' has no rows: list a sample in each.")
        self.present = [str(column) for column in self.rows[0] if column]
        self.count = len(self.rows)
        self.used: set[str] = set()
        self.cells: dict[str, list[str]] = {}
        lacking: list[str] = []
        for what, name in given.items():
            column = name or what
            if name and column not in self.present:
                raise DataError(
                    f"'{file}' has the columns {', '.join(self.present)}, and lacks '{column}': give "
                    f"{'part' if what == 'split' else what}=NAME, the column with the {what} of each sample."
                )
            if column in self.present:
                self.used.add(column)
                self.cells[what] = [text(row[column]) for row in self.rows]
                empty = [row for row, cell in enumerate(self.cells[what], start=1) if not cell]
                lacking += [f"{numbered('row', empty)} of the column '{column}'"] if empty else []
        if lacking:
            raise DataError(f"'{file}' has nothing in {' and '.join(lacking)}: fill them in, or remove these rows.")

    def place(self, row: int) -> str:
        """How an error names a row, the heading not counted."""
        return f"Row {row + 1} of '{self.file}'"

    def numbers(self) -> dict[str, list[Any]]:
        """The columns that say nothing else."""
        features = [column for column in self.present if column not in self.used]
        if not features:
            raise DataError(
                f"'{self.file}' has the columns {', '.join(self.present)}: give path=NAME, the column with the path of "
                "each image, or a table with columns of numbers."
            )
        return {column: [row[column] for row in self.rows] for column in features}

    def files(self, root: Path) -> list[Path]:
        found = [root / path for path in self.cells["path"]]
        for number, path in enumerate(self.cells["path"]):
            if "\\" in path and not found[number].is_file():  # as Windows writes it
                found[number] = root / path.replace("\\", "/")
        seen: dict[Path, int] = {}
        for number, file in enumerate(found):
            first = seen.setdefault(file, number)
            if first != number:
                raise DataError(f"{self.place(number)} lists '{file}' again, after row {first + 1}: keep one.")
        lost = [number for number, file in enumerate(found) if not file.is_file()]
        if lost:
            few = ", ".join(f"'{found[number]}'" for number in lost[:NAMED])
            raise DataError(
                f"{len(lost):,} of the {len(found):,} images in '{self.file}' are not there, {few} among them: give "
                "root=DIR, the folder that the paths begin in, or remove their rows."
            )
        return found

    def parts(self, own: Sequence[int]) -> Parts | None:
        if "split" not in self.cells:
            return None
        uses = []
        for row in own:
            given = self.cells["split"][row]
            use = ALSO.get(given.lower(), given.lower())
            if use not in USES:
                raise DataError(f"{self.place(row)} has the split '{given}': {nearest(given, USES)}")
            uses.append(use)
        train, held, tested = (np.flatnonzero(np.array(uses) == use) for use in USES)
        return train, held, tested


def text(cell: Any) -> str:
    return "" if cell is None or cell != cell else str(cell).strip()  # parquet has numbers, and some that are none


def in_order(labels: Sequence[str]) -> list[str]:
    """Each once; numbers by their size."""
    each = set(labels)
    return sorted(each, key=int) if all(label.isdecimal() for label in each) else sorted(each)
