"""How a data set is read: by a function that gives a `Dataset`, or, if it is published, by a `Reader`.

A reader's options are its fields; what is known before anything is on disk (where it comes from, how it must look, how
large it is) are its class attributes: a row of the table that `fedkeel data list` shows.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from fedkeel.data.dataset import TOLERATED, Dataset, Domain, Manifest, Parts, assemble
from fedkeel.data.formats.folders import class_images, tell_unread, visible_folders
from fedkeel.data.formats.images import Bits
from fedkeel.data.formats.lists import split_lists
from fedkeel.data.splits import by_shares
from fedkeel.errors import DataError, unknown
from fedkeel.options import Count, Range
from fedkeel.registry import Registry

log = logging.getLogger("fedkeel")

Root = str | os.PathLike[str] | None
Fraction = Annotated[float, Range(0, below=1)]
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
    home: ClassVar[str]
    licence: ClassVar[str]  # what its authors allow, as far as they say
    layout: ClassVar[str]  # how its folder must look, a line per file or folder
    folders: ClassVar[tuple[str, ...]]  # names under which it is looked for
    inside: ClassVar[tuple[str, ...]] = ()  # folders that its archives bring, one of which may have all in it
    class_names: ClassVar[tuple[str, ...]]  # in label order
    sizes: ClassVar[Mapping[str, int | tuple[int, ...]]] = {}  # images of each domain, of each version in use
    transforms: ClassVar[tuple[str, str]] = ("normalise", "normalise")  # the usual ones in training and in testing
    subsets: ClassVar[Mapping[str, Rule]] = {}  # what papers take of it, by the option `subset`
    listed_subsets: ClassVar[tuple[str, ...]] = ()  # those of them that are taken of FedBN's lists

    def scan(self, root: Path) -> Manifest:
        """What is there, without decoding an image; the first thing that is missing is an error."""
        raise NotImplementedError

    def split(self, domains: Mapping[str, Domain]) -> dict[str, Parts]:
        """Which images are for what."""
        subset = getattr(self, "subset", None) or ""
        if subset in self.listed_subsets and any(domain.official is None for domain in domains.values()):
            log.warning("'%s' has no lists of FedBN in 'splits': other images than FedBN's are drawn.", self.name)
        if subset in self.subsets:
            return self.subsets[subset](domains, self.split_seed)
        is_site = bool(getattr(self, "called", ""))
        return by_shares(domains, self.split_seed, validation=self.validation, test=self.test, of_all=is_site)

    def pixels(self) -> int:
        return self.size or 224

    def usual_transforms(self) -> tuple[str, str]:
        return self.transforms

    def read(self) -> Dataset:
        manifest = self.scan(self.folder())
        parts = self.split(manifest.domains)
        made = assemble(manifest, parts, self.pixels(), tolerate=self.tolerate, bits=self.bits)
        train, test = self.usual_transforms()
        return replace(made, train_transform=train, test_transform=test)

    def folder(self) -> Path:
        found = find_root(self.name, self.root, self.folders)
        if not found.is_dir():
            raise DataError(
                f"'{found}' is not a folder: give the root of {self.name}, as 'fedkeel data list {self.name}' shows it."
            )
        return next((found / name for name in self.inside if (found / name).is_dir()), found)

    def require(self, path: Path) -> Path:
        """A file or folder that must be there."""
        if not path.exists():
            raise DataError(f"'{path}' is missing: 'fedkeel data list {self.name}' shows how {self.name} must look.")
        return path


@dataclass(frozen=True)
class TreeReader(Reader):
    """Images in `root/<domain>/<class>/`, split as its lists say, those of `splits/` as a rule: see `Reader`. The
    domains are those of `sizes`."""

    validation: Fraction = 0.1
    test: Fraction = 0.2

    aliases: ClassVar[Mapping[str, str]] = {}  # other names of domains
    more_classes: ClassVar[bool] = False  # a domain may have classes that are not read

    def lists(self, root: Path, domain: str, position: Mapping[str, int]) -> Parts | None:
        """The official split, if there is one; `position` has the images by their path below the root."""
        return split_lists(root / "splits", domain, position)

    def classes_read(self, root: Path) -> Sequence[str]:
        return self.class_names

    def scan(self, root: Path) -> Manifest:
        known = {domain: domain for domain in self.sizes} | dict(self.aliases)
        found = {known[folder.name]: folder for folder in visible_folders(root) if folder.name in known}
        classes = self.classes_read(root)
        domains = {
            name: self.scan_domain(found.get(name) or self.require(root / name), name, classes) for name in self.sizes
        }
        if not self.more_classes:
            tell_unread(root, [file for domain in domains.values() for file in domain.files])
        return Manifest(self.name, root, tuple(classes), domains)

    def scan_domain(self, folder: Path, domain: str, classes: Sequence[str]) -> Domain:
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


def find_root(name: str, root: Root, folders: Sequence[str] = ()) -> Path:
    """Where a data set lies: `root` if given, else the first of `folders` that is in $FEDKEEL_DATA."""
    if root is not None:
        path = Path(root).expanduser()
        if not path.exists():
            raise DataError(f"The root '{root}' of '{name}' does not exist: give the path of the data set.")
        return path
    base = os.environ.get("FEDKEEL_DATA", "")
    for folder in folders if base else ():
        path = Path(base).expanduser() / folder
        if path.exists():
            return path
    raise DataError(
        f"'{name}' needs its data: give root=PATH, or set FEDKEEL_DATA, which is '{base}', to a folder that has "
        f"'{folders[0]}' in it."
    )


@dataclass(frozen=True)
class Standing:
    """A published data set, and what $FEDKEEL_DATA has of it: its folder, or none, and what is not as published."""

    reader: type[Reader]
    root: str | None
    problems: Sequence[str]

    @property
    def images(self) -> int:
        """That are published, of several versions in the first."""
        return sum(size if isinstance(size, int) else size[0] for size in self.reader.sizes.values())


def standing(name: str) -> Standing:
    if name not in PUBLISHED:
        raise DataError(unknown("published data set", name, PUBLISHED))
    reader = PUBLISHED[name]
    try:
        manifest = reader().scan(reader().folder())
    except DataError as error:
        return Standing(reader, None, [str(error)])
    counts = {domain: len(found.labels) for domain, found in manifest.domains.items()}
    problems = []
    for domain, size in reader.sizes.items():
        wanted = (size,) if isinstance(size, int) else size
        if counts.get(domain, 0) not in wanted:
            numbers = " or ".join(f"{number:,}" for number in wanted)
            problems.append(f"The domain '{domain}' has {counts.get(domain, 0):,} images, and {numbers} are published.")
    return Standing(reader, str(manifest.root), problems)
