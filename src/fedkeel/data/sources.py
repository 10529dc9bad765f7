"""Samples out of what people have in Python: arrays, tables, torch data sets, Hugging Face data sets.

Pictures become uint8, (N, C, H, W). All else becomes float32 and is otherwise taken as it is: float images
(N, C, H, W), vectors (N, D). torch's and Hugging Face's data sets are read once, sample by sample, into memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    size: Count | None = None  # pictures are squeezed to size x size pixels
    split_seed: int = 0  # of the shares for testing and validation

    def __post_init__(self) -> None:
        check_fields(self)

    def read(self, data: Any, labels: Any, others: Sequence[str] = ()) -> Samples:
        """The samples of `data`, whose columns `others` are no features."""
        if isinstance(labels, str):
            raise DataError(f"'labels' is {labels!r}: a column is named with label={labels!r}.")
        if labels is not None and self.label is not None:
            raise DataError("The labels are given twice, as 'labels' and as a column, 'label': keep one.")
        looked_up = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if not looked_up or isinstance(data, str | bytes | Mapping):
            raise DataError(
                f"The data are {described(data)}: give arrays, a pandas table, or a torch or Hugging Face data set "
                "that has a length (such as loader.dataset, or data['train']); a name is for data.load."
            )
        if hasattr(data, "iloc") and hasattr(data, "columns"):
            return self._table(data, labels, others)
        if hasattr(data, "features") and hasattr(data, "column_names"):
            return self._hugging_face(data, labels, others)
        rows = isinstance(data, list | tuple) and bool(data) and isinstance(data[0], list | int | float)
        if isinstance(data, np.ndarray | Tensor) or rows:
            if labels is None:
                raise DataError("An array says nothing of its samples' classes: give labels=..., one for each sample.")
            return Samples(array(data), labels)
        values, found = self._items(data, labels, self.image or "image", self.label or "label")
        classes = getattr(data, "classes", None)  # as torchvision's data sets have them
        return Samples(values, found, classes=classes if isinstance(classes, list | tuple) else None)

    def _table(self, table: Any, labels: Any, others: Sequence[str]) -> Samples:
        """A pandas DataFrame: every column that has no other part is a feature."""

        def column(name: str) -> Any:
            if name not in table.columns:
                raise DataError(unknown("column", name, [str(known) for known in table.columns]))
            return table[name].to_numpy()

        if labels is None and self.label is None:
            raise DataError("Which column is the label is not said: give label='name of the column'.")
        found = column(self.label) if self.label else labels
        for name in others:
            column(name)
        features = [name for name in table.columns if name != self.label and name not in others]
        if not features or not table.columns.is_unique:
            raise DataError("The table has no column that could be a feature, or two of one name: see to its columns.")
        columns = tuple(map(str, features))
        values = vectors({str(name): table[name].to_numpy() for name in features})
        return Samples(values, found, column, columns=columns)

    def _hugging_face(self, data: Any, labels: Any, others: Sequence[str]) -> Samples:
        data = data.with_format(None)

        def find(kind: str, given: str | None, wanted: str) -> str | None:
            found = [name for name, feature in data.features.items() if type(feature).__name__ == kind]
            if given is None and len(found) > 1:
                raise DataError(f"Several columns could be the {wanted} ({', '.join(found)}): give {wanted}='name'.")
            return given or next(iter(found), None)

        def column(name: str) -> Any:
            if name not in data.column_names:
                raise DataError(unknown("column", name, data.column_names))
            numbers, names = list(data[name]), getattr(data.features[name], "names", None)
            return [names[number] for number in numbers] if names else numbers

        image = find("Image", self.image, "image")
        label = None if labels is not None else find("ClassLabel", self.label, "label")
        for name in (image, label):
            if name is not None and name not in data.column_names:
                raise DataError(unknown("column", name, data.column_names))
        if labels is None and label is None:
            raise DataError(
                f"Which column is the label is not said: give label=, one of {', '.join(data.column_names)}."
            )
        classes = getattr(data.features[label], "names", None) if label else None
        if image is None:  # numbers: a table
            samples = replace(self, label=label)._table(data.to_pandas(), labels, others)
            return replace(samples, column=column, classes=classes)
        found = labels if label is None else list(data[label])
        return Samples(self._items(data, found, image, "")[0], found, column, classes)

    def _items(self, data: Any, labels: Any, image: str, label: str) -> tuple[Tensor, Any]:
        """Sample after sample of what has a length and can be indexed; without `labels`, with those beside them."""
        if len(data) == 0:
            raise DataError(f"'{self.name}' has no samples: give some.")
        found, depth, values = list[Any](), Depth(), torch.empty(0)
        for number in range(len(data)):
            given, own = parted(data[number], image, label, labels is not None)
            made = self._sample(given, number, depth)
            if number == 0:
                values = torch.empty(len(data), *made.shape, dtype=made.dtype)
            if made.shape != values.shape[1:] or made.dtype != values.dtype:
                raise DataError(
                    f"Sample {number} is {made.dtype} of shape {tuple(made.shape)} and sample 0 {values.dtype} of "
                    f"{tuple(values.shape[1:])}: bring all to one, pictures with size=64 or a transform of their own."
                )
            values[number] = made
            found.append(own.item() if isinstance(own, Tensor | np.generic) and own.ndim == 0 else own)
        for sentence in depth.sentences("scans of so many bits are for the data set's own transform to scale"):
            log.warning("Of '%s', %s", self.name, sentence)
        return finite(values), found if labels is None else labels

    def _sample(self, sample: Any, number: int, depth: Depth) -> Tensor:
        """One sample as it is stored."""
        if isinstance(sample, Image.Image):
            sample = np.array(sample if sample.mode in ("L", "F") else rgb(sample, depth, str(number)))
        try:
            made = sample.detach().cpu() if isinstance(sample, Tensor) else torch.from_numpy(np.array(sample))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"Sample {number} is {described(sample)}: give PIL images, arrays or tensors of numbers."
            ) from error
        if made.ndim == 0:
            raise DataError(f"Sample {number} is a single number: give vectors (D,) or images (C, H, W).")
        if made.dtype != torch.uint8 or made.ndim == 1:
            return made.to(torch.float32)
        made = channels_first(made, 3)
        if self.size is not None and len(made) in CHANNELS:
            picture = Image.fromarray(made.permute(1, 2, 0).squeeze(2).numpy())
            made = channels_first(torch.from_numpy(np.array(squeezed(picture, self.size))), 3)
        return made


# -- details -----------------------------------------------------------------------------------------------------------
def array(data: Any) -> Tensor:
    """Samples that are numbers already: uint8 pictures, or floats."""
    if isinstance(data, Tensor):
        made = data.detach().cpu()
    else:
        try:
            given = np.asarray(data)
        except ValueError as error:
            raise DataError("The samples differ in size, and one array must hold them: bring them to one.") from error
        if given.dtype.kind not in "biuf":
            raise DataError(f"The data are {given.dtype}, and not numbers: give an array of numbers.")
        if given.dtype.kind == "u" and given.itemsize > 1:
            given = given.astype(np.float32)  # torch has few of these types
        made = torch.from_numpy(given if given.flags.writeable else given.copy())
    if made.is_complex() or made.ndim < 2 or made.numel() == 0:
        raise DataError(
            f"The data have dtype {made.dtype} and shape {tuple(made.shape)}: give vectors (N, D), or images "
            "(N, C, H, W)."
        )
    if made.dtype == torch.uint8 and made.ndim in (3, 4):
        return channels_first(made, 4)
    if made.ndim == 4 and made.shape[1] not in CHANNELS and made.shape[3] in CHANNELS:
        log.warning(
            "Images of shape %s are taken as channels first, (C, H, W): permute them if they are not.",
            tuple(made.shape[1:]),
        )
    return finite(made.to(torch.float32).contiguous())


def channels_first(pictures: Tensor, axes: int) -> Tensor:
    """(H, W), (H, W, C) or (C, H, W) as (C, H, W), with 3 `axes`; with 4, a batch of them."""
    if pictures.ndim == axes - 1:
        return pictures.unsqueeze(-3)
    if pictures.ndim != axes:
        raise DataError(f"A picture has the shape {tuple(pictures.shape[axes - 3 :])}: give (C, H, W).")
    last = pictures.shape[-3] not in CHANNELS and pictures.shape[-1] in CHANNELS
    return pictures.movedim(-1, -3).contiguous() if last else pictures


def parted(item: Any, image: str, label: str, alone: bool) -> tuple[Any, Any]:
    """A sample and its label; `alone`: the label is known, and may be missing here."""
    if isinstance(item, Mapping):
        missing = next((name for name in (image, *([] if alone else [label])) if name not in item), None)
        if missing is not None:
            raise DataError(f"A sample has no '{missing}': give image= and label=, of {', '.join(map(str, item))}.")
        return item[image], None if alone else item[label]
    pair = isinstance(item, tuple | list) and len(item) >= 2
    if not pair and not alone:
        raise DataError(f"A sample is {described(item)}: let the data set give (image, label), or give labels=....")
    return (item[0], item[1]) if pair and not (alone and isinstance(item[0], int | float)) else (item, None)


def vectors(columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]], row: str = "sample", first: int = 0) -> Tensor:
    """Columns of numbers, or of what reads as one, as rows (N, D). What is missing is told of all columns at once, in
    `row`s that are counted from `first`."""
    made, lacking = list[Any](), list[str]()
    for name, cells in columns.items():
        try:
            numbers = np.array([np.nan if cell is None or cell == "" else cell for cell in cells]).astype(np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"The column '{name}' does not hold numbers ({error}), and features are numbers: write it as numbers "
                "(pandas.get_dummies), or leave it out of the table."
            ) from error
        lost = first + np.flatnonzero(~np.isfinite(numbers))
        lacking += [f"{numbered(row, lost.tolist())} of the column '{name}'"] if len(lost) else []
        made.append(numbers)
    if lacking:
        raise DataError(f"There is no finite number in {' and '.join(lacking)}: fill them in, or leave such rows out.")
    return torch.from_numpy(np.stack(made, axis=1).astype(np.float32))


def finite(values: Tensor) -> Tensor:
    """The same, or a sentence that names the first place that is not a finite number."""
    if values.is_floating_point() and not values.isfinite().all():
        row, place = values.flatten(1).isfinite().logical_not().nonzero()[0].tolist()
        raise DataError(
            f"Sample {row} has no finite number at place {place} ({values.flatten(1)[row, place].item()}): fill in "
            "what is missing, or leave such samples out."
        )
    return values
