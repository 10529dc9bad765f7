"""A data set: as it lies on disk, a `Manifest`, and as it was read, a `Dataset`, before it is cut into clients.

A reader's `scan(root, findings)` makes the manifest, without decoding an image; `fedkeel data check` counts by it.
Where something is missing the scan tells the `Findings`: reading stops there with that sentence, and the check goes on
and shows all of them. Of the images, `assemble` decodes those that a split uses, and only those.
"""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeel.data import memory
from fedkeel.data.federation import Transform
from fedkeel.data.formats.cache import Bytes, NoRoom, cache_folder, stored
from fedkeel.data.formats.images import TOLERATED, Encoded, decode_all, resize_all
from fedkeel.data.formats.npz import fingerprint
from fedkeel.data.population import IntArray, Split
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

Parts = tuple[IntArray, IntArray, IntArray]  # positions for training, validation and testing
Keep = Literal["auto", "memory", "disk"]  # where decoded images stay; auto: on disk above MOST_MEMORY
MOST_MEMORY = 0.5  # of what is free: training may need a copy of the images in another layout


class Findings:
    """What a scan finds wrong. A reader stops at what is missing; a check (`collect=True`) goes on and keeps all."""

    def __init__(self, *, collect: bool = False) -> None:
        self.collect = collect
        self.sentences: list[str] = []
        self.unread: list[str] = []  # files

    def missing(self, sentence: str) -> None:
        """Something without which the data set is not what it is called."""
        if not self.collect:
            raise DataError(sentence)
        self.sentences.append(sentence)

    def extra(self, sentence: str, files: Iterable[str] = ()) -> None:
        """Something that does no harm and is not used, such as these files."""
        if not self.collect:
            log.warning(sentence)
        self.sentences.append(sentence)
        self.unread += files

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part that may be broken while the rest can still be looked at."""
        try:
            yield
        except DataError as error:
            self.missing(str(error))


@dataclass(frozen=True)
class Images:
    """A run of images: their labels, and either the image files, or how to get some of them out of one larger file.

    `load(positions, size)` gives the images (n, 3, size, size) of those that could be decoded, and which ones of
    `positions` these are.
    """

    labels: IntArray
    files: Sequence[Path] = ()
    load: Callable[[IntArray, int], tuple[Bytes, IntArray]] | None = None


def image_files(files: Sequence[Path], labels: Sequence[int] | IntArray) -> Images:
    """Images that are files of their own."""
    return Images(np.asarray(labels, np.int64), files)


def pixels(name: str, file: Path, labels: IntArray, side: int, read: Callable[[], Bytes]) -> Images:
    """Images of side x side pixels that lie as they are in one file: `read` gives all, (N, H, W) or (N, H, W, 3)."""

    def load(positions: IntArray, size: int) -> tuple[Bytes, IntArray]:
        everything = np.arange(len(positions))
        if size == side:
            return resize_all(read()[positions], size), everything

        # All of them are resized and kept, so that another subset of the file needs no more work.
        def build(images: Bytes) -> tuple[IntArray, list[str]]:
            resize_all(read(), size, images)
            return np.arange(len(labels)), []

        key, shape = [fingerprint(file.absolute()), size], (len(labels), 3, size, size)
        return stored(name, key, shape, build, about=str(file), on_disk=False).images[positions], everything

    return Images(labels, load=load)


@dataclass(frozen=True)
class Domain:
    """One domain: its images in a fixed order, and the split that the data set comes with, if it comes with one."""

    images: Sequence[Images]
    official: Parts | None = None
    groups: npt.NDArray[Any] | None = None  # images of one group (a patient) must not be split apart

    @property
    def labels(self) -> IntArray:
        return np.concatenate([np.empty(0, np.int64), *(run.labels for run in self.images)])


def split_domain(train: Sequence[Images], test: Sequence[Images], validation: Sequence[Images] = ()) -> Domain:
    """A domain whose images lie apart by what they are for."""
    sizes = [sum(len(run.labels) for run in part) for part in (train, validation, test)]
    trained, held, tested = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:2])
    return Domain([*train, *validation, *test], (trained, held, tested))


@dataclass(frozen=True)
class Manifest:
    """A data set on disk: its classes in label order and its domains."""

    name: str
    root: Path
    classes: tuple[str, ...]
    domains: Mapping[str, Domain] = field(default_factory=dict)


# -- as it was read -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Dataset:
    """Images (uint8, (N, C, H, W)), labels and each domain's split, with the data set's usual transforms. No example: a
    reader returns it, and `fedkeel.data.load` makes a `Federation` of it.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    domains: Mapping[str, Split]
    train_transform: Transform | str = "normalise"
    test_transform: Transform | str = "normalise"
    users: npt.NDArray[Any] | None = None  # whose each image is, whole numbers or text; for the partition by-user
    on_disk: bool = False  # whether the images are mapped from a file
    bits: int | None = None  # that grey images of 16 bits use
    paths: Sequence[str] = ()  # the file that each image came from; none where they lie together in larger ones

    def __post_init__(self) -> None:
        if not self.domains:
            raise DataError(f"'{self.name}' has no domain: give at least one.")
        if self.users is not None and len(self.users) != len(self.images):
            raise DataError(f"'{self.name}' has {len(self.images)} images, but users of {len(self.users)}.")
        for domain, split in self.domains.items():
            if len(split.all()) < sum(map(len, split)):
                raise DataError(
                    f"In '{self.name}' an image of the domain '{domain}' is in two of train, validation and test: "
                    "keep it in one."
                )


