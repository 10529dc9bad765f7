"""Compare what is on disk with what a data set's authors publish: `fedkeel data list` and `fedkeel data check`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedkeel import spec
from fedkeel.data.formats.images import decode, reason, without_warnings
from fedkeel.data.listing import Findings, Listing
from fedkeel.data.published import PUBLISHED, Published, published
from fedkeel.data.readers.domainnet import ALL_SIZES
from fedkeel.data.source import find_root
from fedkeel.errors import DataError


@dataclass(frozen=True)
class Count:
    """One line of the comparison: a domain, what its images are for, how many there are, how many are published."""

    domain: str
    use: str
    found: int
    published: tuple[int, ...]

    @property
    def agrees(self) -> bool:
        return not self.published or self.found in self.published


@dataclass(frozen=True)
class Check:
    """A data set on disk, held against what is published."""

    name: str
    root: str
    counts: Sequence[Count]
    problems: Sequence[str]

    @property
    def images(self) -> int:
        return sum(count.found for count in self.counts)

    @property
    def complete(self) -> bool:
        return not self.problems

    def summary(self) -> str:
        if self.complete:
            return f"{self.images:,} images, as published"
        return f"{self.images:,} images, {len(self.problems)} finding{'s' if len(self.problems) > 1 else ''}"


@dataclass(frozen=True)
class Standing:
    """A published data set, and what was found of it."""

    entry: Published
    check: Check | None
    found: str


def check(text: str, root: str | os.PathLike[str] | None = None, *, decode_images: bool = False) -> Check:
    """Count the data set `text` (a name, with options if it has any, such as `domainnet(classes=all)`) on disk.

    `decode_images` opens every image file too, which takes as long as reading the data set.
    """
    parsed = spec.parse(text)
    options = dict(parsed.options)
    entry = as_asked(published(parsed.name), options)
    if "root" in options:
        if root is not None:
            raise DataError(f"The root is given twice, in '{text}' and as '{root}': keep one.")
        root = str(options.pop("root"))
    folder = find_root(entry.name, root, entry.folders)
    findings = Findings(collect=True)
    if not folder.is_dir():
        raise DataError(f"'{folder}' is not a folder: give the root of {entry.name}.")
    taken = list(inspect.signature(entry.scan).parameters)[2:]
    for option in options:
        if option not in taken:
            raise DataError(f"A check of {entry.name} takes no option '{option}': give its name and its root.")
    listing = entry.scan(folder, findings, **options)
    counts = compare(entry, listing)
    problems = list(dict.fromkeys([*findings.sentences, *empty_classes(listing)]))
    for count in counts:
        if not count.agrees and count.domain in listing.domains:
            wanted = " or ".join(f"{number:,}" for number in count.published)
            what = "images" if count.use == "images" else f"images to {count.use}"
            problems.append(f"The domain '{count.domain}' has {count.found:,} {what}, and {wanted} are published.")
    if decode_images:
        problems += broken_images(listing)
    return Check(entry.name, str(listing.root), counts, problems)


def as_asked(entry: Published, options: dict[str, object]) -> Published:
    """The published sizes of the classes that are asked for."""
    classes = options.get("classes", "fedbn")
    if entry.name != "domainnet" or classes == "fedbn":
        return entry
    return replace(entry, sizes=ALL_SIZES if classes == "all" else {}, classes=345 if classes == "all" else 0)


def compare(entry: Published, listing: Listing) -> list[Count]:
    counts = []
    found = listing.counts()
    for domain in dict.fromkeys([*entry.sizes, *found]):
        sizes, own = entry.sizes.get(domain, {}), found.get(domain, {})
        # Lists may be there that the authors' numbers are not about: then only the sum can be compared.
        split = "images" not in own and ("train" in sizes or not sizes)
        for use in ("train", "validation", "test") if split else ("images",):
            if use in own or use in sizes or use == "images":
                given = sizes.get(use, ())
                number = sum(own.values()) if use == "images" else own.get(use, 0)
                counts.append(Count(domain, use, number, (given,) if isinstance(given, int) else tuple(given)))
    return counts


def empty_classes(listing: Listing) -> list[str]:
    """A sentence for each class without an image in the whole data set."""
    labels = [domain.labels for domain in listing.domains.values()]
    present = set(np.unique(np.concatenate(labels)).tolist()) if labels else set()
    if not present:
        return ["No image of it was found."]
    missing = [name for label, name in enumerate(listing.classes) if label not in present]
    return [f"The class '{name}' has no image in any domain." for name in missing]


def broken_images(listing: Listing) -> list[str]:
    """A sentence for each image file that cannot be decoded."""

    def attempt(file: Path) -> str:
        try:
            decode(file, 8)
        except Exception as error:  # Pillow raises errors of many kinds for a broken file
            return f"The image '{file}' cannot be decoded: {reason(error)}."
        return ""

    files = [file for domain in listing.domains.values() for items in domain.items for file in items.files]
    with without_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [sentence for sentence in pool.map(attempt, files) if sentence]


def standings(names: Sequence[str] = ()) -> list[Standing]:
    """Every published data set, or those named, and what $FEDKEEL_DATA has of it."""
    chosen = [published(name) for name in names] if names else [PUBLISHED[name] for name in sorted(PUBLISHED)]
    result = []
    for entry in chosen:
        try:
            done = check(entry.name)
            more = "" if done.complete else f": 'fedkeel data check {entry.name}' tells"
            result.append(Standing(entry, done, f"{done.root}: {done.summary()}{more}"))
        except DataError as error:
            base = os.environ.get("FEDKEEL_DATA", "")
            place = f"{' or '.join(entry.folders[:2])} in '{base}'" if base else "FEDKEEL_DATA is not set"
            known = any((Path(base).expanduser() / folder).exists() for folder in entry.folders) if base else False
            result.append(Standing(entry, None, str(error) if known else f"nothing ({place})"))
    return result
