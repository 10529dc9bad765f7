"""Compare what is on disk with what a data set's authors publish: `fedkeel data list` and `fedkeel data check`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedkeel import spec
from fedkeel.data.dataset import Manifest, split_domain
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

    @property
    def problem(self) -> str:
        if not self.published or self.found in self.published:
            return ""
        wanted = " or ".join(f"{number:,}" for number in self.published)
        what = "images" if self.use == "images" else f"images to {self.use}"
        return f"The domain '{self.domain}' has {self.found:,} {what}, and {wanted} are published."


@dataclass(frozen=True)
class Check:
    """A data set on disk, held against what is published."""

    name: str
    root: str
    counts: Sequence[Count]

    @property
    def images(self) -> int:
        return sum(count.found for count in self.counts)

    @property
    def problems(self) -> list[str]:
        return [count.problem for count in self.counts if count.problem]

    @property
    def complete(self) -> bool:
        return not self.problems

    def summary(self) -> str:
        return f"{self.images:,} images, {'as published' if self.complete else 'not as many as published'}"


@dataclass(frozen=True)
class Standing:
    """A published data set, and what was found of it."""

    reader: Reader
    check: Check | None
    found: str


def check(text: str, root: str | os.PathLike[str] | None = None) -> Check:
    """Count the data set `text` (a name, with options if it has any, such as `domainnet(classes=all)`) on disk. The
    first thing that is missing is an error."""
    parsed = spec.parse(text)
    if root is not None and "root" in parsed.options:
        raise DataError(f"The root is given twice, in '{text}' and as '{root}': keep one.")
    kind = DATASETS.entry(parsed.name).build
    if not (isinstance(kind, type) and issubclass(kind, Reader)):
        raise DataError(f"'{parsed.name}' is made by a function and has nothing to count: give a published data set.")
    for option in parsed.options:
        if kind.name in PUBLISHED and option not in ("root", *kind.scan_options):
            raise DataError(f"A check of {kind.name} takes no option '{option}': give its name and its root.")
    given = {"root": root} if root is not None else {}
    reader = kind(**DATASETS.entry(kind.name).check_options("data set", {**given, **parsed.options}))
    manifest = reader.scan(reader.folder())
    if kind.name not in PUBLISHED:  # what one's own images are for is decided here
        parts = reader.split(manifest.domains)
        split = {name: replace(domain, official=parts[name]) for name, domain in manifest.domains.items()}
        manifest = replace(manifest, domains=split)
    return Check(reader.name, str(manifest.root), compare(reader, manifest))


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
