"""A tree of images, `root/<domain>/<class>/*.png`: one's own data.

Where `root/splits/<domain>_train.txt` and `<domain>_test.txt` exist, they say which images are for what; otherwise
each class of each domain is split at random by `split_seed`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from fedkeel.data import rules
from fedkeel.data.listing import Domain, Listing, assemble, image_files, images_in, visible_folders
from fedkeel.data.source import DATASETS, Source, find_root, names
from fedkeel.data.split_lists import read_lists
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
    flat = [path.name for path in domains if images_in(path)]
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
    listed = {domain.name: scan_domain(domain, order) for domain in domains}
    if not listed:
        raise DataError(f"There are no images in '{root}': the layout must be {LAYOUT}.")
    return Listing("folder", root, order, listed)


def warn_of_near_names(folders: Sequence[str]) -> None:
    """Dog in one domain and dog in another are two classes, which is hardly ever meant."""
    seen: dict[str, str] = {}
    for folder in folders:
        other = seen.setdefault(folder.casefold(), folder)
        if other != folder:
            log.warning("The class folders '%s' and '%s' count as two classes: give them one name.", other, folder)


def scan_domain(domain: Path, order: Sequence[str]) -> Domain:
    """The images of the class folders in `domain`, with the lists beside it where there are some."""
    found = [(file, folder.name) for folder in visible_folders(domain) for file in images_in(folder)]
    if not found:
        raise DataError(f"The domain '{domain}' of 'folder' has no images: the layout must be {LAYOUT}.")
    position = {file.relative_to(domain.parent).as_posix(): number for number, (file, _) in enumerate(found)}
    items = image_files([file for file, _ in found], [order.index(label) for _, label in found])
    return Domain([items], read_lists(domain.parent, domain.name, position))
