"""What a data set has on disk, before an image is decoded: a listing, which readers and `fedkeel data check` share.

A data set's file has a function `scan(root, findings)` that makes the listing. Where something is missing it tells the
`Findings`: a reader stops there with that sentence, and the check goes on and shows all of them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from fedkeel.data import memory as room
from fedkeel.data.formats.cache import cached, fingerprint
from fedkeel.data.formats.images import Bytes, decode_all, resize_all
from fedkeel.data.source import IntArray, Source, Split, indices, whole
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
LITTER = {"thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r", "__macosx", "@eadir", "$recycle.bin"}
MISPLACED = "not right in a class's folder"
Parts = tuple[IntArray, IntArray, IntArray]
Load = Callable[[IntArray, int], tuple[Bytes, IntArray]]


class Findings:
    """What a scan finds wrong. A reader stops at what is missing; a check (`collect=True`) goes on and keeps all."""

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.sentences: list[str] = []

    def missing(self, sentence: str) -> None:
        """Something without which the data set is not what it is called."""
        if not self.collect:
            raise DataError(sentence)
        self.sentences.append(sentence)

    def extra(self, sentence: str) -> None:
        """Something that does no harm and is not used."""
        if not self.collect:
            log.warning(sentence)
        self.sentences.append(sentence)

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part that may be broken while the rest can still be looked at."""
        try:
            yield
        except DataError as error:
            self.missing(str(error))


@dataclass(frozen=True)
class Items:
    """A run of images: their labels, and either the image files, or how to get some of them out of one larger file.

    `load(positions, size)` gives the images (n, 3, size, size) of those that could be decoded, and which ones of
    `positions` these are.
    """

    labels: IntArray
    files: Sequence[Path] = ()
    load: Load | None = None


@dataclass(frozen=True)
class Domain:
    """One domain: its images in a fixed order, and the split that the data set comes with, if it comes with one."""

    items: Sequence[Items]
    official: Parts | None = None
    groups: IntArray | None = None  # images of one group (a lesion) must not be split apart

    @property
    def labels(self) -> IntArray:
        return np.concatenate([np.empty(0, np.int64), *(items.labels for items in self.items)])


@dataclass(frozen=True)
class Listing:
    """A data set on disk: its classes in label order and its domains."""

    name: str
    root: Path
    classes: tuple[str, ...]
    domains: Mapping[str, Domain] = field(default_factory=dict)

    def counts(self) -> dict[str, dict[str, int]]:
        """The images of each domain, by what the data set says that they are for, or `images` if it says nothing."""
        table: dict[str, dict[str, int]] = {}
        for name, domain in self.domains.items():
            if domain.official is None:
                table[name] = {"images": len(domain.labels)}
            else:
                uses = zip(("train", "validation", "test"), domain.official, strict=True)
                table[name] = {use: len(part) for use, part in uses if len(part)}
        return table


def train_and_test(train: Sequence[Items], test: Sequence[Items]) -> Domain:
    """A domain with an official training and an official test set."""
    trained, tested = (sum(len(items.labels) for items in part) for part in (train, test))
    return Domain([*train, *test], (np.arange(trained), np.empty(0, np.int64), trained + np.arange(tested)))


def assemble(listing: Listing, parts: Mapping[str, Parts], size: int, *, train: str, test: str) -> Source:
    """Decode what the parts use, and only that, into one store."""
    whole(f"size in {listing.name}", size, 1)
    used = {name: np.unique(np.concatenate(cuts)) for name, cuts in parts.items()}
    for name, positions in used.items():
        if len(positions) == 0:
            raise DataError(f"The domain '{name}' of '{listing.name}' has no images in '{listing.root}'.")
    with enough_memory(listing, used, size):
        images, kept = decode(listing, used, size)
    labels: list[IntArray] = []
    splits, start = {}, 0
    for name, cuts in parts.items():
        good = used[name][kept[name]]
        place = np.full(len(listing.domains[name].labels), -1)
        place[good] = start + np.arange(len(good))
        stored = [place[cut] for cut in cuts]
        splits[name] = Split(*(indices(part[part >= 0]) for part in stored))
        labels.append(listing.domains[name].labels[good])
        start += len(good)
    return Source(
        name=listing.name,
        images=torch.from_numpy(images),
        labels=torch.from_numpy(np.concatenate(labels)),
        classes=listing.classes,
        domains=splits,
        train_transform=parse_transforms(train),
        test_transform=parse_transforms(test),
    )


