"""A tree of images, `root/<domain>/<class>/*.png`: one's own data.

Where `root/splits/<domain>_train.txt` and `<domain>_test.txt` exist, they say which images are for what; otherwise
each class of each domain is split at random by `split_seed`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.formats.split_lists import LISTS, read_lists
from fedkeel.data.listing import (
    Domain,
    Listing,
    assemble,
    image_files,
    images_in,
    kind,
    sorted_out,
    unread,
    visible_folders,
)
from fedkeel.data.source import DATASETS, Source, find_root, names
from fedkeel.errors import DataError, nearest

log = logging.getLogger("fedkeel")

PARTS = ("train", "training", "val", "valid", "validation", "test", "testing")
LAYOUT = "root/<domain>/<class>/*.png (or jpg, jpeg, bmp, webp)"


@DATASETS.register("folder")
def read_folder(
    root: str | os.PathLike[str] | None = None,
    size: int = 32,
    validation: float = 0.15,
    test: float = 0.25,
    split_seed: int = 0,
    classes: str | Sequence[str] | None = None,
) -> Source:
    """Your own images, in folders root/<domain>/<class>/, resized to size x size pixels.

    `classes` fixes the label order, for sites that do not have every class; by default it is every class folder of
    any domain, sorted. `validation` and `test` are shares of each class of a domain.
    """
    if root is None:
        raise DataError(f"folder needs the path of your images: give root=PATH, a folder laid out as {LAYOUT}.")
    listing = scan_own(find_root("folder", root, ()), classes)
    parts = rules.by_shares(listing.domains, validation, test, split_seed)
    return assemble(listing, parts, size, train="flip+normalise", test="normalise")


def scan_own(root: Path, classes: str | Sequence[str] | None) -> Listing:
    """Find the images, and refuse a tree of another layout with a sentence that says which one is expected."""
    if not root.is_dir():
        raise DataError(f"'{root}' is not a folder: the layout must be {LAYOUT}.")
    domains = [path for path in visible_folders(root) if path.name != "splits"]
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
    folders = sorted({folder.name for domain in domains for folder in visible_folders(domain)})
    order = tuple(folders) if classes is None else tuple(names(classes))
    warn_of_near_names(folders)
    for label in folders:
        if label not in order:
            raise DataError(f"The class folder '{label}' of 'folder' is not in classes: {nearest(label, order)}")
    warn_of_strange_lists(root, [domain.name for domain in domains])
    if others := loose(root):
        log.warning(unread(str(root), others))
    listed = {domain.name: scan_domain(domain, order) for domain in domains}
    if not listed:
        raise DataError(f"There are no images in '{root}': the layout must be {LAYOUT}.")
    without = [name for name, domain in listed.items() if domain.official is None]
    if 0 < len(without) < len(listed):
        log.warning(
            "Some domains of '%s' have lists in splits/, but not %s: those are split at random.",
            root,
            " and ".join(without),
        )
    return Listing("folder", root, order, listed)


def warn_of_near_names(folders: Sequence[str]) -> None:
    """Dog in one domain and dog in another are two classes, which is hardly ever meant."""
    seen: dict[str, str] = {}
    for folder in folders:
        other = seen.setdefault(folder.casefold(), folder)
        if other != folder:
            log.warning("The class folders '%s' and '%s' count as two classes: give them one name.", other, folder)


def warn_of_strange_lists(root: Path, domains: Sequence[str]) -> None:
    """A list with a misspelt name would leave its domain to be split at random."""
    own = {f"{domain}_{part}.txt" for domain in domains for part in LISTS}
    for file in sorted((root / "splits").glob("*.txt")):
        if file.stem.endswith(tuple(f"_{part}" for part in LISTS)) and file.name not in own:
            log.warning("The list '%s' is of no domain and is not used: %s", file, nearest(file.name, own))


def loose(folder: Path) -> Counter[str]:
    """What lies right in a folder whose images should be in folders of their own, images among it."""
    images, others = sorted_out(folder, below=False)
    return others + Counter(kind(image.name, misplaced=True) for image in images)


def scan_domain(domain: Path, order: Sequence[str]) -> Domain:
    """The images of the class folders in `domain`, with the lists beside it where there are some."""
    files: dict[Path, list[Path]] = {}
    left = loose(domain)
    for folder in visible_folders(domain):
        files[folder], others = sorted_out(folder)
        left += others
    found = [(file, folder.name) for folder in files for file in files[folder]]
    if not found:
        why = f" ({unread(domain.name, left).rstrip('.')})" if left else ""
        raise DataError(f"The domain '{domain}' of 'folder' has no images{why}: the layout must be {LAYOUT}.")
    if left:
        log.warning(unread(domain.name, left))
    for folder in files:
        if not files[folder]:
            log.warning("The class folder '%s' has no images: '%s' has none of that class.", folder, domain.name)
    position = {file.relative_to(domain.parent).as_posix(): number for number, (file, _) in enumerate(found)}
    items = image_files([file for file, _ in found], [order.index(label) for _, label in found])
    lists = read_lists(domain.parent, domain.name, position)
    unlisted = len(found) - sum(map(len, lists)) if lists else 0
    if unlisted:
        log.warning("%s images of '%s' are in none of its lists and are not used.", f"{unlisted:,}", domain.name)
    return Domain([items], lists)
