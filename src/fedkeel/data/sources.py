"""Samples out of what people have in Python: arrays, tables, torch data sets, Hugging Face data sets.

Pictures become uint8, (N, C, H, W). All else becomes float32 and is otherwise taken as it is: float images
(N, C, H, W), vectors (N, D). torch's and Hugging Face's data sets are read once, sample by sample, into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from fedkeel.data.formats.images import Depth, rgb, squeezed
from fedkeel.errors import DataError, numbered, unknown
from fedkeel.options import Count, check_fields, described

log = logging.getLogger("fedkeel")
CHANNELS = (1, 3)  # of pictures: which axis has as many is theirs


def no_column(name: str) -> Any:
    raise DataError(f"'{name}' would be a column, and these data have none: give an array, one entry per sample.")


@dataclass(frozen=True)
class Samples:
    """What was read: the store, a label for each sample as it was given, and the classes' names where these are known.

    `column(name)` gives what else the source knows of each sample.
    """

    values: Tensor
    labels: Any
    column: Callable[[str], Any] = no_column
    classes: Sequence[str] | None = None
    columns: tuple[str, ...] = ()  # the names of a vector's numbers


@dataclass(frozen=True)
class Source:
    """How data are read."""

    name: str = "own"  # for messages and reports
    image: str | None = None  # the column of images, of data that have columns
    label: str | None = None  # and that of labels
    classes: Sequence[str] | None = None  # their names, in label order
    size: Count | None = None  # PIL's pictures are squeezed to size x size pixels
    split_seed: int = 0  # of the shares for testing and validation

    def __post_init__(self) -> None:
        check_fields(self)

    def read(self, data: Any, labels: Any, others: Sequence[str] = ()) -> Samples:
        """The samples of `data`, whose columns `others` are no features."""
        if isinstance(labels, str) or (labels is not None and self.label is not None):
            raise DataError("Give labels=, one for each sample, or label=, the name of a column, and not both.")
        if isinstance(data, str | bytes | Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise DataError(
                f"The data are {described(data)}: give arrays, a pandas table, or a torch or Hugging Face data set "
                "that has a length (such as loader.dataset, or data['train']); a name is for data.load."
            )
        if len(data) == 0:
            raise DataError(f"'{self.name}' has no samples: give some.")
        if hasattr(data, "iloc") and hasattr(data, "columns"):
            return self._table(data, labels, others)
        rows = isinstance(data, list | tuple) and isinstance(data[0], list | int | float)
        if isinstance(data, np.ndarray | Tensor) or rows:
            if labels is None:
                raise DataError("An array says nothing of its samples' classes: give labels=..., one for each sample.")
            return Samples(array(data), labels)
        return self._items(data, labels)

    def _table(self, table: Any, labels: Any, others: Sequence[str]) -> Samples:
        """A pandas DataFrame: every column that has no other part is a feature."""

        def column(name: str) -> Any:
            if name not in table.columns:
                raise DataError(unknown("column", name, [str(known) for known in table.columns]))
            return table[name].to_numpy()

        if labels is None and self.label is None:
            raise DataError("Which column is the label is not said: give label='name of the column'.")
        used = {name: column(name) for name in (*others, *([self.label] if self.label else []))}
        features = [name for name in table.columns if name not in used]
        if not features or not table.columns.is_unique:
            raise DataError("The table has no column that could be a feature, or two of one name: see to its columns.")
        values = vectors({str(name): table[name].to_numpy() for name in features})
        found = used[self.label] if self.label else labels
        return Samples(values, found, column, columns=tuple(map(str, features)))

    def _items(self, data: Any, labels: Any) -> Samples:
        """Sample after sample of what has a length and can be indexed: (image, label), or a table of both with names,
        as Hugging Face's data sets have, whose columns can be asked for."""
        image, label = self.image or "image", self.label or "label"
        depth, found, values = Depth(), list[Any](), list[Any]()
        for number in range(len(data)):
            item = data[number]
            if isinstance(item, Mapping) and (image not in item or (labels is None and label not in item)):
                raise DataError(
                    f"A sample has {', '.join(map(str, item))}: give image= and label=, or data.to_pandas()."
                )
            if isinstance(item, Mapping):
                item = (item[image], item.get(label))
            pair = isinstance(item, tuple | list) and len(item) >= 2
            if labels is None and not pair:
                raise DataError(
                    f"A sample is {described(item)}: let the data set give (image, label), or give labels=."
                )
            values.append(self._sample(item[0] if pair else item, number, depth))
            found.append(item[1] if pair else None)
        for sentence in depth.sentences("scans of so many bits are for the data set's own transform to scale"):
            log.warning("Of '%s', %s", self.name, sentence)
        known = getattr(getattr(data, "features", {}).get(label), "names", getattr(data, "classes", None))

        def column(name: str) -> Any:
            features = getattr(data, "features", {})
            if name not in features:
                raise DataError(unknown("column", name, features))
            names = getattr(features[name], "names", None)
            return [names[number] for number in data[name]] if names else list(data[name])

        classes = known if isinstance(known, list | tuple) else None  # as torchvision's data sets have them
        return Samples(array(values), found if labels is None else labels, column, classes)

    def _sample(self, sample: Any, number: int, depth: Depth) -> npt.NDArray[Any]:
        """One sample as an array."""
        if isinstance(sample, Image.Image):
            picture = sample if sample.mode in ("L", "F") else rgb(sample, depth, str(number))
            return np.array(picture if self.size is None else squeezed(picture, self.size))
        made = np.asarray(sample.detach().cpu() if isinstance(sample, Tensor) else sample)
        if made.ndim == 0 or self.size is not None:
            raise DataError(
                f"Sample {number} is {described(sample)}: give vectors, images (C, H, W) or, for size=, PIL's pictures."
            )
        return made


