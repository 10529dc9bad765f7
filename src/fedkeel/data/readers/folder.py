"""A tree of images, `root/<domain>/<class>/*.png`: one's own data.

Where `root/splits/<domain>_train.txt` and `<domain>_test.txt` exist, they say which images are for what; otherwise
each class of each domain is split at random by `split_seed`.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedkeel.data.dataset import Domain, Manifest
from fedkeel.data.formats.folders import images_in, in_class_folders, misplaced, tell_unread, visible_folders
from fedkeel.data.formats.lists import read_lists
from fedkeel.data.population import USES
from fedkeel.data.reader import DATASETS, Fraction, Reader, find_root
from fedkeel.data.splits import tell_shared_groups
from fedkeel.errors import DataError, nearest, quoted
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
    """

    name = "folder"
    transforms = ("flip+normalise", "normalise")

    size: Count = 32
    validation: Fraction = 0.15
    test: Fraction = 0.25
    classes: str | Sequence[str] | None = None
    group: str | None = None

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
        domains = [path for path in visible_folders(root) if path.name != "splits"]
        refuse_other_layouts(root, domains)
        folders = sorted({folder.name for domain in domains for folder in visible_folders(domain)})
        classes = tuple(folders) if self.classes is None else tuple(names(self.classes))
        warn_of_near_names(folders)
        for label in folders:
            if label not in classes:
                raise DataError(f"The class folder '{label}' of 'folder' is not in classes: {nearest(label, classes)}")
        warn_of_strange_lists(root, [domain.name for domain in domains])
        tell_unread(str(root), misplaced(root, below=False))
        listed = {domain.name: scan_domain(domain, classes, self.group) for domain in domains}
        if not listed:
            raise DataError(f"There are no images in '{root}': the layout must be {LAYOUT}.")
        without = [name for name, domain in listed.items() if domain.official is None]
        if 0 < len(without) < len(listed):
            log.warning(
                "Some domains of '%s' have lists in splits/, but not %s: those are split at random.",
                *(root, " and ".join(without)),
            )
        tell_empty(classes, dict(zip(domains, listed.values(), strict=True)))
        tell_shared_groups(listed)
        return Manifest(self.name, root, classes, listed)


def refuse_other_layouts(root: Path, domains: Sequence[Path]) -> None:
    flat = [path.name for path in domains if images_in(path) and not any(map(images_in, visible_folders(path)))]
    if flat:
        raise DataError(
            f"'{root / flat[0]}' has images right in it, but the layout must be {LAYOUT}: if '{flat[0]}' is a class, "
            f"put the class folders of '{root}' into a folder named after their domain."
        )
    if len(domains) > 1 and all(path.name.lower() in PARTS for path in domains):
        parts = ", ".join(path.name for path in domains)
        raise DataError(
            f"'{root}' has the folders {parts}, parts of a split that would be trained on as domains: the layout must "
            f"be {LAYOUT}, and root/splits/<domain>_train.txt and _test.txt say what is for what."
        )


def warn_of_near_names(folders: Sequence[str]) -> None:
    """Dog in one domain and dog in another are two classes, which is hardly ever meant."""
    seen: dict[str, str] = {}
    for folder in folders:
        other = seen.setdefault(folder.casefold(), folder)
        if other != folder:
            log.warning("The class folders '%s' and '%s' count as two classes: give them one name.", other, folder)


def warn_of_strange_lists(root: Path, domains: Sequence[str]) -> None:
    """A list with a misspelt name would leave its domain to be split at random."""
    own = {f"{domain}_{part}.txt" for domain in domains for part in USES}
    for file in sorted((root / "splits").glob("*.txt")):
        if file.stem.endswith(tuple(f"_{part}" for part in USES)) and file.name not in own:
            log.warning("The list '%s' is of no domain and is not used: %s", file, nearest(file.name, own))


def group_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise DataError(
            f"The group '{text}' is no regular expression ({error}): give one like '(patient\\d+)_'."
        ) from None
    if pattern.groups != 1:
        raise DataError(
            f"The group '{text}' has {pattern.groups} pairs of brackets: put one around what names the patient, "
            "like '(patient\\d+)_'."
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


def tell_empty(classes: Sequence[str], domains: Mapping[Path, Domain]) -> None:
    empty = [
        str(folder)
        for path, domain in domains.items()
        for there in [set(domain.labels.tolist())]
        for folder in visible_folders(path)
        if classes.index(folder.name) not in there
    ]
    if empty:
        log.warning("Class folders without images: %s; their domains have none of these classes.", quoted(empty))


def scan_domain(domain: Path, classes: Sequence[str], group: str | None = None) -> Domain:
    """The images of the class folders in `domain`, with the lists beside it where there are some."""
    images, left = in_class_folders(domain, classes)
    told = tell_unread(domain.name, left | misplaced(domain, below=False))
    if not images.files:
        why = f" ({told.rstrip('.')})" if told else ""
        raise DataError(f"The domain '{domain}' of 'folder' has no images{why}: the layout must be {LAYOUT}.")
    position = {file.relative_to(domain.parent).as_posix(): number for number, file in enumerate(images.files)}
    lists = read_lists(domain.parent / "splits", domain.name, position)
    unlisted = len(images.files) - sum(map(len, lists)) if lists else 0
    if unlisted:
        log.warning("%s images of '%s' are in none of its lists and are not used.", f"{unlisted:,}", domain.name)
    return Domain([images], lists, groups_of(images.files, group) if group else None)
