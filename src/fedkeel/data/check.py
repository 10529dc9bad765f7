"""Compare what is on disk with what a data set's authors publish: `fedkeel data list` and `fedkeel data check`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedkeel import spec
from fedkeel.data.dataset import Findings, Manifest, split_domain
from fedkeel.data.formats.images import ADVICE, Depth, decode, in_threads, reason
from fedkeel.data.population import USES
from fedkeel.data.reader import DATASETS, PUBLISHED, Reader, reader_of
from fedkeel.errors import DataError


@dataclass(frozen=True)
class Count:
    """One line of the comparison: a domain, what its images are for, how many there are, how many are published."""

    domain: str
    use: str
    found: int
    published: tuple[int, ...]


@dataclass(frozen=True)
class Check:
    """A data set on disk, held against what is published."""

    name: str
    root: str
    counts: Sequence[Count]
    problems: Sequence[str]
    unread: Sequence[str] = ()  # files that are none of its images

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

    reader: Reader
    check: Check | None
    found: str


def check(text: str, root: str | os.PathLike[str] | None = None, *, decode_images: bool = False) -> Check:
    """Count the data set `text` (a name, with options if it has any, such as `domainnet(classes=all)`) on disk.

    `decode_images` opens every image file too, which takes as long as reading the data set.
    """
    parsed = spec.parse(text)
    options = dict(parsed.options)
    kind = reader_of(parsed.name, own=True)
    if root is not None and "root" in options:
        raise DataError(f"The root is given twice, in '{text}' and as '{root}': keep one.")
    for option in options:
        if kind.name in PUBLISHED and option not in ("root", *kind.scan_options):
            raise DataError(f"A check of {kind.name} takes no option '{option}': give its name and its root.")
    options = DATASETS.entry(kind.name).check_options("data set", {"root": root, **options})
    reader = kind(**options)
    findings = Findings(collect=True)
    manifest = reader.scan(reader.folder(), findings)
    if kind.name not in PUBLISHED:  # what one's own images are for is decided here
        parts = reader.split(manifest.domains)
        split = {name: replace(domain, official=parts[name]) for name, domain in manifest.domains.items()}
        manifest = replace(manifest, domains=split)
    counts = compare(reader, manifest)
    problems = list(dict.fromkeys([*findings.sentences, *empty_classes(manifest)]))
    for count in counts:
        if count.published and count.found not in count.published and count.domain in manifest.domains:
            wanted = " or ".join(f"{number:,}" for number in count.published)
            what = "images" if count.use == "images" else f"images to {count.use}"
            problems.append(f"The domain '{count.domain}' has {count.found:,} {what}, and {wanted} are published.")
    if decode_images:
        problems += broken_images(manifest, Depth(reader.bits))
    return Check(reader.name, str(manifest.root), counts, problems, findings.unread)


def compare(reader: Reader, manifest: Manifest) -> list[Count]:
    counts = []
    published = reader.published_sizes()
    for name in dict.fromkeys([*published, *manifest.domains]):
        sizes, domain = published.get(name, {}), manifest.domains.get(name, split_domain((), ()))
        if domain.official is None:
            found, split = {"images": len(domain.labels)}, False
        else:
            found = dict(zip(USES, map(len, domain.official), strict=True))
            # Lists may be there that the authors' numbers are not about: then only the sum can be compared.
            split = "train" in sizes or not sizes
        for use in USES if split else ("images",):
            number = found[use] if split else sum(found.values())
            if number or use in sizes or not split:
                given = sizes.get(use, ())
                counts.append(Count(name, use, number, (given,) if isinstance(given, int) else tuple(given)))
    return counts


def empty_classes(manifest: Manifest) -> list[str]:
    present = {int(label) for domain in manifest.domains.values() for label in np.unique(domain.labels)}
    if not present:
        return ["No image of it was found."]
    missing = [name for label, name in enumerate(manifest.classes) if label not in present]
    return [f"The class '{name}' has no image in any domain." for name in missing]


def broken_images(manifest: Manifest, depth: Depth) -> list[str]:
    def attempt(file: Path) -> str:
        try:
            decode(file, 8, depth, str(file))
        except Exception as error:  # Pillow raises errors of many kinds for a broken file
            return f"The image '{file}' cannot be decoded: {reason(error)}."
        return ""

    files = [file for domain in manifest.domains.values() for run in domain.images for file in run.files]
    return [*filter(None, in_threads(attempt, files)), *depth.sentences(ADVICE)]


def standings(names: Sequence[str] = ()) -> list[Standing]:
    """Every published data set, or those named, and what $FEDKEEL_DATA has of it."""
    result = []
    for reader in [reader_of(name)() for name in names or sorted(PUBLISHED)]:
        try:
            done = check(reader.name)
            more = "" if done.complete else f": 'fedkeel data check {reader.name}' tells"
            result.append(Standing(reader, done, f"{done.root}: {done.summary()}{more}"))
        except DataError as error:
            base = os.environ.get("FEDKEEL_DATA", "")
            place = f"{' or '.join(reader.folders[:2])} in '{base}'" if base else "FEDKEEL_DATA is not set"
            there = base and any((Path(base).expanduser() / folder).exists() for folder in reader.folders)
            result.append(Standing(reader, None, str(error) if there else f"nothing ({place})"))
    return result
