"""A data set: as it lies on disk, a `Domain` for each look, and as it was read, a `Dataset`, before it is cut into
clients. Of the images, `assemble` decodes those that a split uses, and only those.
"""

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeel.data.federation import Transform
from fedkeel.data.formats.dicom import MissingPackage
from fedkeel.data.formats.images import ADVICE, Depth, decode, reason
from fedkeel.data.population import IntArray, Split
from fedkeel.data.store import Bytes, Notes, stored
from fedkeel.errors import DataError, quoted

log = logging.getLogger("fedkeel")

Parts = tuple[IntArray, IntArray, IntArray]  # positions for training, validation and testing
Items = Sequence[Path] | Sequence[bytes] | Bytes  # files, what is in files, or pixels (N, H, W) or (N, H, W, 3)
TOLERATED = 0.01  # share of the images that may be broken, unless something else is said
AT_ONCE = 512  # images that are in memory while they are decoded


# -- as it lies on disk ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Images:
    """A run of images: their labels, the files that they are in (one for each, or a larger one), and how to get them
    out of these, which is only asked when they are decoded."""

    labels: IntArray
    files: Sequence[Path] = ()
    items: Callable[[], Items] = tuple


def image_files(files: Sequence[Path], labels: Sequence[int] | IntArray) -> Images:
    """Images that are files of their own."""
    return Images(np.asarray(labels, np.int64), files, lambda: files)


@dataclass(frozen=True)
class Domain:
    """One domain: its images in a fixed order, and the split that the data set comes with, if it comes with one."""

    images: Sequence[Images]
    official: Parts | None = None
    groups: npt.NDArray[Any] | None = None  # images of one group (a patient) must not be split apart

    @property
    def labels(self) -> IntArray:
        return np.concatenate([np.empty(0, np.int64), *(run.labels for run in self.images)])

    @property
    def files(self) -> list[Path]:
        """Of each image its own; none where they lie in larger ones."""
        found = [file for run in self.images for file in run.files]
        return found if len(found) == len(self.labels) else []


def split_domain(train: Sequence[Images], test: Sequence[Images], validation: Sequence[Images] = ()) -> Domain:
    """A domain whose images lie apart by what they are for."""
    sizes = [sum(len(run.labels) for run in part) for part in (train, validation, test)]
    trained, held, tested = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:2])
    return Domain([*train, *validation, *test], (trained, held, tested))


@dataclass(frozen=True)
class Manifest:
    """A data set on disk: its classes in label order and its domains, in which no image was decoded yet."""

    name: str
    root: Path
    classes: tuple[str, ...]
    domains: Mapping[str, Domain]


