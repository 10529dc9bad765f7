"""Lists that say which images of a domain are for training and testing: `splits/<domain>_train.txt`.

A line is a path below the root, with or without a label after it. The class is always that of the image's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fedkeel.data.source import IntArray
from fedkeel.errors import DataError


def read_lists(root: Path, domain: str, position: Mapping[str, int]) -> tuple[IntArray, IntArray, IntArray] | None:
    """Positions for training, validation and testing in the lists' order, or None if there are no lists.

    `position` has the domain's images by their path below the root. Images in no list are not used.
    """
    files = {part: root / "splits" / f"{domain}_{part}.txt" for part in ("train", "validation", "test")}
    present = {part: file.is_file() for part, file in files.items()}
    if not any(present.values()):
        return None
    for part in ("train", "test"):
        if not present[part]:
            raise DataError(f"'{files[part]}' is missing, but another list of '{domain}' is there: give both or none.")
    owner: dict[int, str] = {}
    parts: dict[str, list[int]] = {part: [] for part in files}
    for part, file in files.items():
        lines = file.read_text(encoding="utf-8").splitlines() if present[part] else []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = find(line.strip(), position)
            if place is None:
                raise DataError(f"Line {number} of '{file}', '{line.strip()}', is no image of the domain '{domain}'.")
            if place in owner:
                raise DataError(
                    f"Line {number} of '{file}', '{line.strip()}', is already in the {owner[place]} list: keep one."
                )
            owner[place] = part
            parts[part].append(place)
    train, validation, test = (np.array(parts[part], np.int64) for part in ("train", "validation", "test"))
    return train, validation, test


def find(line: str, position: Mapping[str, int]) -> int | None:
    """The image that a line names; a path may have blanks, so the whole line is tried before `path label`."""
    for path in (line, line.rsplit(maxsplit=1)[0]):
        if path in position:
            return position[path]
    return None
