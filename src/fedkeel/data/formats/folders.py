"""Folders of images, one for each class, and a sentence about the files in them that are not read."""

import logging
from collections.abc import Sequence
from pathlib import Path

from fedkeel.data.dataset import Images, image_files
from fedkeel.data.formats.images import is_image
from fedkeel.errors import DataError, quoted

log = logging.getLogger("fedkeel")
LITTER = {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir", "$recycle.bin"}


def is_litter(name: str) -> bool:
    """What systems leave in folders by themselves, and hidden files, are no one's data."""
    return name.startswith(".") or name.lower() in LITTER


def visible(path: Path) -> list[Path]:
    """What lies in a folder; nothing of a missing one."""
    return sorted(child for child in path.iterdir() if not is_litter(child.name)) if path.is_dir() else []


def visible_folders(path: Path) -> list[Path]:
    return [child for child in visible(path) if child.is_dir()]


def images_in(path: Path) -> list[Path]:
    """The images right in a folder, sorted."""
    return [child for child in visible(path) if is_image(child) and not child.is_dir()]


def tell_unread(place: Path, images: Sequence[Path]) -> None:
    """Left out files may be, but not silently; those of text are lists."""
    found = {path: path.relative_to(place).parts for path in {*place.rglob("*")} - {*images} if not path.is_dir()}
    left = sorted(str(Path(*own)) for own in found.values() if not any(map(is_litter, own)) and own[-1][-4:] != ".txt")
    if left:
        log.warning(
            "%s files of '%s' are not read, %s: put images right into their class's folder, as PNG, JPEG or DICOM.",
            *(f"{len(left):,}", place, quoted(left, 3, "{:,} others")),
        )


def class_images(name: str, folder: Path, classes: Sequence[str], *, below: str = "", needed: bool = True) -> Images:
    """The images of `folder/<class>/`, or of the folder `below` in it. Where they are `needed`, every class must have
    some."""
    files: list[Path] = []
    labels: list[int] = []
    for child in visible_folders(folder):  # and not of `classes`, which may come from a server: one may be called `..`
        if child.name in classes:
            found = images_in(child / below)
            files += found
            labels += [classes.index(child.name)] * len(found)
    for number in sorted({*range(len(classes))} - {*labels}) if needed else ():
        raise DataError(
            f"The class '{classes[number]}' of {name} has no images in '{folder}': get all of the data set."
        )
    return image_files(files, labels)


def split_folders(name: str, folder: Path, classes: Sequence[str], *uses: str) -> list[list[Images]]:
    """The images of `folder/<use>/<class>/` for each use; nothing where not all of these are there."""
    if not all((folder / use).is_dir() for use in uses):
        return []
    return [[class_images(name, folder / use, classes)] for use in uses]
