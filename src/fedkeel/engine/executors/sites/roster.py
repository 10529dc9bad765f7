"""Who takes part in a federation over a network: what the sites say of themselves, and whether they fit together.

The server has no images. What it knows of a site is its `Description`. Of those that fit together is made the
`Roster`; the others sit out, each with a reason that names what differs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import fedkeel
from fedkeel.core.messages import BadMessage, is_whole, reading, shown
from fedkeel.data.federation import Federation
from fedkeel.data.outline import ClientOutline, Outline
from fedkeel.engine.executors.sites.channel import Channel, Table, largest_reply, read_reply
from fedkeel.errors import StoreError, TrainingError, quoted
from fedkeel.files import write_atomically

FILE = "sites.json"
LONGEST_NAME, MOST_CLASSES, MOST_SAMPLES = 200, 2**15, 2**40
LARGEST_IMAGE = 2**26  # numbers: 3 x 4,700 x 4,700


@dataclass(frozen=True)
class Description(ClientOutline):
    """What a site says of itself before training; `shape` is that of an image as the network sees it."""

    classes: tuple[str, ...]
    shape: tuple[int, ...]
    version: str

    @staticmethod
    def read(given: Any) -> Description:
        """From what a site sent. Models are built after it, so what nobody has raises `BadMessage` too."""
        with reading("it does not say who it is"):
            known = {entry.name: given[entry.name] for entry in fields(Description)}
            names = [known["name"], known["domain"], known["version"], *(classes := tuple(known["classes"]))]
            counts = [known["train"], known["validation"], known["test"], *(shape := tuple(known["shape"]))]
            strange = [name for name in names if not (isinstance(name, str) and name.isprintable())]
            strange += [name for name in names if not 0 < len(name) <= LONGEST_NAME]
            strange += [count for count in counts if not is_whole(count) or not 0 <= count < MOST_SAMPLES]
            if strange:
                raise BadMessage(f"it names {shown(strange[0])}, which is no name, and no number of images")
            if not 0 < len(set(classes)) == len(classes) <= MOST_CLASSES:
                raise BadMessage(f"it has {len(classes):,} classes, and not 1 to {MOST_CLASSES:,} by different names")
            if len(shape) not in (1, 3) or not 0 < math.prod(shape) <= LARGEST_IMAGE:
                raise BadMessage(f"its image shape is {shown(shape)}")
            return Description(**{**known, "classes": classes, "shape": shape})


def describe(channel: Channel, sites: Sequence[str], session: Table, timeout: float) -> dict[str, Description | str]:
    """What each site says of itself, in their order, or what is wrong with it."""
    found: dict[str, Description | str] = dict.fromkeys(sites, f"it did not reply within {timeout:g} s")
    request = {"do": "describe", "session": session}
    for name, reply in channel.exchange(dict.fromkeys(sites, request), b"", timeout):
        try:
            with read_reply(reply, largest_reply(0)) as (table, _):
                site = Description.read(table.get("description"))
            found[name] = site if site.name == name else f"it calls itself '{site.name}', and its kit is '{name}'"
        except BadMessage as bad:
            found[name] = str(bad)
    return found


@dataclass
class Roster:
    """The sites of a run, in the order of their names, and the classes they agreed on by name.

    `stored` is the shape of an image before its transform, and `transform` its text, where the server knows them;
    `starts` counts how often the server was started for this run.
    """

    run: str
    classes: tuple[str, ...]
    sites: list[Description]
    unseen: tuple[str, ...] = ()
    sitting_out: dict[str, str] = field(default_factory=dict)
    stored: tuple[int, ...] | None = None
    transform: str | None = None
    starts: int = 1

    def __getitem__(self, name: str) -> Description:
        return next(site for site in self.sites if site.name == name)

    def refuse_empty(self) -> None:
        if all(site.domain in self.unseen for site in self.sites):
            reasons = "; ".join(f"'{name}': {reason}" for name, reason in self.sitting_out.items())
            raise TrainingError(f"No site can take part ({reasons or 'none came'}): see to one and start again.")

    def outline(self) -> Federation:
        """The federation as the server sees it."""
        training = [site for site in self.sites if site.domain not in self.unseen]
        return Outline(
            name="federation",
            classes=self.classes,
            shape=self.stored or self.sites[0].shape,
            seen=self.sites[0].shape,
            train_transform=self.transform,
            test_transform=self.transform,
            clients=tuple(training),
            unseen=tuple(site for site in self.sites if site.domain in self.unseen),
            number=len(training),
        ).federation()

    def save(self, directory: Path) -> None:
        write_atomically(directory / FILE, json.dumps(asdict(self), indent=1).encode() + b"\n")

    @staticmethod
    def load(directory: Path) -> Roster | None:
        """The roster of a run that was started before, if this is one over a network."""
        path = directory / FILE
        if not path.exists():
            return None
        try:
            stored: dict[str, Any] = json.loads(path.read_bytes())
            stored["sites"] = [Description.read(site) for site in stored["sites"]]
            for name in ("classes", "unseen", "stored"):
                stored[name] = None if stored[name] is None else tuple(stored[name])
            return Roster(**stored)
        except (OSError, ValueError, TypeError, KeyError) as error:  # a `BadMessage` is a ValueError
            raise StoreError(f"'{path}' says who takes part, and cannot be read: put it back from a copy.") from error


def agree(
    run: str,
    described: Sequence[Description],
    *,
    classes: Sequence[str] | None = None,
    shape: tuple[int, ...] | None = None,
    unseen: Collection[str] = (),
) -> Roster:
    """The sites that fit together, and for each of the others why it sits out.

    `classes` and `shape` are those of the configuration. Without them, the classes are what most sites have, or of
    equally many the longest list; a site may lack some of them, but one that has others sits out.
    """
    ours, sitting_out = fedkeel.__version__, dict[str, str]()
    for site in described:
        if site.version != ours:
            sitting_out[site.name] = f"it runs fedkeel {site.version}, and the server {ours}"
        elif site.train == 0 and site.domain not in unseen:
            sitting_out[site.name] = "it has no training images"
    fitting = [site for site in described if site.name not in sitting_out]
    # Names count, not positions: where the order differs from site to site, that of the federation is alphabetical.
    given = [site.classes for site in fitting]
    given = given if len(set(given)) == 1 else [tuple(sorted(names)) for names in given]
    agreed = tuple(classes) if classes is not None else _usual(given)
    wanted = shape or _usual([site.shape for site in fitting])
    sitting_out |= {site.name: reason for site in fitting if (reason := differs(site, agreed, wanted))}
    kept = sorted((site for site in fitting if site.name not in sitting_out), key=lambda site: site.name)
    return Roster(run, agreed, kept, tuple(unseen), sitting_out)


def differs(site: Description, classes: Sequence[str], shape: Sequence[int]) -> str:
    """What of this site does not fit, or nothing."""
    known = set(classes)
    if strange := [label for label in site.classes if label not in known]:
        noun = "class" if len(strange) == 1 else "classes"
        return f"it has the {noun} {quoted(strange, 3, 'others')} that the others have not"
    if tuple(site.shape) != tuple(shape):
        ours, theirs = ("x".join(map(str, given)) for given in (shape, site.shape))
        return f"its images have the shape {theirs}, and those of the federation {ours}"
    return ""


def _usual(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The most frequent of these; of equally frequent ones the longest, of those the first."""
    counts = Counter(values)
    return max(values, key=lambda value: (counts[value], len(value)), default=())
