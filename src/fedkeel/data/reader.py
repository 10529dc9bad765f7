"""How a data set is read: by a function that gives a `Dataset`, or, if it is published, by a `Reader`.

A reader's options are its fields; what is known before anything is on disk (where it comes from, how it must look, how
large it is) are its class attributes: a row of the table that `fedkeel data list` shows and `fedkeel data check` counts
by.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from fedkeel.data.dataset import TOLERATED, Dataset, Domain, Manifest, Parts, assemble
from fedkeel.data.formats.folders import class_images, step_into, tell_strange_folders, visible_folders
from fedkeel.data.formats.images import Bits
from fedkeel.data.formats.lists import read_lists
from fedkeel.data.splits import by_shares
from fedkeel.errors import DataError, unknown
from fedkeel.options import Count, Range
from fedkeel.registry import Registry

log = logging.getLogger("fedkeel")

Root = str | os.PathLike[str] | None
Fraction = Annotated[float, Range(0, below=1)]
Sizes = Mapping[str, Mapping[str, int | tuple[int, ...]]]
Rule = Callable[[Mapping[str, Domain], int], dict[str, Parts]]
FEDBN = ("flip+rotation(degrees=30)", "")  # FedBN's transforms: nothing is normalised


@dataclass(frozen=True)
class Reader:
    """A data set as its authors publish it. No example: it reads files, see "Add a data set" in Contributing."""

    root: Root = None  # by default one of `folders` in $FEDKEEL_DATA
    size: Count | None = None  # pixels of a side
    validation: Fraction = 0.0  # share of the images, or of the official training set where there is one
    split_seed: int = 0
    tolerate: Fraction = TOLERATED  # share of the image files that may be broken; they are left out
    bits: Bits | None = None  # that 16-bit grey images use, such as 12; by default all, and dark ones are told

    test = 0.0  # share of the images; an option of those that have no test set of their own

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    what: ClassVar[str]  # one sentence
    home: ClassVar[str]
    licence: ClassVar[str]  # what its authors allow, as far as they say
    layout: ClassVar[str]  # how its folder must look, a line per file or folder
    folders: ClassVar[tuple[str, ...]]  # names under which it is looked for
    inside: ClassVar[tuple[str, ...]] = ()  # folders that its archives bring, one of which may have all in it
    class_names: ClassVar[tuple[str, ...]]  # in label order
    # Of each domain its number of images, or numbers by what they are for: `train` and `test`, and `images` too where
    # lists may or may not be there; several numbers where several versions are in use.
    sizes: ClassVar[Mapping[str, int | Mapping[str, int | tuple[int, ...]]]] = {}
    transforms: ClassVar[tuple[str, str]] = ("normalise", "normalise")  # the usual ones in training and in testing
    subsets: ClassVar[Mapping[str, Rule]] = {}  # what papers take of it, by the option `subset`
    listed_subsets: ClassVar[tuple[str, ...]] = ()  # those of them that are taken of FedBN's lists
    scan_options: ClassVar[tuple[str, ...]] = ()  # those that change what a check counts

    def scan(self, root: Path) -> Manifest:
        """What is there, without decoding an image; the first thing that is missing is an error."""
        raise NotImplementedError

    def split(self, domains: Mapping[str, Domain]) -> dict[str, Parts]:
        """Which images are for what."""
        subset = getattr(self, "subset", None) or ""
        if subset in self.listed_subsets and any(domain.official is None for domain in domains.values()):
            log.warning(
                "FedBN's lists are not in the folder 'splits' of '%s': subsets of the published sizes are drawn by "
                "split_seed, of other images than FedBN's.",
                self.name,
            )
        if subset in self.subsets:
            return self.subsets[subset](domains, self.split_seed)
        return by_shares(domains, self.split_seed, validation=self.validation, test=self.test)

    def pixels(self) -> int:
        return self.size or 224

    def usual_transforms(self) -> tuple[str, str]:
        return self.transforms

    def read(self) -> Dataset:
        manifest = self.scan(self.folder())
        parts, size, transforms = self.split(manifest.domains), self.pixels(), self.usual_transforms()
        return assemble(manifest, parts, size, transforms, tolerate=self.tolerate, bits=self.bits)

    def folder(self) -> Path:
        found = find_root(self.name, self.root, self.folders)
        if not found.is_dir():
            raise DataError(
                f"'{found}' is not a folder: give the root of {self.name}, as 'fedkeel data list {self.name}' shows it."
            )
        return step_into(found, *self.inside)

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def published_sizes(self) -> Sizes:
        return {domain: {"images": uses} if isinstance(uses, int) else uses for domain, uses in self.sizes.items()}

    def total(self) -> int:
        """Images in all; of several versions, those of the first."""
        counts = [
            {use: count if isinstance(count, int) else count[0] for use, count in uses.items()}
            for uses in self.published_sizes().values()
        ]
        return sum(uses.get("images", sum(uses.values())) for uses in counts)


@dataclass(frozen=True)
class TreeReader(Reader):
    """Images in `root/<domain>/<class>/`, split as its lists say, those of `splits/` as a rule: see `Reader`."""

    validation: Fraction = 0.1
    test: Fraction = 0.2

    domains: ClassVar[tuple[str, ...]]  # their folders
    aliases: ClassVar[Mapping[str, str]] = {}  # other names for these
    beside: ClassVar[tuple[str, ...]] = ()  # folders that may lie next to them
    more_classes: ClassVar[bool] = False  # a domain may have classes that are not read

    def lists(self, root: Path, domain: str, position: Mapping[str, int]) -> Parts | None:
        """The official split, if there is one; `position` has the images by their path below the root."""
        return read_lists(root / "splits", domain, position)

    def classes_read(self, root: Path) -> Sequence[str]:
        return self.class_names

    def scan(self, root: Path) -> Manifest:
        known = {domain: domain for domain in self.domains} | dict(self.aliases)
        found = {known[folder.name]: folder for folder in visible_folders(root) if folder.name in known}
        tell_strange_folders(root, [*known, "splits", *self.beside], f"domain of {self.name}")
        for domain in self.domains:
            if domain not in found:
                raise DataError(
                    f"The domain '{domain}' of {self.name} is missing in '{root}', which needs the folders "
                    f"{', '.join(self.domains)}: add it, or read other trees with folder(root=PATH)."
                )
        classes = self.classes_read(root)
        listed = {domain: self.scan_domain(found[domain], domain, classes) for domain in self.domains}
        return Manifest(self.name, root, tuple(classes), listed)

    def scan_domain(self, folder: Path, domain: str, classes: Sequence[str]) -> Domain:
        if not self.more_classes:
            tell_strange_folders(folder, classes, f"class of {self.name}")
        images = class_images(self.name, folder, classes)
        position = {file.relative_to(folder.parent).as_posix(): number for number, file in enumerate(images.files)}
        return Domain([images], self.lists(folder.parent, domain, position))


class Datasets(Registry[Dataset]):
    """Data sets by name: functions that give a `Dataset`, and readers, which are asked to read."""

    def build(self, name: str, *args: Any, **options: Any) -> Dataset:
        made: Dataset | Reader = super().build(name, *args, **options)
        return made.read() if isinstance(made, Reader) else made

    def refuse_missing(self, name: str, **options: Any) -> None:
        """An error where a published data set is not there, or not all of it; no image is decoded for that."""
        made: Dataset | Reader = super().build(name, **options)
        if isinstance(made, Reader):
            made.split(made.scan(made.folder()).domains)


DATASETS = Datasets("data set", "data")
"""The data sets by name."""
PUBLISHED: dict[str, type[Reader]] = {}
R = TypeVar("R", bound=type[Reader])


def published(reader: R) -> R:
    """Class decorator: make a reader known by its name; see `Reader`."""
    PUBLISHED[reader.name] = reader
    return DATASETS.register(reader.name)(reader)


def reader_of(name: str) -> type[Reader]:
    """Of a published data set."""
    if name not in PUBLISHED:
        raise DataError(unknown("published data set", name, PUBLISHED))
    return PUBLISHED[name]


def find_root(name: str, root: Root, folders: Sequence[str] = ()) -> Path:
    """Where a data set lies: `root` if given, else the first of `folders` that is in $FEDKEEL_DATA."""
    if root is not None:
        path = Path(root).expanduser()
        if not path.exists():
            raise DataError(f"The root '{root}' of '{name}' does not exist: give the path of the data set.")
        return path
    base = os.environ.get("FEDKEEL_DATA", "")
    if not base:
        raise DataError(
            f"'{name}' needs its data: give root=PATH, or set FEDKEEL_DATA to the folder that has '{folders[0]}' in it."
        )
    for folder in folders:
        path = Path(base).expanduser() / folder
        if path.exists():
            return path
    looked = " or ".join(f"'{folder}'" for folder in folders)
    raise DataError(f"FEDKEEL_DATA is '{base}', and there is no {looked} in it: give root=PATH or put the data there.")
