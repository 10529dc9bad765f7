"""Clients, and very many of them: each is made when it is asked for, and forgotten again.

A population is made of groups, one for each domain. The clients of a group share the domain's validation and test
images; what sets them apart is a number and their *share* of the domain's training images, which is looked up or drawn
for one client at a time. So a hundred thousand clients cost as much memory as ten.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeel.errors import DataError

RECENT = 256  # clients that are kept: a round asks for the same one several times
IntArray = npt.NDArray[np.int64]


class Split(NamedTuple):
    """Indices into the store of the images of a domain or a client, by what they are for.

    >>> Split(torch.tensor([3, 0]), torch.tensor([1]), torch.tensor([2])).all()
    tensor([0, 1, 2, 3])
    """

    train: Tensor
    validation: Tensor
    test: Tensor

    def all(self) -> Tensor:
        """Every one of the images, in the store's order."""
        return each_once(self)


USES = Split._fields


@dataclass(frozen=True)
class Client:
    """One site: its name, the domain its images come from, and the indices of its images in the store.

    >>> Client("clinic", "scanner A", torch.arange(80), torch.arange(80, 90), torch.arange(90, 100)).samples
    80
    """

    name: str
    domain: str
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def samples(self) -> int:
        """Number of training samples: its weight in the mean."""
        return len(self.train)

    @property
    def splits(self) -> Split:
        return Split(self.train, self.validation, self.test)


def no_indices() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


def each_once(parts: Sequence[Tensor]) -> Tensor:
    """The numbers that are in any of the tensors, sorted, each once."""
    distinct: Tensor = torch.unique(torch.cat(list(parts)))
    return distinct


class Shares:
    """Who gets which of a domain's training samples: cut once, and kept as slices of one array."""

    def __init__(self, parts: Sequence[IntArray]) -> None:
        self.sizes = np.array([len(part) for part in parts], np.int64)
        self._order = np.concatenate([np.empty(0, np.int64), *parts])
        self._stops = np.cumsum(self.sizes)

    def positions(self, number: int) -> IntArray:
        """Where one client's samples are among the domain's training samples."""
        stop = int(self._stops[number])
        return self._order[stop - int(self.sizes[number]) : stop]

    def used(self) -> IntArray:
        """Where the samples are that any client may have."""
        return np.sort(self._order)


@dataclass(frozen=True)
class ClientGroup:
    """The clients of one domain."""

    domain: str
    shares: Shares
    train: Tensor  # indices of the domain's training images, which `shares` counts from 0
    validation: Tensor
    test: Tensor

    def __len__(self) -> int:
        return len(self.shares.sizes)

    def name(self, number: int) -> str:
        """The domain and a client's number, with as many digits as the last one has; a single one needs none."""
        return self.domain if len(self) == 1 else f"{self.domain}-{str(number).zfill(len(str(len(self) - 1)))}"

    def client(self, number: int) -> Client:
        train = self.train[torch.from_numpy(self.shares.positions(number))]
        return Client(self.name(number), self.domain, train, self.validation, self.test)

    def used(self) -> Tensor:
        return self.train[torch.from_numpy(self.shares.used())]


class Population(Sequence[Client]):
    """The clients of all groups, one group after the other.

    It answers by itself what a look at every client would otherwise be needed for.
    """

    def __init__(self, groups: Sequence[ClientGroup]) -> None:
        self.groups = tuple(group for group in groups if len(group))
        self._stops = list(itertools.accumulate(len(group) for group in self.groups))
        self._made = lru_cache(maxsize=RECENT)(self._make)
        for group, stop in zip(self.groups, self._stops, strict=True):
            if self.number(name := group.name(0)) != stop - len(group):
                raise DataError(f"Clients of two domains are called '{name}': rename the domain '{group.domain}'.")

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return Population, (self.groups,)  # without the clients that are kept for a while

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __getitem__(self, index: Any) -> Any:
        """A client, or several of a slice."""
        place = range(len(self))[index]
        return self._made(place) if isinstance(place, int) else tuple(map(self._made, place))

    def _make(self, number: int) -> Client:
        place = bisect_right(self._stops, number)
        return self.groups[place].client(number - (self._stops[place - 1] if place else 0))

    def __iter__(self) -> Iterator[Client]:
        return (group.client(number) for group in self.groups for number in range(len(group)))

    def number(self, name: str) -> int | None:
        """The place of the client of this name; None if there is none."""
        for group, stop in zip(self.groups, self._stops, strict=True):
            digits = name.removeprefix(f"{group.domain}-")
            number = int(digits) if digits != name and digits.isdecimal() else 0
            if number < len(group) and group.name(number) == name:
                return stop - len(group) + number
        return None

    def one_of_each(self) -> Iterator[Client]:
        """One client for each domain: all that share its validation and test set are like it."""
        return (self[stop - len(group)] for group, stop in zip(self.groups, self._stops, strict=True))
