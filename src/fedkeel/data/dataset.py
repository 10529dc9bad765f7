"""A data set as it was read, before it is cut into clients: every image once, and each domain's split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeel.data.federation import Transform
from fedkeel.data.population import each_once
from fedkeel.errors import DataError


@dataclass(frozen=True)
class Split:
    """Indices into the store of one domain's images, by what they are for."""

    train: Tensor
    validation: Tensor
    test: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.train, self.validation, self.test))

    def all(self) -> Tensor:
        """Every image of the domain, in the store's order."""
        return each_once([*self])


@dataclass(frozen=True)
class Dataset:
    """Images (uint8, (N, C, H, W)), labels and each domain's split, with the data set's usual transforms."""

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    domains: Mapping[str, Split]
    train_transform: Transform
    test_transform: Transform
    users: npt.NDArray[Any] | None = None  # whose each image is, whole numbers or text; for the partition by-user

    def __post_init__(self) -> None:
        if not self.domains:
            raise DataError(f"'{self.name}' has no domain: give at least one.")
        if self.users is not None and len(self.users) != len(self.images):
            raise DataError(f"'{self.name}' has {len(self.images)} images, but users of {len(self.users)}.")
        for domain, split in self.domains.items():
            if len(split.all()) < sum(map(len, split)):
                raise DataError(
                    f"In '{self.name}' an image of the domain '{domain}' is in two of train, validation and test: "
                    "keep it in one."
                )


def indices(positions: npt.NDArray[np.integer] | Sequence[int]) -> Tensor:
    """Positions as the int64 index tensor that clients hold."""
    return torch.from_numpy(np.array(positions, dtype=np.int64))
