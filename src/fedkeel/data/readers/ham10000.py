"""HAM10000 (Tschandl et al., Scientific Data 2018): skin lesions, photographed with four kinds of equipment.

The domains are the column `dataset` of the authors' table, which the copy on Kaggle leaves out.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from fedkeel.data import rules
from fedkeel.data.formats.metadata import read_table
from fedkeel.data.listing import Domain, Findings, Listing, assemble, image_files, images_in, visible_folders
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root
from fedkeel.errors import DataError, nearest

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
DOMAINS = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
TABLES = ("HAM10000_metadata", "HAM10000_metadata.csv", "HAM10000_metadata.tab", "HAM10000_metadata.txt")


def scan(root: Path, findings: Findings) -> Listing:
    table = next((root / name for name in TABLES if (root / name).is_file()), None)
    if table is None:
        findings.missing(f"'{root / TABLES[0]}' is missing, with or without .csv: ham10000 needs the authors' table.")
        return Listing("ham10000", root, CLASSES)
    there = {file.stem: file for folder in (root, *visible_folders(root)) for file in images_in(folder)}
    domains: dict[str, Domain] = {}
    with findings.part():
        rows = read_table(table, ("lesion_id", "image_id", "dx", "dataset"))
        lost = [row["image_id"] for row in rows if row["image_id"] not in there]
        if lost:
            findings.missing(
                f"{len(lost)} of the {len(rows)} images in '{table}' are missing, '{lost[0]}' among them: "
                f"put their folder right into '{root}'."
            )
        members: dict[str, list[dict[str, str]]] = {domain: [] for domain in DOMAINS}
        for line, row in enumerate(rows, start=2):
            if row["dataset"] not in members:
                raise DataError(
                    f"Line {line} of '{table}' has the dataset '{row['dataset']}': {nearest(row['dataset'], DOMAINS)}"
                )
            if row["dx"] not in CLASSES:
                raise DataError(
                    f"Line {line} of '{table}' has the diagnosis '{row['dx']}': {nearest(row['dx'], CLASSES)}"
                )
            if row["image_id"] in there:
                members[row["dataset"]].append(row)
        for domain, own in members.items():
            if not own:
                findings.missing(f"The domain '{domain}' has no image in '{table}': get the complete data set.")
                continue
            labels = [CLASSES.index(row["dx"]) for row in own]
            _, lesions = np.unique([row["lesion_id"] for row in own], return_inverse=True)
            files = [there[row["image_id"]] for row in own]
            domains[domain] = Domain([image_files(files, labels)], groups=lesions.astype(np.int64))
    return Listing("ham10000", root, CLASSES, domains)


HAM10000 = publish(
    Published(
        name="ham10000",
        what="Dermatoscopic images of seven kinds of skin lesions, 600 x 450, from four sources.",
        home="https://doi.org/10.7910/DVN/DBW86T",
        licence="CC BY-NC 4.0",
        layout="ham10000/HAM10000_metadata   the authors' table, with the column dataset; .csv or .tab may follow\n"
        "ham10000/HAM10000_images_part_{1,2}/*.jpg   or any folders",
        folders=("ham10000", "HAM10000", "HAM10K"),
        classes=7,
        sizes={
            "rosendahl": {"images": 2259},
            "vidir_modern": {"images": 3363},
            "vidir_molemax": {"images": 3954},
            "vienna_dias": {"images": 439},
        },
        scan=scan,
    )
)


@DATASETS.register("ham10000", paper="Tschandl et al., 2018 (arXiv:1803.10417); domains as in FedUV and UniVarFL")
def read_ham10000(
    root: str | os.PathLike[str] | None = None,
    size: int = 224,
    validation: float = 0.1,
    test: float = 0.2,
    split_seed: int = 0,
    by_lesion: bool = True,
) -> Source:
    """HAM10000: 10,015 images of 7 kinds of skin lesions in rosendahl, vidir_modern, vidir_molemax, vienna_dias.

    The images of one lesion stay together, in training or in testing; `by_lesion=false` splits image by image.
    """
    listing = scanned(HAM10000, find_root("ham10000", root, HAM10000.folders))
    domains = listing.domains
    if not by_lesion:
        domains = {name: Domain(domain.items) for name, domain in domains.items()}
    parts = rules.by_shares(domains, validation, test, split_seed)
    train = "flip+rotation(degrees=30)+normalise(like=imagenet)"
    return assemble(listing, parts, size, train=train, test="normalise(like=imagenet)")
