"""A tree of images, `root/<domain>/<class>/*.png`: one's own data.

Where `root/splits/<domain>_train.txt` and `<domain>_test.txt` exist, they say which images are for what; otherwise
each class of each domain is split at random by `split_seed`.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedkeel.data.dataset import Domain, Manifest
from fedkeel.data.formats.folders import class_images, tell_unread, visible_folders
from fedkeel.data.formats.lists import split_lists
from fedkeel.data.reader import DATASETS, Fraction, Reader, find_root
from fedkeel.errors import DataError, nearest
from fedkeel.options import Count
from fedkeel.spec import names

log = logging.getLogger("fedkeel")

PARTS = ("train", "training", "val", "valid", "validation", "test", "testing")
LAYOUT = "root/<domain>/<class>/*.png (or jpg, jpeg, bmp, webp, tif, gif, dcm)"


@DATASETS.register("folder")
@dataclass(frozen=True)
class Folder(Reader):
    """Your own images, in folders root/<domain>/<class>/, resized to size x size pixels.

    `classes` fixes the label order, for sites that do not have every class; by default it is every class folder of
    any domain, sorted. `validation` and `test` are shares of each class of a domain. `group` is a regular expression
    whose one pair of brackets has the patient in a file's name, `(patient\\d+)_`: no patient is in two of the splits.
    `called` reads root/<class>/ as one domain of this name.
    """

    name = "folder"
    transforms = ("flip+normalise", "normalise")

    size: Count = 32
    validation: Fraction = 0.15
    test: Fraction = 0.25
    classes: str | Sequence[str] | None = None
    group: str | None = None
    called: str | None = None

    def __post_init__(self) -> None:
        group_pattern(self.group or "()")

    def folder(self) -> Path:
        if self.root is None:
            raise DataError(f"folder needs the path of your images: give root=PATH, a folder laid out as {LAYOUT}.")
        root = find_root(self.name, self.root)
        if not root.is_dir():
            raise DataError(f"'{root}' is not a folder: the layout must be {LAYOUT}.")
        return root

    def scan(self, root: Path) -> Manifest:
        if self.called is not None:
            places = {self.called: root}
        else:
            places = {path.name: path for path in visible_folders(root) if path.name != "splits"}
        if len(places) > 1 and all(name.lower() in PARTS for name in places):
            raise DataError(
                f"'{root}' has the folders {', '.join(places)}, parts of a split that would be trained on as domains: "
                f"the layout must be {LAYOUT}, and root/splits/<domain>_train.txt and _test.txt say what is for what."
            )
        folders = sorted({folder.name for place in places.values() for folder in visible_folders(place)})
        classes = tuple(folders) if self.classes is None else tuple(names(self.classes))
        for label in folders:
            if label not in classes:
                raise DataError(
                    f"The class folder '{label}' of '{root}' is no class of the federation: {nearest(label, classes)}"
                )
        domains = {name: scan_domain(place, classes, self.group) for name, place in places.items()}
        files = [file for domain in domains.values() for file in domain.files]
        tell_unread(root, files)
        without = [name for name, domain in domains.items() if domain.official is None]
        if 0 < len(without) < len(domains):
            log.warning(
                "Some domains of '%s' have lists in splits/, but not %s: those are split at random.",
                *(root, " and ".join(without)),
            )
        if not domains:
            raise DataError(f"There are no images in '{root}': the layout must be {LAYOUT}.")
        return Manifest(self.name, root, classes, domains)


def group_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error:
        pattern = re.compile("")
    if pattern.groups != 1:
        raise DataError(
            f"The group '{text}' is no regular expression with one pair of brackets: put one around what names the "
            "patient, like '(patient\\d+)_'."
        )
    return pattern


def groups_of(files: Sequence[Path], pattern: str) -> npt.NDArray[np.str_]:
    """What the brackets of the pattern hold in each file's name."""
    matches = [group_pattern(pattern).search(file.name) for file in files]
    found = [match[1] if match else None for match in matches]
    without = [file for file, group in zip(files, found, strict=True) if not group]
    if without:
        raise DataError(
            f"{len(without):,} of {len(files):,} files, '{without[0]}' among them, have no group by group='{pattern}': "
            "the pattern must be found in the name of every file."
        )
    return np.array(found, np.str_)


def scan_domain(domain: Path, classes: Sequence[str], group: str | None = None) -> Domain:
    """The images of the class folders in `domain`, with the lists beside it where there are some."""
    images = class_images("folder", domain, classes, needed=False)
    if not images.files:
        raise DataError(f"There are no images in class folders of '{domain}': put them into '{domain}/<class>/'.")
    position = {file.relative_to(domain.parent).as_posix(): number for number, file in enumerate(images.files)}
    lists = split_lists(domain.parent / "splits", domain.name, position)
    unlisted = len(images.files) - sum(map(len, lists)) if lists else 0
    if unlisted:
        log.warning("%s images of '%s' are in none of its lists and are not used.", f"{unlisted:,}", domain.name)
    return Domain([images], lists, groups_of(images.files, group) if group else None)