def indices(positions: npt.NDArray[np.integer] | Sequence[int]) -> Tensor:
    """Positions as the int64 index tensor that clients hold."""
    return torch.from_numpy(np.array(positions, dtype=np.int64))


def assemble(
    manifest: Manifest,
    parts: Mapping[str, Parts],
    size: int,
    transforms: tuple[str, str],
    *,
    keep: Keep = "auto",
    tolerate: float = TOLERATED,
    bits: int | None = None,
) -> Dataset:
    """The images of `parts` in one store; the usual `transforms` are for training and testing."""
    used = {name: np.unique(np.concatenate(cuts)) for name, cuts in parts.items()}
    for name, positions in used.items():
        if len(positions) == 0:
            raise DataError(f"The domain '{name}' of '{manifest.name}' has no images in '{manifest.root}'.")
    images, kept = decode(manifest, used, size, keep, tolerate=tolerate, bits=bits)
    on_disk = isinstance(images, np.memmap)
    paths = [path for name in parts for path in paths_of(manifest, name, kept[name])]
    labels: list[IntArray] = []
    splits, start = {}, 0
    for name, cuts in parts.items():
        all_labels = manifest.domains[name].labels
        place = np.full(len(all_labels), -1)
        place[kept[name]] = start + np.arange(len(kept[name]))
        splits[name] = Split(*(indices(stored[stored >= 0]) for stored in (place[cut] for cut in cuts)))
        labels.append(all_labels[kept[name]])
        start += len(kept[name])
    return Dataset(
        name=manifest.name,
        images=mapped(images) if on_disk else torch.from_numpy(images),
        labels=torch.from_numpy(np.concatenate(labels)),
        classes=manifest.classes,
        domains=splits,
        train_transform=transforms[0],
        test_transform=transforms[1],
        on_disk=on_disk,
        bits=bits,
        paths=paths if len(paths) == len(images) else (),
    )


def paths_of(manifest: Manifest, domain: str, positions: IntArray) -> list[str]:
    """Of these images, from the data set's folder on."""
    files = [file for run in manifest.domains[domain].images for file in run.files]
    within = len(str(manifest.root)) + 1
    chosen = [files[i] for i in positions] if len(files) == len(manifest.domains[domain].labels) else []
    return [str(file)[within:] if file.is_relative_to(manifest.root) else str(file) for file in chosen]


