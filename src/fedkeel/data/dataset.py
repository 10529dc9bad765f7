"""A data set as it was read, before it is cut into clients: every image once, and each domain's split.

It is made of a manifest: the images that a split uses are decoded, and only those.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeel.data import memory
from fedkeel.data.federation import Transform
from fedkeel.data.formats.images import Bytes, decode_all
from fedkeel.data.formats.npz import fingerprint
from fedkeel.data.manifest import Manifest, Parts
from fedkeel.data.population import IntArray, Split
from fedkeel.errors import DataError


@dataclass(frozen=True)
class Dataset:
    """Images (uint8, (N, C, H, W)), labels and each domain's split, with the data set's usual transforms."""

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    domains: Mapping[str, Split]
    train_transform: Transform | str = "normalise"
    test_transform: Transform | str = "normalise"
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


def assemble(manifest: Manifest, parts: Mapping[str, Parts], size: int, *, train: str, test: str) -> Dataset:
    """The images of `parts` in one store; `train` and `test` are the usual transforms."""
    used = {name: np.unique(np.concatenate(cuts)) for name, cuts in parts.items()}
    for name, positions in used.items():
        if len(positions) == 0:
            raise DataError(f"The domain '{name}' of '{manifest.name}' has no images in '{manifest.root}'.")
    count = held = sum(map(len, used.values()))
    if larger := [len(run.labels) for name in used for run in manifest.domains[name].images if run.load]:
        # All images of a larger file are decoded for those that are used, and these are copied to the others.
        held = 2 * count + max(larger)
    what = f"The {count:,} images of '{manifest.name}' at {size} x {size} pixels"
    with memory.holding(held * 3 * size * size, what, "give a smaller size, or fewer images"):
        images, kept = decode(manifest, used, size)
    labels: list[IntArray] = []
    splits, start = {}, 0
    for name, cuts in parts.items():
        all_labels = manifest.domains[name].labels
        place = np.full(len(all_labels), -1)
        place[kept[name]] = start + np.arange(len(kept[name]))
        splits[name] = Split(*(indices(stored[stored >= 0]) for stored in (place[cut] for cut in cuts)))
        labels.append(all_labels[kept[name]])
        start += len(kept[name])
    return Dataset(
        name=manifest.name,
        images=torch.from_numpy(images),
        labels=torch.from_numpy(np.concatenate(labels)),
        classes=manifest.classes,
        domains=splits,
        train_transform=train,
        test_transform=test,
    )


def decode(manifest: Manifest, used: Mapping[str, IntArray], size: int) -> tuple[Bytes, dict[str, IntArray]]:
    """The images at the sorted positions `used` of each domain, and the positions of those that could be decoded.

    Image files of all domains are decoded together: what share of them may be broken is a matter of the whole.
    """
    runs = []  # (domain, position of its first image, images, which of them are used)
    for name, positions in used.items():
        start = 0
        for run in manifest.domains[name].images:
            stop = start + len(run.labels)
            runs.append((name, start, run, positions[(positions >= start) & (positions < stop)] - start))
            start = stop
    files = [run.files[i] for *_, run, wanted in runs if not run.load for i in wanted]
    decoded, good = np.empty((0, 3, size, size), np.uint8), np.empty(0, np.int64)
    if files:
        key = [fingerprint(file.absolute()) for file in files]
        decoded, good = decode_all(manifest.name, key, len(files), lambda: files, lambda i: str(files[i]), size)
    images: list[Bytes] = []
    kept: dict[str, list[IntArray]] = {name: [] for name in used}
    first = 0  # file of the run
    for name, start, run, wanted in runs:
        if run.load:
            own, found = run.load(wanted, size)
        else:
            low, high = np.searchsorted(good, [first, first + len(wanted)])
            own, found = decoded[low:high], good[low:high] - first
            first += len(wanted)
        images.append(own)
        kept[name].append(start + wanted[found])
    # Files alone are one array already: a second copy may not fit.
    together = np.concatenate(images) if any(run.load for _, _, run, _ in runs) else decoded
    return together, {name: np.concatenate(own) for name, own in kept.items()}