# -- as it was read ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Dataset:
    """Images (uint8, (N, C, H, W), or float32), labels and each domain's split, with the data set's usual transforms.
    No example: a reader returns it, and `fedkeel.data.load` makes a `Federation` of it.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    domains: Mapping[str, Split]
    train_transform: Transform | str = "normalise"
    test_transform: Transform | str = "normalise"
    on_disk: bool = False  # whether the images are mapped from a file
    bits: int | None = None  # that grey images of 16 bits use
    paths: Sequence[str] = ()  # the file that each image came from; none where they lie together in larger ones
    columns: tuple[str, ...] = ()  # the names of a vector's numbers

    def __post_init__(self) -> None:
        if not self.domains:
            raise DataError(f"'{self.name}' has no domain: give at least one.")
        for domain, split in self.domains.items():
            if len(split.all()) < sum(map(len, split)):
                raise DataError(f"In '{self.name}' an image of the domain '{domain}' is in two splits: keep it in one.")


def indices(positions: npt.NDArray[np.integer] | Sequence[int]) -> Tensor:
    """Positions as the int64 index tensor that clients hold."""
    return torch.from_numpy(np.array(positions, dtype=np.int64))


def assemble(
    raw: Manifest, parts: Mapping[str, Parts], size: int, *, tolerate: float = TOLERATED, bits: int | None = None
) -> Dataset:
    """The images of `parts` in one store."""
    used = {name: np.unique(np.concatenate(cuts)) for name, cuts in parts.items()}
    for name, positions in used.items():
        if len(positions) == 0:
            raise DataError(f"The domain '{name}' of '{raw.name}' has no images in '{raw.root}'.")
    files = [raw.domains[name].files for name in used]
    if (tolerate != TOLERATED or bits) and not all(files):
        raise DataError(f"'{raw.name}' has its images in larger files: leave out tolerate and bits.")
    paths = [files[i] for files, own in zip(files, used.values(), strict=True) for i in own] if all(files) else []
    images, broken = decode_all(raw, used, size, bits, tolerate)
    labels: list[IntArray] = []
    splits, start = {}, 0
    for name, cuts in parts.items():
        all_labels = raw.domains[name].labels
        place = np.full(len(all_labels), -1)
        place[used[name]] = start + np.arange(len(used[name]))
        place[np.isin(place, broken)] = -1
        splits[name] = Split(*(indices(found[found >= 0]) for found in (place[cut] for cut in cuts)))
        labels.append(all_labels[used[name]])
        start += len(used[name])
    with warnings.catch_warnings():  # torch's, of a file that is only read
        warnings.simplefilter("ignore", UserWarning)
        channels_first = torch.from_numpy(images).permute(0, 3, 1, 2)
    return Dataset(
        name=raw.name,
        images=channels_first,
        labels=torch.from_numpy(np.concatenate(labels)),
        classes=raw.classes,
        domains=splits,
        on_disk=isinstance(images, np.memmap),
        bits=bits,
        paths=[str(file.relative_to(raw.root) if file.is_relative_to(raw.root) else file) for file in paths],
    )


def decode_all(
    raw: Manifest, used: Mapping[str, IntArray], size: int, bits: int | None, tolerate: float
) -> tuple[Bytes, list[int]]:
    """The images at the sorted positions `used` of each domain, one after the other, and which of them are broken."""
    names, key, chosen = list[str](), list[object]([size, bits]), list[tuple[Images, IntArray]]()
    for domain, positions in used.items():
        start = 0
        for run in raw.domains[domain].images:
            own = positions[(positions >= start) & (positions < start + len(run.labels))] - start
            single = len(run.files) == len(run.labels)
            names += [str(run.files[i]) if single else f"{run.files[0]} row {i}" for i in own]
            files = [run.files[i] for i in own] if single else run.files
            key.append([*map(fingerprint, files), not single and own.tolist()])
            chosen.append((run, own))
            start += len(run.labels)

    def decoded(notes: Notes) -> Iterator[Bytes]:
        depth, broken, first = Depth(bits), list[tuple[int, str]](), 0
        for run, own in chosen:
            items = run.items()
            for some in np.array_split(own, math.ceil(len(own) / AT_ONCE)) if len(own) else ():
                images = np.zeros((len(some), size, size, 3), np.uint8)
                problems = in_threads(images, [items[i] for i in some], depth, names[first : first + len(some)])
                broken += [(first + number, problem) for number, problem in enumerate(problems) if problem]
                yield images
                first += len(some)
        notes |= {"broken": broken, "dark": depth.sentences(ADVICE)}

    images, notes = stored(raw.name, key, (len(names), size, size, 3), decoded)
    for sentence in notes["dark"]:
        log.warning("Of '%s', %s", raw.name, sentence)
    broken = {number: f"{names[number]} ({problem})" for number, problem in notes["broken"]}
    if broken:
        few = quoted([*broken.values()], 5)
        told = f"{len(broken)} of the {len(names)} images of '{raw.name}' cannot be decoded"
        if len(broken) > tolerate * len(names):
            share = math.ceil(1000 * len(broken) / len(names)) / 1000
            raise DataError(
                f"{told}: remove {few}, or give tolerate={share:g} (--tolerate {share:g}) to go on without."
            )
        log.warning("%s and are left out: %s.", told, few)
    return images, [*broken]


def in_threads(images: Bytes, items: Sequence[Any], depth: Depth, names: Sequence[str]) -> list[str]:
    """Decode the items into `images`; of each why it could not be decoded, or nothing."""

    def attempt(number: int) -> str:
        try:
            images[number] = decode(items[number], images.shape[1], depth, names[number])
        except (MemoryError, MissingPackage):
            raise
        except Exception as error:  # Pillow raises errors of many kinds for a broken file
            return reason(error)
        return ""

    # Pillow decodes outside of the interpreter lock. It warns of large images without saying of which file.
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        return list(pool.map(attempt, range(len(items))))


def fingerprint(file: Path) -> list[object]:
    """What identifies a file's content without reading it."""
    file = file.absolute()
    try:
        about = file.stat()
    except OSError:  # a link to nowhere is an image that cannot be decoded, no error here
        return [str(file), None, None]
    # The last one nobody can set: an image that was replaced by one of the same size and date is another.
    return [str(file), about.st_size, about.st_mtime_ns, about.st_ctime_ns]
