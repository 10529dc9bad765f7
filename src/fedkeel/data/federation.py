"""A federation: one store of images, and clients that are lists of indices into it.

However many clients share a data set, its pixels are in memory once, as uint8; a client costs three index
tensors, and those that are made on demand (`fedkeel.data.population`) cost nothing until then. Images become floats
only when a batch is drawn, by the federation's transforms. What is no picture (float images, vectors) is float32.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedkeel.core.readable import html_table, text_table
from fedkeel.data.population import Client, Population, each_once, no_indices
from fedkeel.errors import DataError, unknown

__all__ = ["Client", "Federation", "Transform", "no_indices"]

MOST_SHOWN = 12  # clients in a notebook
MOST_NAMED = 100  # clients that an error knows


class Transform(Protocol):
    """A map over a batch of images, on any device.

    `draws` is the number of uniform random numbers in [0, 1) that it needs for each image; it gets them in
    `u` of shape (N, draws) and has no randomness of its own. So the same batch is the same bits under every
    executor, and the whole thing can be captured in a CUDA graph.

    >>> from fedkeel.data import parse_transforms
    >>> flip = parse_transforms("flip")
    >>> flip.draws, flip(torch.tensor([[[[0.0, 1.0]]]]), torch.tensor([[0.1]]))
    (1, tensor([[[[1., 0.]]]]))
    """

    @property
    def draws(self) -> int: ...

    def __call__(self, x: Tensor, u: Tensor) -> Tensor: ...


def called(shape: Sequence[int]) -> str:
    """What a sample of this shape is."""
    return "image" if len(shape) == 3 else "row"


@dataclass(frozen=True)
class Federation:
    """Images, labels and the clients that hold them.

    Attributes:
        name: of the data set, for messages and reports.
        images: every sample of every client and split, once: uint8, (N, C, H, W), or float32, (N, D) or (N, ...).
        labels: int64, (N,).
        classes: names of the classes, in label order.
        clients: those that train, in a fixed order; a list, or a `Population` that makes them on demand.
        unseen: those that are only evaluated, never trained on.
        train_transform: batch as stored -> float batch.
        test_transform: likewise.

    >>> from fedkeel.data import load
    >>> federation = load("digits-shift")
    >>> federation.num_classes, federation.image_shape, federation.domains
    (10, (3, 32, 32), ['scan', 'paper', 'texture', 'stroke', 'street'])
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    clients: Sequence[Client]
    train_transform: Transform
    test_transform: Transform
    unseen: Sequence[Client] = field(default=())
    on_disk: bool = False  # the images are mapped from a file
    bits: int | None = None  # that grey images of 16 bits use, where it was said
    paths: Sequence[str] = ()  # the file that each image came from, where they are files
    columns: tuple[str, ...] = ()  # the names of a vector's numbers, where it was a row of a table

    def __post_init__(self) -> None:
        floats = self.images.dtype == torch.float32 and self.images.ndim >= 2
        if not floats and (self.images.dtype, self.images.ndim) != (torch.uint8, 4):
            raise DataError(
                f"The images of '{self.name}' have dtype {self.images.dtype} and shape {tuple(self.images.shape)}: "
                "give a uint8 tensor of shape (N, C, H, W), or float32, of that shape or (N, D)."
            )
        if self.labels.shape != (len(self.images),):
            raise DataError(f"'{self.name}' has {len(self.images)} images but {len(self.labels)} labels.")
        names = [client.name for client in (self.unseen if isinstance(self.clients, Population) else self)]
        for name, count in Counter(names).items():
            if count > 1 or (isinstance(self.clients, Population) and self.clients.number(name) is not None):
                raise DataError(f"Two clients of '{self.name}' are called '{name}': give each a name of its own.")

    def __repr__(self) -> str:
        return text_table(*self._shown())

    def _repr_html_(self) -> str:
        return html_table(*self._shown())

    def _shown(self) -> tuple[str, list[tuple[object, ...]]]:
        """What it holds in a sentence, and its first clients."""
        clients, unseen = len(self.clients), len(self.unseen)
        shape, extra = "x".join(map(str, self.images.shape[1:])), f" and {unseen} unseen" if unseen else ""
        caption = (
            f"Federation '{self.name}': {len(self.images):,} samples of {shape}, {self.num_classes} classes, "
            f"{clients:,} clients{extra} in {len(self.domains)} domains"
        )
        first = [*itertools.islice(self, MOST_SHOWN)]
        rows = [(c.name, c.domain, c.samples, len(c.validation), len(c.test)) for c in first]
        more = [(f"and {clients + unseen - len(first):,} more", *[""] * 4)] if clients + unseen > len(first) else []
        return caption, [("client", "domain", "train", "validation", "test"), *rows, *more]

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(channels, height, width) of a stored image; (numbers,) of a vector."""
        return tuple(self.images.shape[1:])

    @property
    def domains(self) -> list[str]:
        """Domains of the training clients, then of the unseen ones, each once, in the clients' order."""
        return list(dict.fromkeys(client.domain for client in self.one_of_each()))

    def __iter__(self) -> Iterator[Client]:
        yield from self.clients
        yield from self.unseen

    def __getitem__(self, name: str) -> Client:
        client = self._find(name)
        if client is None:
            raise DataError(unknown("client", name, [client.name for client in itertools.islice(self, MOST_NAMED)]))
        return client

    def one_of_each(self, *, unseen: bool = True) -> Iterator[Client]:
        """Clients enough to see every domain, validation set and test set; without `unseen`, of those that train.

        Of clients that are made on demand, one stands for all that share these three.
        """
        yield from self.clients.one_of_each() if isinstance(self.clients, Population) else self.clients
        yield from self.unseen if unseen else ()

    @property
    def most_samples(self) -> int:
        """The number of training samples of the largest client."""
        if isinstance(self.clients, Population):
            return max(int(group.shares.sizes.max()) for group in self.clients.groups)
        return max(client.samples for client in self.clients)

    def training_images(self) -> Tensor:
        """The indices of all images that clients train on, sorted, each once."""
        if isinstance(self.clients, Population):
            return each_once([group.used() for group in self.clients.groups])
        return each_once([client.train for client in self.clients])

    @cached_property
    def _by_name(self) -> dict[str, Client]:
        """Those that are not made on demand."""
        return {client.name: client for client in (self.unseen if isinstance(self.clients, Population) else self)}

    def _find(self, name: str) -> Client | None:
        number = self.clients.number(name) if isinstance(self.clients, Population) else None
        return self._by_name.get(name) if number is None else self.clients[number]

    def on_validation(self) -> Federation:
        """The same data, tested on the clients' validation samples alone: to choose settings by.

        What was for testing is in no client's hands any more, and unseen clients, which have nothing else, are left
        out.
        """
        clients: Sequence[Client] = tuple(
            replace(client, test=client.validation) for client in self.one_of_each(unseen=False)
        )
        if isinstance(self.clients, Population):
            clients = Population([replace(group, test=group.validation) for group in self.clients.groups])
        validated = replace(self, clients=clients, unseen=())
        if not any(len(client.validation) for client in validated.one_of_each()):
            raise DataError(
                f"'{self.name}' has no validation samples to choose settings by: give it some, as most data sets do "
                f"with 'NAME(validation=0.1)'."
            )
        return validated

    def pooled(self) -> Federation:
        """The same data with all training samples on one client: centralised training, the upper bound.

        The clients of the federation stay as evaluation targets (in `unseen`, with their own names); of those that are
        made on demand, one of each.
        """
        everything = Client("pooled", "pooled", self.training_images(), no_indices(), no_indices())
        return replace(self, clients=(everything,), unseen=tuple(self.one_of_each()))