@contextmanager
def enough_memory(listing: Listing, used: Mapping[str, IntArray], size: int) -> Iterator[None]:
    """Refuse what does not fit into memory, before an image is decoded."""
    count = sum(len(positions) for positions in used.values())
    held, larger = count, [items for name in used for items in listing.domains[name].items if items.load]
    if larger:
        # All images of a larger file are decoded for those that are used, and these are copied to the others.
        held = 2 * count + max(len(items.labels) for items in larger)
    what = f"The {count:,} images of '{listing.name}' at {size} x {size} pixels"
    advice = "give a smaller size, or fewer images"
    room.require(held * 3 * size * size, what, advice)
    with room.needed_for(what, advice):
        yield


def decode(listing: Listing, used: Mapping[str, IntArray], size: int) -> tuple[Bytes, dict[str, IntArray]]:
    """The images at the sorted positions `used` of each domain, and which of them could be decoded.

    Image files of all domains are decoded together: what share of them may be broken is a matter of the whole.
    """
    chunks = [
        (name, items, positions[(positions >= start) & (positions < start + len(items.labels))] - start)
        for name, positions in used.items()
        for start, items in numbered(listing.domains[name].items)
    ]
    files = [items.files[i] for _, items, positions in chunks if not items.load for i in positions]
    key = [fingerprint(file.absolute()) for file in files]
    decoded, good = (
        decode_all(listing.name, key, len(files), lambda: files, lambda i: str(files[i]), size)
        if files
        else (np.empty((0, 3, size, size), np.uint8), np.empty(0, np.int64))
    )
    images: list[Bytes] = []
    kept: dict[str, list[IntArray]] = {name: [] for name in used}
    before = dict.fromkeys(used, 0)
    first = done = 0
    for name, items, positions in chunks:
        if items.load:
            chosen, own = items.load(positions, size)
        else:
            own = good[(good >= first) & (good < first + len(positions))] - first
            chosen = decoded[done : done + len(own)]
            first, done = first + len(positions), done + len(own)
        images.append(chosen)
        kept[name].append(before[name] + own)
        before[name] += len(positions)
    together = decoded if not any(items.load for _, items, _ in chunks) else np.concatenate(images)
    return together, {name: np.concatenate(own) for name, own in kept.items()}


def numbered(items: Sequence[Items]) -> Iterator[tuple[int, Items]]:
    """Each run of images with the position of its first one in the domain."""
    start = 0
    for run in items:
        yield start, run
        start += len(run.labels)


# -- items ----------------------------------------------------------------------------------------------------
def image_files(files: Sequence[Path], labels: Sequence[int] | IntArray) -> Items:
    """Images that are files of their own."""
    return Items(np.asarray(labels, np.int64), files)


def pixels(name: str, file: Path, labels: IntArray, side: int, read: Callable[[], Bytes]) -> Items:
    """Images of side x side pixels that lie as they are in one file: `read` gives all, (N, H, W) or (N, H, W, 3)."""

    def load(positions: IntArray, size: int) -> tuple[Bytes, IntArray]:
        everything = np.arange(len(positions))
        if size == side:
            return resize_all(read()[positions], size), everything
        # All of them are resized and kept, so that another subset of the file needs no more work.
        stored = cached(name, [fingerprint(file.absolute()), size], lambda: {"images": resize_all(read(), size)})
        return stored["images"][positions], everything

    return Items(labels, load=load)


