"""A federation: one store of images, and clients that are lists of indices into it.

However many clients share a data set, its pixels are in memory once, as uint8; a client costs three index
tensors. Images become floats only when a batch is drawn, by the federation's transforms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedkeel.errors import DataError, unknown


class Transform(Protocol):
    """A map over a batch of images, on any device.

    `draws` is the number of uniform random numbers in [0, 1) that it needs for each image; it gets them in
    `u` of shape (N, draws) and has no randomness of its own. So the same batch is the same bits under every
    executor, and the whole thing can be captured in a CUDA graph.
    """

    @property
    def draws(self) -> int: ...

    def __call__(self, x: Tensor, u: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Client:
    """One site: its name, the domain its images come from, and the indices of its images in the store."""

    name: str
    domain: str
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def samples(self) -> int:
        """Number of training samples: its weight in the mean."""
        return len(self.train)


def no_indices() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def each_once(parts: Sequence[Tensor]) -> Tensor:
    """The numbers that are in any of the tensors, sorted, each once."""
    distinct: Tensor = torch.unique(torch.cat(list(parts)))
    return distinct


@dataclass(frozen=True)
class Federation:
    """Images, labels and the clients that hold them.

    Attributes:
        name: of the data set, for messages and reports.
        images: uint8, (N, C, H, W): every image of every client and split, once.
        labels: int64, (N,).
        classes: names of the classes, in label order.
        clients: those that train, in a fixed order.
        unseen: those that are only evaluated, never trained on.
        train_transform, test_transform: uint8 batch -> float batch.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    clients: Sequence[Client]
    train_transform: Transform
    test_transform: Transform
    unseen: Sequence[Client] = field(default=())

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(
                f"The images of '{self.name}' have dtype {self.images.dtype} and shape {tuple(self.images.shape)}: "
                "give a uint8 tensor of shape (N, C, H, W)."
            )
        if self.labels.shape != (len(self.images),):
            raise DataError(f"'{self.name}' has {len(self.images)} images but {len(self.labels)} labels.")
        names = [client.name for client in self]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"Two clients of '{self.name}' are called '{twice}': give each a name of its own.")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a stored image."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    @property
    def domains(self) -> list[str]:
        """Domains of the training clients, then of the unseen ones, each once, in the clients' order."""
        return list(dict.fromkeys(client.domain for client in self))

    def __iter__(self) -> Iterator[Client]:
        yield from self.clients
        yield from self.unseen

    def __getitem__(self, name: str) -> Client:
        if name not in self._by_name:
            raise DataError(unknown("client", name, list(self._by_name)))
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Client]:
        return {client.name: client for client in self}

    def pooled(self) -> Federation:
        """The same data with all training samples on one client: centralised training, the upper bound.

        The clients of the federation stay as evaluation targets (in `unseen`, with their own names).
        """
        taken = {client.name for client in self}
        name = next(name for name in ("pooled", *(f"pooled-{i}" for i in range(len(taken) + 1))) if name not in taken)
        everything = Client(
            name=name,
            domain="pooled",
            train=each_once([client.train for client in self.clients]),
            validation=no_indices(),
            test=no_indices(),
        )
        return replace(self, clients=(everything,), unseen=tuple(self))
