"""HAM10000 (Tschandl et al., Scientific Data 2018): skin lesions, photographed with four kinds of equipment.

The domains are the column `dataset` of the authors' table, which the copy on Kaggle leaves out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeel.data.dataset import Domain, Manifest, Parts, image_files
from fedkeel.data.formats.folders import images_in, visible_folders
from fedkeel.data.formats.lists import read_table
from fedkeel.data.reader import Fraction, Reader, published
from fedkeel.data.splits import check_shares, stratified_split
from fedkeel.errors import DataError, nearest
from fedkeel.options import Count

TABLES = ("HAM10000_metadata", "HAM10000_metadata.csv", "HAM10000_metadata.tab", "HAM10000_metadata.txt")


@published
@dataclass(frozen=True)
class HAM10000(Reader):
    """HAM10000: 10,015 images of 7 kinds of skin lesions in rosendahl, vidir_modern, vidir_molemax, vienna_dias.

    The images of one lesion stay together, in training or in testing; `by_lesion=false` splits image by image.
    """

    name = "ham10000"
    paper = "Tschandl et al., 2018 (arXiv:1803.10417); domains as in FedUV and UniVarFL"
    what = "Dermatoscopic images of seven kinds of skin lesions, 600 x 450, from four sources."
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
        if not self.by_lesion:
            return super().split(domains)
        check_shares(self.validation, self.test)
        cuts: dict[str, Parts] = {}
        for name, domain in domains.items():
            _, first, lesion = np.unique(np.asarray(domain.groups), return_index=True, return_inverse=True)
            parts = stratified_split(domain.labels[first], self.validation, self.test, self.split_seed, name)
            train, held, tested = (np.flatnonzero(np.isin(lesion, part)) for part in parts)
            cuts[name] = (train, held, tested)
        return cuts

    def scan(self, root: Path) -> Manifest:
        table = next((root / name for name in TABLES if (root / name).is_file()), None)
        if table is None:
            raise DataError(
                f"'{root / TABLES[0]}' is missing, with or without .csv: ham10000 needs the authors' table."
            )
        there = {file.stem: file for folder in (root, *visible_folders(root)) for file in images_in(folder)}
        rows = read_table(table, ("lesion_id", "image_id", "dx", "dataset"))
        for line, row in enumerate(rows, start=2):
            for column, what, known in (("dataset", "dataset", self.sizes), ("dx", "diagnosis", self.class_names)):
                if row[column] not in known:
                    given = f"Line {line} of '{table}' has the {what} '{row[column]}'"
                    raise DataError(f"{given}: {nearest(row[column], known)}")
        lost = [row["image_id"] for row in rows if row["image_id"] not in there]
        if lost:
            raise DataError(
                f"{len(lost)} of the {len(rows)} images in '{table}' are missing, '{lost[0]}' among them: put their "
                f"folder right into '{root}'."
            )
        domains: dict[str, Domain] = {}
        for domain in self.sizes:
            own = [row for row in rows if row["dataset"] == domain]
            if not own:
                raise DataError(f"The domain '{domain}' has no image in '{table}': get the complete data set.")
            _, lesions = np.unique([row["lesion_id"] for row in own], return_inverse=True)
            images = image_files(
                [there[row["image_id"]] for row in own], [self.class_names.index(row["dx"]) for row in own]
            )
            domains[domain] = Domain([images], groups=lesions.astype(np.int64) if self.by_lesion else None)
        return Manifest(self.name, root, self.class_names, domains)
