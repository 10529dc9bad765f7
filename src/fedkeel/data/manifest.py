"""What a data set has on disk, before an image is decoded: a manifest, which readers and `fedkeel data check` share.

A reader's `scan(root, findings)` makes it. Where something is missing it tells the `Findings`: reading stops there with
that sentence, and the check goes on and shows all of them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedkeel.data.formats.images import Bytes, resize_all
from fedkeel.data.formats.npz import cached, fingerprint
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

Parts = tuple[IntArray, IntArray, IntArray]  # positions for training, validation and testing


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
        stored = cached(name, [fingerprint(file.absolute()), size], lambda: {"images": resize_all(read(), size)})
        return stored["images"][positions], everything

    return Images(labels, load=load)


@dataclass(frozen=True)
class Domain:
    """One domain: its images in a fixed order, and the split that the data set comes with, if it comes with one."""

    images: Sequence[Images]
    official: Parts | None = None
    groups: IntArray | None = None  # images of one group (a lesion) must not be split apart

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