def mapped(images: Bytes) -> Tensor:
    """A tensor of a file that is only read, which PyTorch would warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(images)


def decode(
    manifest: Manifest, used: Mapping[str, IntArray], size: int, keep: Keep, *, tolerate: float, bits: int | None
) -> tuple[Bytes, dict[str, IntArray]]:
    """The images at the sorted positions `used` of each domain, and the positions of those that could be decoded.

    They are held in memory, or mapped from the cache, as `keep` and the free memory say.
    """
    larger = [len(run.labels) for name in used for run in manifest.domains[name].images if run.load]
    if larger and (keep == "disk" or tolerate != TOLERATED or bits):
        option = "keep=disk" if keep == "disk" else f"bits={bits}" if bits else f"tolerate={tolerate:g}"
        raise DataError(
            f"{option} is for image files, and '{manifest.name}' has its images in larger ones: leave it out."
        )
    count = sum(map(len, used.values()))
    # All images of a larger file are decoded for those that are used, and these are copied to the others.
    held = 2 * count + max(larger) if larger else count
    what = f"The {count:,} images of '{manifest.name}' at {size} x {size} pixels"
    needed, free = held * 3 * size * size, memory.available()
    beyond = keep == "auto" and not larger and free is not None and needed > MOST_MEMORY * free
    if keep == "disk" or beyond:
        try:
            found = decode_files(manifest, used, size, tolerate=tolerate, bits=bits, on_disk=True)
            if beyond:
                log.warning(
                    "%s take %s, and %s of memory are free: they stay on disk, in '%s', which is slower (keep=disk "
                    "says no more of it).",
                    *(what, memory.size(needed), memory.size(free or 0), cache_folder()),
                )
            return found
        except NoRoom as error:
            fits = free is None or needed <= free
            if keep == "disk" or not fits:
                there = "" if fits else f"{memory.size(free or 0)} of memory are free, and "
                advice = "give keep=memory" if fits else smaller(held, max(free or 0, error.room))
                raise DataError(f"{what} need {memory.size(needed)}: {there}{error}; {advice}.") from error
    advice = smaller(held, free or 0) + ("" if larger else ", or keep=disk")
    with memory.holding(needed, what, advice):
        return decode_files(manifest, used, size, tolerate=tolerate, bits=bits, on_disk=False)


def smaller(count: int, room: int) -> str:
    """What to do about images that have no room: the size of which so many would."""
    side = math.isqrt(room // (3 * count))
    return f"give size={side} or a smaller size, or fewer images" if side else "give a smaller size, or fewer images"


def decode_files(
    manifest: Manifest, used: Mapping[str, IntArray], size: int, **options: Any
) -> tuple[Bytes, dict[str, IntArray]]:
    """Image files of all domains are decoded together: what share of them may be broken is a matter of the whole."""
    runs = []  # (domain, position of its first image, images, which of them are used)
    for name, positions in used.items():
        start = 0
        for run in manifest.domains[name].images:
            stop = start + len(run.labels)
            runs.append((name, start, run, positions[(positions >= start) & (positions < stop)] - start))
            start = stop
    files = [run.files[i] for *_, run, wanted in runs if not run.load for i in wanted]
    if files:
        key = [fingerprint(file.absolute()) for file in files]
        source = Encoded(
            manifest.name, str(manifest.root.absolute()), key, len(files), lambda: files, lambda i: str(files[i])
        )
        decoded, good = decode_all(source, size, **options)
    else:
        decoded, good = np.empty((0, 3, size, size), np.uint8), np.empty(0, np.int64)
    images: list[Bytes] = []
    kept: dict[str, list[IntArray]] = {name: [] for name in used}
    first = 0  # file of the run
    for name, start, run, wanted in runs:
        if run.load:
            own, found = run.load(wanted, size)
        else:
            low, high = np.searchsorted(good, [first, first + len(wanted)])
            own, found = decoded[low:high], good[low:high] - first
            first += len(wanted)
        images.append(own)
        kept[name].append(start + wanted[found])
    # Files alone are one array already: a second copy may not fit.
    together = np.concatenate(images) if any(run.load for _, _, run, _ in runs) else decoded
    return together, {name: np.concatenate(own) for name, own in kept.items()}
