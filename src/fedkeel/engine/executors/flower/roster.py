"""Who takes part in a federation over a network: what sites say of themselves, and whether they fit together.

The server has no images. What it knows of a site is its `Description`: name, classes, image shape, numbers of
samples, library version. Sites that do not fit sit out, each with a reason that names what differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fedkeel
from fedkeel.core.messages import BadMessage, is_whole, shown
from fedkeel.data.federation import Federation
from fedkeel.data.outline import Outline
from fedkeel.data.outline import Site as Sized
from fedkeel.engine.executors.flower.limits import LARGEST_IMAGE, LONGEST_NAME, MOST_CLASSES, MOST_SAMPLES
from fedkeel.errors import StoreError, TrainingError
from fedkeel.files import write_atomically

FILE = "sites.json"
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
    shape: tuple[int, int, int]
    train: int
    validation: int
    test: int
    version: str
    position: int | None = None

    @staticmethod
    def read(given: object) -> Description:
        """From what a site sent; raises `BadMessage` on anything that is not a description, or of what nobody has:
        models are built after it."""
        if not isinstance(given, dict):
            raise BadMessage("it does not say who it is")
        text: dict[str, Any] = {key: given.get(key) for key in ("name", "domain", "version")}
        for key, value in text.items():
            if not _is_name(value):
                raise BadMessage(f"its {key} is not a line of text")
        numbers: dict[str, Any] = {key: given.get(key) for key in ("train", "validation", "test")}
        for key, value in numbers.items():
            if not is_whole(value) or not 0 <= value < MOST_SAMPLES:
                raise BadMessage(f"its number of {key} samples is {shown(value)}")
        classes, shape, position = given.get("classes"), given.get("shape"), given.get("position")
        if not isinstance(classes, list) or not 0 < len(classes) <= MOST_CLASSES:
            raise BadMessage(f"its classes are {shown(classes)}, and not a list of 1 to {MOST_CLASSES:,} names")
        if not all(_is_name(label) for label in classes) or len(set(classes)) < len(classes):
            raise BadMessage("its classes are not all names, or are named twice")
        if not isinstance(shape, list) or len(shape) != 3 or not all(is_whole(n) and n > 0 for n in shape):
            raise BadMessage(f"its image shape is {shown(shape)}")
        channels, height, width = shape
        if channels * height * width > LARGEST_IMAGE:
            raise BadMessage(f"its image shape is {shown(shape)}, more than {LARGEST_IMAGE:,} numbers")
        if position is not None and not (is_whole(position) and 0 <= position < MOST_SAMPLES):
            raise BadMessage(f"its position is {shown(position)}")
        return Description(
            **text,
            **numbers,
            classes=tuple(classes),
            shape=(channels, height, width),
            position=position,
        )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


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

    def __contains__(self, name: str) -> bool:
        return any(site.name == name for site in self.sites)

    def unfit(self, site: Description) -> str:
        """Why a site cannot take part, or nothing."""
        return cannot_train(site, self.unseen) or differs(site, self.classes, self.sites[0].shape)

    def add(self, site: Description) -> None:
        self.sites = in_order([*self.sites, site])

    def outline(self) -> Federation:
        """The federation as the server sees it; sites say what the network sees, and not how it is made of images."""
        held_out = [site for site in self.sites if site.domain in self.unseen]
        training = [site for site in self.sites if site.domain not in self.unseen]
        return Outline(
            name="federation",
            classes=self.classes,
            shape=self.sites[0].shape,
            seen=self.sites[0].shape,
            train_transform=None,
            test_transform=None,
            clients=tuple(Sized(s.name, s.domain, s.train, s.validation, s.test) for s in training),
            unseen=tuple(Sized(s.name, s.domain, 0, 0, s.test) for s in held_out),
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
            return Roster(
                run=str(stored["run"]),
                classes=tuple(stored["classes"]),
                sites=[Description.read(site) for site in stored["sites"]],
                unseen=tuple(stored["unseen"]),
                sitting_out=dict(stored["sitting_out"]),
                starts=int(stored.get("starts", 0)),
            )
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
    shape: tuple[int, int, int] | None = None,
    unseen: Collection[str] = (),
) -> Roster:
    """The sites that fit together, and for each of the others why it sits out.

    `classes` and `shape` are those of the configuration. Without them, the classes are what most sites have, or of
    equally many the longest list; a site may lack some of them, but one that has others sits out.
    """
    out: dict[str, str] = {}
    fitting: list[Description] = []
    for site in described:
        if site.name in (other.name for other in fitting):
            out[f"{site.name} (again)"] = f"another site is called '{site.name}'"
        elif reason := cannot_train(site, unseen):
            out[site.name] = reason
        else:
            fitting.append(site)
    agreed = tuple(classes) if classes is not None else _usual_classes([site.classes for site in fitting])
    agreed_shape = shape or _usual([site.shape for site in fitting])
    kept: list[Description] = []
    for site in fitting:
        reason = differs(site, agreed, agreed_shape)
        if reason:
            out[site.name] = reason
        else:
            kept.append(site)
    return Roster(run, agreed, in_order(kept), tuple(unseen), out)


def in_order(sites: Sequence[Description]) -> list[Description]:
    return sorted(sites, key=lambda site: (site.position if site.position is not None else -1, site.name))


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
        listed = ", ".join(f"'{label}'" for label in strange[:3]) + (" and others" if len(strange) > 3 else "")
        noun = "class" if len(strange) == 1 else "classes"
        others = f" and {len(classes) - LISTED:,} others" if len(classes) > LISTED else ""
        return f"it has the {noun} {listed}, and the federation has {', '.join(classes[:LISTED])}{others}"
    if tuple(site.shape) != tuple(shape):
        return f"its images have the shape {_by(site.shape)}, and those of the federation {_by(shape)}"
    return ""


def refuse_empty(roster: Roster) -> None:
    if not any(site.domain not in roster.unseen for site in roster.sites):
        reasons = "; ".join(f"'{name}': {reason}" for name, reason in roster.sitting_out.items())
        raise TrainingError(f"No site can take part{f' ({reasons})' if reasons else ''}: see to one and start again.")


def _usual_classes(given: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Names count, not positions: where the order differs from site to site, that of the federation is alphabetical."""
    return given[0] if len(set(given)) == 1 else _usual([tuple(sorted(classes)) for classes in given])


def _usual(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The most frequent of these; of equally frequent ones the longest, of those the first."""
    counts = Counter(values)
    return max(values, key=lambda value: (counts[value], len(value)), default=())


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