# -- folders --------------------------------------------------------------------------------------------------
def visible_folders(path: Path) -> list[Path]:
    """Without hidden ones, and without what macOS puts into an archive beside its content."""
    return sorted(child for child in path.iterdir() if child.is_dir() and not is_litter(child.name))


def images_in(path: Path) -> list[Path]:
    return sorted_out(path, below=False)[0]


def sorted_out(path: Path, *, below: bool = True) -> tuple[list[Path], Counter[str]]:
    """The images right in a folder, sorted, and how many files of each kind in it, and `below` it, are not read.

    What systems leave in folders by themselves, and hidden files, are no one's data.
    """
    images: list[Path] = []
    others: Counter[str] = Counter()
    with os.scandir(path) as entries:
        for entry in entries:
            if is_litter(entry.name):
                continue
            if entry.is_dir():
                for folder, _, files in os.walk(entry.path) if below else ():
                    hidden = any(map(is_litter, Path(folder).relative_to(path).parts))
                    others.update(kind(file, misplaced=True) for file in files if not (hidden or is_litter(file)))
            elif Path(entry.name).suffix.lower() in SUFFIXES:
                images.append(path / entry.name)
            else:
                others[kind(entry.name)] += 1
    return sorted(images), others


def is_litter(name: str) -> bool:
    return name.startswith(".") or name.lower() in LITTER


def kind(file: str, *, misplaced: bool = False) -> str:
    ending = Path(file).suffix.lower()[:20]
    return f"{ending} {MISPLACED}" if misplaced and ending in SUFFIXES else ending or "without an ending"


def unread(place: str, others: Counter[str]) -> str:
    """The sentence about files that are not read: left out they may be, but not silently."""
    most = sorted(others.items(), key=lambda entry: (-entry[1], entry[0]))
    kinds = [f"{count:,} {kind}" for kind, count in most[:8]]
    if len(most) > 8:
        kinds.append(f"{sum(count for _, count in most[8:]):,} of other kinds")
    total = sum(others.values())
    wrong = any(kind.endswith(MISPLACED) for kind in others)
    advice = "put images right into the folder of their class, as PNG" if wrong else "convert images among them to PNG"
    files = f"{total:,} files of '{place}' are" if total > 1 else f"1 file of '{place}' is"
    return f"{files} not read: {', '.join(kinds)}; {advice}."


def step_into(root: Path, *names: str) -> Path:
    """The folder itself, or the one of these names inside it: archives often bring a folder of their own."""
    return next((root / name for name in names if (root / name).is_dir()), root)


def class_files(
    name: str,
    folder: Path,
    classes: Sequence[str],
    findings: Findings,
    *,
    ignored: Sequence[str] = (),
    below: str = "",
    needed: bool = True,
) -> tuple[list[Path], list[int]]:
    """The images of `folder/<class>/` and their labels; a class that is missing or empty, and a folder too many, told.

    `ignored` are folders that may be there and are not read; `below` is the folder inside a class's that has its
    images; `needed` says that every class must have some.
    """
    known = {label: number for number, label in enumerate(classes)}
    passed = set(ignored)
    files: list[Path] = []
    labels: list[int] = []
    left: Counter[str] = Counter()
    for child in visible_folders(folder):
        if child.name not in known:
            if child.name not in passed:
                findings.extra(f"The folder '{child}' is no class of {name} and is not used.")
            continue
        inside = child / below
        found, others = sorted_out(inside) if inside.is_dir() else ([], Counter())
        left += others
        files += found
        labels += [known[child.name]] * len(found)
    if left:
        findings.extra(unread(str(folder), left))
    for number in sorted(set(range(len(classes))) - set(labels)) if needed else ():
        findings.missing(
            f"The class '{classes[number]}' of {name} has no images in '{folder}': put them into a folder of that name."
        )
    return files, labels
