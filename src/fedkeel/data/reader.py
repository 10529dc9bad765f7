"""What is known about a data set before it is on disk: where it comes from, how it must look, how large it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkeel.data.listing import Findings, Listing
from fedkeel.errors import DataError, unknown

Sizes = Mapping[str, Mapping[str, int | tuple[int, ...]]]


@dataclass(frozen=True)
class Published:
    """A data set as its authors publish it.

    Attributes:
        name: as in `fedkeel.data.load(name)`.
        what: one sentence.
        home: the address of its home page.
        licence: what its authors allow, as far as they say.
        layout: how its folder must look, a line per file or folder.
        folders: names under which it is looked for in $FEDKEEL_DATA.
        classes: how many.
        sizes: of each domain by what they are for, `train` and `test`, or `images` in all where the authors give no
            split; both where lists may or may not be there; several numbers where several versions are in use.
        scan: makes the listing of a root.
    """

    name: str
    what: str
    home: str
    licence: str
    layout: str
    folders: tuple[str, ...]
    classes: int
    sizes: Sizes
    scan: Callable[..., Listing]

    def total(self) -> int:
        """Images in all; of several versions, those of the first."""
        first = {
            domain: {use: count if isinstance(count, int) else count[0] for use, count in uses.items()}
            for domain, uses in self.sizes.items()
        }
        return sum(uses.get("images", sum(uses.values())) for uses in first.values())


PUBLISHED: dict[str, Published] = {}


def publish(entry: Published) -> Published:
    PUBLISHED[entry.name] = entry
    return entry


def published(name: str) -> Published:
    if name not in PUBLISHED:
        raise DataError(unknown("published data set", name, PUBLISHED))
    return PUBLISHED[name]


def scanned(entry: Published, root: Path, **options: Any) -> Listing:
    """The listing for a reader: what is missing is an error."""
    if not root.is_dir():
        raise DataError(
            f"'{root}' is not a folder: give the root of {entry.name}, as 'fedkeel data list {entry.name}' shows it."
        )
    return entry.scan(root, Findings(), **options)
