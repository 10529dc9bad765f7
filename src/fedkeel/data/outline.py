"""A federation in outline: names, sizes and shapes, and not one image.

It is what a server over a network knows of its sites, and what a run directory keeps of its data. A network is built of
it, so a run can be read where its data are not. With it goes a *fingerprint* of the content, by which a run that is
resumed or used again knows its data.

The fingerprint is of what was loaded, the pixels and labels in memory, not of files: an image that was saved again
with the same pixels is the same. Of clients that are made on demand it speaks by domain, and of how images are divided
among them where they are at most `MOST_CLIENTS`; of a store of more than `MOST_BYTES`, it takes every few rows of an
image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from fedkeel.data.federation import Federation, Transform
from fedkeel.data.population import USES, Client, Population, Split
from fedkeel.data.transforms import Unknown, parse_transforms, transforms_text
from fedkeel.errors import FedkeelError, StoreError, quoted

FILE = "federation.json"
MOST_CLIENTS = 1000  # that are named one by one
MOST_BYTES = 2**31  # of images that are read for a fingerprint


@dataclass(frozen=True)
class ClientOutline:
    """A client without its images."""

    name: str
    domain: str
    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class Outline:
    """All that is known of a federation where its images are not."""

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of an image as it is stored
    seen: tuple[int, ...]  # and as the network sees it
    train_transform: str | None  # None for one that cannot be written as text
    test_transform: str | None
    clients: tuple[ClientOutline, ...]  # those that train; of very many, one of each kind
    unseen: tuple[ClientOutline, ...] = ()
    number: int = 0  # how many train
    content: Mapping[str, str] = field(default_factory=dict)  # the fingerprint: a digest of each client or domain
    unit: str = "client"  # or "domain": what `content` is by
    division: str = ""  # a digest of which client has which images
    dtype: str = "uint8"  # of the store; or "float32"
    columns: tuple[str, ...] = ()  # the names of a vector's numbers
    bits: int | None = None  # that grey images of 16 bits use

    @staticmethod
    def of(federation: Federation) -> Outline:
        """Of a federation that is here."""
        probe, transform = federation.images[:1], federation.test_transform
        _, *seen = transform(probe, torch.full((len(probe), transform.draws), 0.5)).shape
        few = len(federation.clients) <= MOST_CLIENTS
        clients = list(federation.clients if few else federation.one_of_each(unseen=False))
        if isinstance(federation.clients, Population):
            groups = federation.clients.groups
            unit, parts = "domain", {group.domain: Split(group.train, group.validation, group.test) for group in groups}
        else:
            unit, parts = "client", {client.name: client.splits for client in federation.clients}
        parts |= {client.name: client.splits for client in federation.unseen}
        divided = hashlib.sha256()
        for client in clients if few else ():
            divided.update(f"{client.name!r} {client.samples} ".encode() + client.train.cpu().numpy().tobytes())
        return Outline(
            name=federation.name,
            classes=tuple(federation.classes),
            shape=federation.image_shape,
            seen=tuple(seen),
            train_transform=transforms_text(federation.train_transform),
            test_transform=transforms_text(federation.test_transform),
            clients=tuple(site(client) for client in clients[:MOST_CLIENTS]),
            unseen=tuple(site(client) for client in federation.unseen),
            number=len(federation.clients),
            content=content(federation, parts),
            unit=unit,
            division=divided.hexdigest()[:32] if few else "",
            dtype=str(federation.images.dtype).removeprefix("torch."),
            columns=federation.columns,
            bits=federation.bits,
        )

    def federation(self) -> Federation:
        """Clients of the right sizes, whose images are all the same blank one."""
        transform = known_transform(self.test_transform)
        shape = self.seen if isinstance(transform, Unknown) else self.shape
        pixels = self.dtype == "uint8" and len(shape) == 3
        blank = torch.zeros(1, dtype=torch.int64)

        def client(site: ClientOutline) -> Client:
            return Client(site.name, site.domain, *(blank.expand(getattr(site, split)) for split in USES))

        return Federation(
            name=self.name,
            images=torch.zeros((), dtype=torch.uint8 if pixels else torch.float32).expand(2, *shape),
            labels=torch.zeros(2, dtype=torch.int64),
            classes=self.classes,
            clients=tuple(map(client, self.clients)),
            unseen=tuple(map(client, self.unseen)),
            train_transform=transform,
            test_transform=transform,
            columns=self.columns,
            bits=self.bits,
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in ("columns", "bits") or value}

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Outline:
        try:
            clients = {name: tuple(ClientOutline(**entry) for entry in stored[name]) for name in ("clients", "unseen")}
            tuples = {name: tuple(stored.get(name, ())) for name in ("classes", "shape", "seen", "columns")}
            return Outline(**{**stored, **clients, **tuples})
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"The file {FILE} is of another version of Fedkeel ({error}): read it with that one."
            ) from error


def site(client: Client) -> ClientOutline:
    return ClientOutline(client.name, client.domain, *map(len, client.splits))


def known_transform(text: str | None) -> Transform:
    try:
        return Unknown() if text is None else parse_transforms(text)
    except FedkeelError:  # the user's own, that is not registered here
        return Unknown()


def content(federation: Federation, parts: Mapping[str, Split]) -> dict[str, str]:
    """A digest of the labels and images of each part, split by split, in their order."""
    images, labels = federation.images.cpu().numpy(), federation.labels.cpu().numpy()
    step = 1 + federation.images.nbytes // MOST_BYTES  # of a very large store, every few rows of an image
    rows = images[:, :, ::step] if images.ndim > 2 else images
    each = [hashlib.blake2b(np.ascontiguousarray(image), digest_size=16).digest() for image in rows]  # type: ignore[arg-type]
    digests = np.frombuffer(b"".join(each), np.uint8).reshape(-1, 16)
    found = {}
    for name, split in parts.items():
        digest = hashlib.blake2b(digest_size=16)
        for positions in (indices.cpu().numpy() for indices in split):
            digest.update(f"{len(positions)} ".encode() + labels[positions].tobytes() + digests[positions].tobytes())
        found[name] = digest.hexdigest()
    return found


def changed(before: Outline, now: Outline, *, divided: bool = True) -> str:
    """What of the data is not as it was, as the middle of a sentence, or nothing. Without `divided`, of the images
    alone: how they are divided among clients may follow from a seed."""
    if before.classes != now.classes:
        here, there = (quoted(outline.classes, 10, "others") for outline in (now, before))
        return f"the classes are {here} and were {there} when the run began"
    for which in ("shape", "train_transform", "test_transform"):
        ours, theirs = getattr(now, which), getattr(before, which)
        known = None if which == "shape" else known_transform(ours)  # 30 and 30.0 are the same
        if ours != theirs and (known in (None, Unknown()) or known != known_transform(theirs)):
            return f"the {which.replace('_', ' ')} is {ours!r} and was {theirs!r} when the run began"
    sizes, were = ({client.name: client for client in (*outline.clients, *outline.unseen)} for outline in (now, before))
    for name in {**before.content, **now.content}:
        if name not in now.content or name not in before.content:
            return f"the {before.unit} '{name}' is {'gone' if name in before.content else 'new'} since the run began"
        # Of numbers first: they say more than that something is another.
        for use in USES if name in sizes and name in were else ():
            have, had = getattr(sizes[name], use), getattr(were[name], use)
            if have != had:
                return f"the client '{name}' has {have} samples to {use}, and had {had} when the run began"
        if now.content[name] != before.content[name]:
            return f"the samples of '{name}' are not those that the run began with"
    if divided and (before.division, before.number) != (now.division, now.number):
        return "the samples are divided among the clients in another way than when the run began"
    return ""
