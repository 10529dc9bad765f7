"""Lists that say which images of a domain are for training and testing: `splits/<domain>_train.txt`.

A line is a path below the root, with or without a label after it. The class is always that of the image's folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedkeel.data.formats.metadata import read_lines
from fedkeel.data.source import IntArray
from fedkeel.errors import DataError

LISTS = ("train", "validation", "test")


def read_lists(
    root: Path,
    domain: str,
    position: Mapping[str, int],
    *,
    folder: str = "splits",
    classes: Collection[str] | None = None,
) -> tuple[IntArray, IntArray, IntArray] | None:
    """Positions for training, validation and testing in the lists' order, or None if there are no lists.

    `position` has the domain's images by their path below the root. Images in no list are not used. Where only some
    `classes` are read, lines that name an image of another one are passed over.
    """
    files = {part: root / folder / f"{domain}_{part}.txt" for part in LISTS}
    present = {part: file.is_file() for part, file in files.items()}
    if not any(present.values()):
        return None
    for part in ("train", "test"):
        if not present[part]:
            raise DataError(f"'{files[part]}' is missing, but another list of '{domain}' is there: give both or none.")
    owner: dict[int, str] = {}
    parts: dict[str, list[int]] = {part: [] for part in files}
    for part, file in files.items():
        lines = read_lines(file) if present[part] else []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = find(line.strip(), position)
            if place is None and classes is not None and class_of(line) not in classes:
                continue
            if place is None:
                raise DataError(absent(number, file, line, domain))
            if place in owner:
                raise DataError(
                    f"Line {number} of '{file}', '{line.strip()}', is already in the {owner[place]} list: keep one."
                )
            owner[place] = part
            parts[part].append(place)
    train, validation, test = (np.array(parts[part], np.int64) for part in LISTS)
    return train, validation, test


def read_kfold(
    folders: Sequence[Path], domain: str, position: Mapping[str, int], labels: Sequence[int]
) -> tuple[IntArray, IntArray] | None:
    """PACS's own lists, `<domain>_{train,crossval}_kfold.txt`: positions for training and cross-validation.

    A line is a path and a label that counts from 1. `<domain>_test_kfold.txt` lists every image of the domain, for
    testing on a domain that was left out; it needs no reading.
    """
    folder = next((folder for folder in folders if (folder / f"{domain}_train_kfold.txt").is_file()), None)
    if folder is None:
        return None
    parts: list[list[int]] = [[], []]
    owner: dict[int, str] = {}
    for part, use in zip(parts, ("train", "crossval"), strict=True):
        file = folder / f"{domain}_{use}_kfold.txt"
        if not file.is_file():
            raise DataError(f"'{file}' is missing, but the train list of '{domain}' is there: give both or none.")
        for number, line in enumerate(read_lines(file), start=1):
            if not line.strip():
                continue
            path, _, label = line.strip().rpartition(" ")
            place = position.get(path)
            if place is None:
                raise DataError(absent(number, file, line, domain))
            if not label.isdigit() or int(label) - 1 != labels[place]:
                raise DataError(
                    f"Line {number} of '{file}' gives '{path}' the label {label}, but its folder is class "
                    f"{labels[place] + 1}: the labels of these lists count the sorted class folders from 1."
                )
            if place in owner:
                raise DataError(
                    f"Line {number} of '{file}', '{line.strip()}', is already in the {owner[place]} list: keep one."
                )
            owner[place] = use
            part.append(place)
    return np.array(parts[0], np.int64), np.array(parts[1], np.int64)


def find(line: str, position: Mapping[str, int]) -> int | None:
    """The image that a line names; a path may have blanks, so the whole line is tried before `path label`."""
    for path in (line, line.rsplit(maxsplit=1)[0]):
        if path in position:
            return position[path]
    return None


def absent(number: int, file: Path, line: str, domain: str) -> str:
    return (
        f"Line {number} of '{file}', '{line.strip()}', is no image of the domain '{domain}': put the image there, or "
        "remove the line."
    )


def class_of(line: str) -> str:
    """The class folder in `<domain>/<class>/<file> <label>`."""
    folders = line.strip().split("/")
    return folders[1] if len(folders) > 2 else ""
