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
from fedkeel.core.messages import BadMessage, is_whole, shown
from fedkeel.data.federation import Federation
from fedkeel.data.outline import ClientOutline, Outline
from fedkeel.engine.executors.sites.channel import AWAY, Channel, Table, largest_reply, read_reply
from fedkeel.errors import StoreError, TrainingError, quoted
from fedkeel.files import write_atomically

FILE = "sites.json"
LONGEST_NAME, MOST_CLASSES, MOST_SAMPLES = 200, 2**15, 2**40
LARGEST_IMAGE = 2**26  # numbers: 3 x 4,700 x 4,700
LISTED = 10  # classes, where a sentence names them


@dataclass(frozen=True)
class Description:
    """What a site says of itself before training.

    `shape` is that of an image as the network sees it. `position` orders the clients of a simulation as a run on one
    machine does; sites of a real federation have none and go by name.
    """

    name: str
    domain: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    train: int
    validation: int
    test: int
    version: str
    position: int | None = None

    @staticmethod
    def read(given: object) -> Description:
        """From what a site sent. Models are built after it, so what nobody has raises `BadMessage` too."""
        if not isinstance(given, dict):
            raise BadMessage("it does not say who it is")
        for key in ("name", "domain", "version"):
            if not _is_name(given.get(key)):
                raise BadMessage(f"its {key} is not a line of text")
        for key in ("train", "validation", "test"):
            if not _is_count(given.get(key)):
                raise BadMessage(f"its number of {key} samples is {shown(given.get(key))}")
        classes, shape, position = given.get("classes"), given.get("shape"), given.get("position")
        if not isinstance(classes, list) or not 0 < len(classes) <= MOST_CLASSES:
            raise BadMessage(f"its classes are {shown(classes)}, and not a list of 1 to {MOST_CLASSES:,} names")
        if not all(_is_name(label) for label in classes) or len(set(classes)) < len(classes):
            raise BadMessage("its classes are not all names, or are named twice")
        if not isinstance(shape, list) or len(shape) not in (1, 3) or not all(is_whole(n) and n > 0 for n in shape):
            raise BadMessage(f"its image shape is {shown(shape)}")
        if math.prod(shape) > LARGEST_IMAGE:
            raise BadMessage(f"its image shape is {shown(shape)}, more than {LARGEST_IMAGE:,} numbers")
        if position is not None and not _is_count(position):
            raise BadMessage(f"its position is {shown(position)}")
        known: dict[str, Any] = {entry.name: given.get(entry.name) for entry in fields(Description)}
        return Description(**{**known, "classes": tuple(classes), "shape": tuple(shape)})


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def _is_count(value: object) -> bool:
    return is_whole(value) and 0 <= value < MOST_SAMPLES  # type: ignore[operator]


def describe(channel: Channel, sites: Sequence[str], session: Table, timeout: float) -> dict[str, Description | str]:
    """What each site says of itself, in their order, or what is wrong with it."""
    found: dict[str, Description | str] = dict.fromkeys(sites, f"it did not reply within {timeout:g} s")
    request = {"do": "describe", "session": session}
    for name, reply in channel.exchange(dict.fromkeys(sites, request), b"", timeout):
        try:
            site = read_reply(reply, lambda table, _: Description.read(table.get("description")), largest_reply(0))
            found[name] = site if site.name == name else f"it calls itself '{site.name}', and its kit is '{name}'"
        except BadMessage as bad:
            found[name] = str(bad)
    return {name: answer for name, answer in found.items() if answer != AWAY}


@dataclass
class Roster:
    """The sites of a run, in the order of their clients, and the classes they agreed on by name.

    `starts` counts how often the server was started for this run.
    """

    run: str
    classes: tuple[str, ...]
    sites: list[Description]
    unseen: tuple[str, ...] = ()
    sitting_out: dict[str, str] = field(default_factory=dict)
    starts: int = 0

    def __getitem__(self, name: str) -> Description:
        return next(site for site in self.sites if site.name == name)

    def refuse_empty(self) -> None:
        if all(site.domain in self.unseen for site in self.sites):
            reasons = "; ".join(f"'{name}': {reason}" for name, reason in self.sitting_out.items())
            raise TrainingError(f"No site can take part ({reasons or 'none came'}): see to one and start again.")

    def outline(self) -> Federation:
        """The federation as the server sees it; sites say what the network sees, and not how it is made of images."""
        training = [site for site in self.sites if site.domain not in self.unseen]
        return Outline(
            name="federation",
            classes=self.classes,
            shape=self.sites[0].shape,
            seen=self.sites[0].shape,
            train_transform=None,
            test_transform=None,
            clients=tuple(ClientOutline(s.name, s.domain, s.train, s.validation, s.test) for s in training),
            unseen=tuple(ClientOutline(s.name, s.domain, 0, 0, s.test) for s in self.sites if s.domain in self.unseen),
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
            run, classes, unseen = str(stored["run"]), tuple(stored["classes"]), tuple(stored["unseen"])
            sites = [Description.read(site) for site in stored["sites"]]
            return Roster(run, classes, sites, unseen, dict(stored["sitting_out"]), int(stored.get("starts", 0)))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, BadMessage) as error:
            raise StoreError(
                f"'{path}', which says who takes part, cannot be read ({type(error).__name__}): put it back from a "
                "copy, or begin a new run in another directory."
            ) from error


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
    sitting_out = {site.name: reason for site in described if (reason := cannot_train(site, unseen))}
    fitting = [site for site in described if site.name not in sitting_out]
    agreed = tuple(classes) if classes is not None else _usual_classes([site.classes for site in fitting])
    agreed_shape = shape or _usual([site.shape for site in fitting])
    sitting_out |= {site.name: reason for site in fitting if (reason := differs(site, agreed, agreed_shape))}
    kept = [site for site in fitting if site.name not in sitting_out]
    kept.sort(key=lambda site: (site.position if site.position is not None else -1, site.name))
    return Roster(run, agreed, kept, tuple(unseen), sitting_out)


def cannot_train(site: Description, unseen: Collection[str]) -> str:
    """What of this site, whatever the others have, keeps it from taking part, or nothing."""
    if site.version != fedkeel.__version__:
        return f"it runs fedkeel {site.version}, and the server {fedkeel.__version__}"
    if site.train == 0 and site.domain not in unseen:
        return "it has no training images"
    return ""


def differs(site: Description, classes: Sequence[str], shape: Sequence[int]) -> str:
    """What of this site does not fit, or nothing."""
    known = set(classes)
    strange = [label for label in site.classes if label not in known]
    if strange:
        listed = quoted(strange, 3, "others")
        noun = "class" if len(strange) == 1 else "classes"
        others = f" and {len(classes) - LISTED:,} others" if len(classes) > LISTED else ""
        return f"it has the {noun} {listed}, and the federation has {', '.join(classes[:LISTED])}{others}"
    if tuple(site.shape) != tuple(shape):
        ours, theirs = ("x".join(map(str, given)) for given in (shape, site.shape))
        return f"its images have the shape {theirs}, and those of the federation {ours}"
    return ""


def _usual_classes(given: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Names count, not positions: where the order differs from site to site, that of the federation is alphabetical."""
    return given[0] if len(set(given)) == 1 else _usual([tuple(sorted(classes)) for classes in given])


def _usual(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The most frequent of these; of equally frequent ones the longest, of those the first."""
    counts = Counter(values)
    return max(values, key=lambda value: (counts[value], len(value)), default=())
