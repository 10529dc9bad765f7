"""Folders of images: what lies in them, and a sentence about what is not read."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedkeel.data.dataset import Findings, Images, image_files
from fedkeel.data.formats.images import is_image

LITTER = {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir", "$recycle.bin"}
MISPLACED = "not right in a class's folder"
NAMED = 3  # files in a sentence
Unread = dict[Path, str]  # files, and of what kind each is


def visible_folders(path: Path) -> list[Path]:
    """Without hidden ones, and without what macOS puts into an archive beside its content; none of a missing folder."""
    there = path.iterdir() if path.is_dir() else ()
    return sorted(child for child in there if child.is_dir() and not is_litter(child.name))


def images_in(path: Path) -> list[Path]:
    """The images right in a folder, sorted; none of a missing folder."""
    return sorted_out(path, below=False)[0] if path.is_dir() else []


def sorted_out(path: Path, *, below: bool = True) -> tuple[list[Path], Unread]:
    """The images right in a folder, sorted, and the files in it, and `below` it, that are not read.

    What systems leave in folders by themselves, and hidden files, are no one's data.
    """
    images: list[Path] = []
    others: Unread = {}
    with os.scandir(path) as entries:
        for entry in entries:
            file = path / entry.name
            if is_litter(entry.name):
                continue
            if entry.is_dir():
                for folder, _, names in os.walk(entry.path) if below else ():
                    hidden = any(map(is_litter, Path(folder).relative_to(path).parts))
                    deep = [Path(folder) / name for name in names if not (hidden or is_litter(name))]
                    others |= {file: kind(file, misplaced=True) for file in deep}
            elif is_image(file):
                images.append(file)
            else:
                others[file] = kind(file)
    return sorted(images), others


def is_litter(name: str) -> bool:
    return name.startswith(".") or name.lower() in LITTER


def kind(file: Path, *, misplaced: bool = False) -> str:
    ending = file.suffix.lower()[:20] or "without an ending"
    return f"{ending} {MISPLACED}" if misplaced and is_image(file) else ending


def tell_unread(findings: Findings, place: str, others: Unread) -> None:
    """Left out files may be, but not silently."""
    if others:
        findings.extra(unread(place, others), [f"{file} ({what})" for file, what in sorted(others.items())])


def unread(place: str, others: Unread) -> str:
    """The sentence about files that are not read."""
    counts = Counter(others.values())
    most = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    kinds = [f"{count:,} {kind}" for kind, count in most[:8]]
    if len(most) > 8:
        kinds.append(f"{sum(count for _, count in most[8:]):,} of other kinds")
    few = ", ".join(f"'{file.name}'" for file in sorted(others)[:NAMED])
    more = ", and more that 'fedkeel data check' names" if len(others) > NAMED else ""
    wrong = any(kind.endswith(MISPLACED) for kind in counts)
    advice = "put images right into the folder of their class" if wrong else "convert images among them to PNG"
    files = f"{len(others):,} files of '{place}' are" if len(others) > 1 else f"1 file of '{place}' is"
    return f"{files} not read: {', '.join(kinds)} ({few}{more}); {advice}."


def step_into(root: Path, *names: str) -> Path:
    """The folder itself, or the one of these names inside it: archives often bring a folder of their own."""
    return next((root / name for name in names if (root / name).is_dir()), root)


def class_images(
    name: str,
    folder: Path,
    classes: Sequence[str],
    findings: Findings,
    *,
    ignored: Sequence[str] = (),
    below: str = "",
    needed: bool = True,
) -> Images:
    """The images of `folder/<class>/`, and findings: classes without images, folders too many.

    `ignored` are folders that may be there and are not read; `below` is the folder inside a class's that has its
    images; `needed` says that every class must have some.
    """
    for child in visible_folders(folder):
        if child.name not in (*classes, *ignored):
            findings.extra(f"The folder '{child}' is no class of {name} and is not used.")
    images, left = in_class_folders(folder, classes, below)
    tell_unread(findings, str(folder), left)
    for number in sorted(set(range(len(classes))) - set(images.labels.tolist())) if needed else ():
        findings.missing(
            f"The class '{classes[number]}' of {name} has no images in '{folder}': put them into a folder of that name."
        )
    return images


def in_class_folders(folder: Path, classes: Sequence[str], below: str = "") -> tuple[Images, Unread]:
    """The images of `folder/<class>/`, and the files beside them that are not read."""
    known = {label: number for number, label in enumerate(classes)}
    files: list[Path] = []
    labels: list[int] = []
    left: Unread = {}
    for child in visible_folders(folder):
        if child.name in known and (child / below).is_dir():
            found, others = sorted_out(child / below)
            left |= others
            files += found
            labels += [known[child.name]] * len(found)
    return image_files(files, labels), left
