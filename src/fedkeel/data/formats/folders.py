"""Folders of images, one for each class, and a sentence about the files in them that are not read."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedkeel.data.dataset import Images, image_files
from fedkeel.data.formats.images import is_image
from fedkeel.errors import DataError, quoted

log = logging.getLogger("fedkeel")
LITTER = {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir", "$recycle.bin"}
MISPLACED = "not right in a class's folder"
NAMED = 3  # files in a sentence
Unread = dict[Path, str]  # files, and of what kind each is


def is_litter(name: str) -> bool:
    """What systems leave in folders by themselves, and hidden files, are no one's data."""
    return name.startswith(".") or name.lower() in LITTER


def visible_folders(path: Path) -> list[Path]:
    """Without hidden ones, and without what macOS puts into an archive beside its content; none of a missing folder."""
    there = path.iterdir() if path.is_dir() else ()
    return sorted(child for child in there if child.is_dir() and not is_litter(child.name))


def images_in(path: Path) -> list[Path]:
    """The images right in a folder, sorted; none of a missing folder."""
    return sorted_out(path)[0] if path.is_dir() else []


def sorted_out(path: Path) -> tuple[list[Path], Unread]:
    """The images right in a folder, sorted, and the other files right in it."""
    with os.scandir(path) as entries:
        files = sorted(path / entry.name for entry in entries if not entry.is_dir() and not is_litter(entry.name))
    read = {file: is_image(file) for file in files}
    return [file for file in files if read[file]], {file: kind(file) for file in files if not read[file]}


def misplaced(folder: Path, *, below: bool) -> Unread:
    """The files right in a folder, or `below` it in further folders, where images should not lie."""
    if not below:
        images, others = sorted_out(folder)
        return others | {image: f"{kind(image)} {MISPLACED}" for image in images}
    return {
        file: f"{kind(file)} {MISPLACED}" if is_image(file) else kind(file)
        for inner in visible_folders(folder)
        for file in sorted(inner.rglob("*"))
        if file.is_file() and not any(map(is_litter, file.relative_to(folder).parts))
    }


def kind(file: Path) -> str:
    return file.suffix.lower()[:20] or "without an ending"


def tell_unread(place: str, others: Unread) -> str:
    """Left out files may be, but not silently: the sentence that was told."""
    if not others:
        return ""
    most = Counter(others.values()).most_common()
    few = quoted([file.name for file in sorted(others)], NAMED, "{:,} others")
    wrong = any(kind.endswith(MISPLACED) for kind, _ in most)
    advice = "put images right into the folder of their class" if wrong else "convert images among them to PNG"
    files = f"{len(others):,} files of '{place}' are" if len(others) > 1 else f"1 file of '{place}' is"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in most[:8])
    sentence = f"{files} not read: {counts} ({few}); {advice}."
    log.warning(sentence)
    return sentence


def step_into(root: Path, *names: str) -> Path:
    """The folder itself, or the one of these names inside it: archives often bring a folder of their own."""
    return next((root / name for name in names if (root / name).is_dir()), root)


def tell_strange_folders(folder: Path, known: Sequence[str], what: str) -> None:
    for child in visible_folders(folder):
        if child.name not in known:
            log.warning("The folder '%s' is no %s and is not used.", child, what)


def class_images(name: str, folder: Path, classes: Sequence[str], *, below: str = "", needed: bool = True) -> Images:
    """The images of `folder/<class>/`; `below` is the folder inside a class's that has them. Where they are `needed`,
    every class must have some."""
    images, left = in_class_folders(folder, classes, below)
    tell_unread(str(folder), left)
    for number in sorted(set(range(len(classes))) - set(images.labels.tolist())) if needed else ():
        raise DataError(
            f"The class '{classes[number]}' of {name} has no images in '{folder}': put them into a folder of that name."
        )
    return images


def in_class_folders(folder: Path, classes: Sequence[str], below: str = "") -> tuple[Images, Unread]:
    """The images of `folder/<class>/`, and the files beside and below them that are not read."""
    known = {label: number for number, label in enumerate(classes)}
    files: list[Path] = []
    labels: list[int] = []
    left: Unread = {}
    for child in visible_folders(folder):  # and not of `classes`, which may come from a server: one may be called `..`
        if child.name in known and (child / below).is_dir():
            found, others = sorted_out(child / below)
            left |= others | misplaced(child / below, below=True)
            files += found
            labels += [known[child.name]] * len(found)
    return image_files(files, labels), left
