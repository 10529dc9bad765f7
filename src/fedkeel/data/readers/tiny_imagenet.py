"""Tiny-ImageNet (Stanford CS231n): 200 classes of 64 px photographs.

The labels of its test images are not public: as everywhere, its validation images are the test set.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.formats.metadata import read_lines
from fedkeel.data.listing import (
    Findings,
    Items,
    Listing,
    assemble,
    class_files,
    image_files,
    images_in,
    step_into,
    train_and_test,
    visible_folders,
)
from fedkeel.data.published import Published, publish, scanned
from fedkeel.data.source import DATASETS, Source, find_root


def scan(root: Path, findings: Findings) -> Listing:
    folder = step_into(root, "tiny-imagenet-200")
    trained: list[Items] = []
    tested: list[Items] = []
    classes = class_ids(folder)
    if not (folder / "train").is_dir():
        findings.missing(f"'{folder / 'train'}' is missing: tiny-imagenet has a folder train/<wnid>/images there.")
    else:
        files, labels = class_files("tiny-imagenet", folder / "train", classes, findings, below="images")
        trained.append(image_files(files, labels))
    with findings.part():
        tested.append(annotated(folder / "val", classes, findings))
    return Listing("tiny-imagenet", folder, classes, {"tiny-imagenet": train_and_test(trained, tested)})


def class_ids(folder: Path) -> tuple[str, ...]:
    """The WordNet ids in `wnids.txt`, or else the folders of the training images; sorted, as labels are counted."""
    listed = folder / "wnids.txt"
    if listed.is_file():
        return tuple(sorted(" ".join(read_lines(listed)).split()))
    return tuple(path.name for path in visible_folders(folder / "train")) if (folder / "train").is_dir() else ()


def annotated(folder: Path, classes: tuple[str, ...], findings: Findings) -> Items:
    """`val/images/*.JPEG`, whose classes are in the lines `file wnid x y w h` of `val/val_annotations.txt`."""
    listed = folder / "val_annotations.txt"
    files: list[Path] = []
    labels: list[int] = []
    if not listed.is_file():
        findings.missing(f"'{listed}' is missing: without it the validation images have no classes.")
        return image_files(files, labels)
    number = {wnid: label for label, wnid in enumerate(classes)}
    there = {file.name: file for file in images_in(folder / "images")} if (folder / "images").is_dir() else {}
    lost: list[str] = []
    for line_number, line in enumerate(read_lines(listed), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) < 2 or fields[1] not in number:
            findings.missing(
                f"Line {line_number} of '{listed}', '{line.strip()}', names no class of the training images: get the "
                "authors' file."
            )
        elif fields[0] not in there:
            lost.append(fields[0])
        else:
            files.append(there[fields[0]])
            labels.append(number[fields[1]])
    if lost:
        findings.missing(
            f"{len(lost)} of the images in '{listed}' are missing from '{folder / 'images'}', '{lost[0]}' among them: "
            "unpack all of the archive."
        )
    return image_files(files, labels)


TINY = publish(
    Published(
        name="tiny-imagenet",
        what="200 classes of ImageNet at 64 px, one domain; tested on its validation images.",
        home="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        licence="as ImageNet: for non-commercial research",
        layout="tiny-imagenet-200/wnids.txt\n"
        "tiny-imagenet-200/train/<wnid>/images/*.JPEG\n"
        "tiny-imagenet-200/val/images/*.JPEG and val/val_annotations.txt",
        folders=("tiny-imagenet", "tiny-imagenet-200", "tiny_imagenet", "TinyImageNet"),
        classes=200,
        sizes={"tiny-imagenet": {"train": 100000, "test": 10000}},
        scan=scan,
    )
)


@DATASETS.register("tiny-imagenet", paper="Le and Yang, CS231n, 2015; transforms of HBN")
def read_tiny_imagenet(
    root: str | os.PathLike[str] | None = None, size: int = 64, validation: float = 0.0, split_seed: int = 0
) -> Source:
    """Tiny-ImageNet: 100,000 + 10,000 images of 200 classes, one domain.

    `validation` is a share of the training set, none by default.
    """
    listing = scanned(TINY, find_root("tiny-imagenet", root, TINY.folders))
    parts = rules.by_shares(listing.domains, validation, 0.0, split_seed)
    return assemble(listing, parts, size, train="normalise", test="normalise")