# -- details -----------------------------------------------------------------------------------------------------------
def array(data: Any) -> Tensor:
    """Samples that are numbers already: uint8 pictures, or floats."""
    try:
        if isinstance(data, Tensor):
            data = data.detach().cpu().float() if data.is_floating_point() else data.detach().cpu()
        given = np.asarray(data)
    except ValueError:
        given = np.empty(0, object)
    if given.dtype.kind not in "biuf" or given.ndim < 2 or given.size == 0:
        raise DataError(
            f"The data are {given.dtype} of shape {given.shape}: give numbers of one size, vectors (N, D) or images "
            "(N, C, H, W); size=64 squeezes PIL's pictures."
        )
    if given.dtype == np.uint8 and given.ndim in (3, 4):
        made = torch.from_numpy(np.ascontiguousarray(given) if given.flags.writeable else given.copy())
        if made.ndim == 3:
            return made.unsqueeze(1)
        last = made.shape[1] not in CHANNELS and made.shape[3] in CHANNELS
        return made.permute(0, 3, 1, 2).contiguous() if last else made
    if given.ndim == 4 and given.shape[1] not in CHANNELS and given.shape[3] in CHANNELS:
        log.warning("Images of shape %s are taken as (C, H, W): permute them if they are not.", given.shape[1:])
    values = torch.from_numpy(given.astype(np.float32))
    if not values.isfinite().all():
        row = int(values.flatten(1).isfinite().all(1).logical_not().nonzero()[0])
        raise DataError(f"Sample {row} has a number that is not finite: fill in what is missing, or leave it out.")
    return values


def vectors(columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]], row: str = "sample", first: int = 0) -> Tensor:
    """Columns of numbers, or of what reads as one, as rows (N, D). What is missing is told of all columns at once, in
    `row`s that are counted from `first`."""
    made, lacking = list[Any](), list[str]()
    for name, cells in columns.items():
        try:
            numbers = np.array([np.nan if cell is None or cell == "" else cell for cell in cells]).astype(np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"The column '{name}' does not hold numbers ({error}): write it as numbers (pandas.get_dummies), or "
                "leave it out."
            ) from error
        lost = first + np.flatnonzero(~np.isfinite(numbers))
        lacking += [f"{numbered(row, lost.tolist())} of the column '{name}'"] if len(lost) else []
        made.append(numbers)
    if lacking:
        raise DataError(f"There is no finite number in {' and '.join(lacking)}: fill them in, or leave such rows out.")
    return torch.from_numpy(np.stack(made, axis=1).astype(np.float32))
