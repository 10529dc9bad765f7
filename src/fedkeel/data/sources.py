"""Samples out of what people have in Python: arrays, tables, torch data sets, Hugging Face data sets.

Pictures become uint8, (N, C, H, W). All else becomes float32 and is otherwise taken as it is: float images
(N, C, H, W), vectors (N, D). torch's and Hugging Face's data sets are read once, sample by sample, into memory; how
much they will take is computed from the first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedkeel.data.formats.images import Depth, rgb
from fedkeel.errors import DataError, numbered, unknown
from fedkeel.options import Count, check_fields, described

log = logging.getLogger("fedkeel")
PATIENCE = 3.0  # seconds of reading after which a person is shown how far it is
CHANNELS = (1, 3)  # of pictures: which axis has as many is theirs
ROWS = 65536  # looked at together for values that are not finite


@dataclass(frozen=True)
class Samples:
    """What was read: the store, a label for each sample as it was given, and the classes' names where these are known.

    `column(name)` gives what else the source knows of each sample.
    """

    values: Tensor
    labels: Any
    column: Callable[[str], Any]
    classes: Sequence[str] | None = None
    columns: tuple[str, ...] = ()  # the names of a vector's numbers


@dataclass(frozen=True)
class Source:
    """How data are read."""

    name: str = "own"  # for messages and reports
    image: str | None = None  # the column of images, of data that have columns
    label: str | None = None  # and that of labels
    size: Count | None = None  # images are squeezed to size x size pixels
    split_seed: int = 0  # of the shares for testing and validation
    verbose: bool | None = None  # show how far a long reading is; by default where a person looks
    others: frozenset[str] = frozenset()  # columns that are no features

    def __post_init__(self) -> None:
        check_fields(self)

    def read(self, data: Any, labels: Any) -> Samples:
        if isinstance(labels, str):
            raise DataError(f"'labels' is {labels!r}: a column is named with label={labels!r}.")
        if labels is not None and self.label is not None:
            raise DataError("The labels are given twice, as 'labels' and as a column, 'label': keep one.")
        refuse_strange(data)
        if hasattr(data, "iloc") and hasattr(data, "columns"):
            return self._table(data, labels)
        if hasattr(data, "features") and hasattr(data, "column_names"):
            return self._hugging_face(data, labels)
        if isinstance(data, np.ndarray | Tensor) or is_rows(data):
            if labels is None:
                raise DataError("An array says nothing of its samples' classes: give labels=..., one for each sample.")
            return Samples(self._array(data), labels, self._no_column)
        values, found = self._items(data, labels, self.image or "image", self.label or "label")
        classes = getattr(data, "classes", None)  # as torchvision's data sets have them
        return Samples(values, found, self._no_column, classes if isinstance(classes, list | tuple) else None)

    def _no_column(self, name: str) -> Any:
        raise DataError(f"'{name}' would be a column, and these data have none: give an array, one entry per sample.")

    # -- each kind ---------------------------------------------------------------------------------------------
    def _table(self, table: Any, labels: Any) -> Samples:
        """A pandas DataFrame: every column that has no other part is a feature."""

        def column(name: str) -> Any:
            if name not in table.columns:
                raise DataError(unknown("column", name, [str(known) for known in table.columns]))
            return table[name].to_numpy()

        if labels is None and self.label is None:
            raise DataError("Which column is the label is not said: give label='name of the column'.")
        found = column(self.label) if self.label else labels
        for name in self.others:
            column(name)
        features = [name for name in table.columns if name != self.label and name not in self.others]
        if not features or not table.columns.is_unique:
            raise DataError("The table has no column that could be a feature, or two of one name: see to its columns.")
        for name in features:
            if table[name].dtype.kind not in "biuf":
                raise DataError(
                    f"The column '{name}' holds {table[name].dtype}, and features are numbers: write it as numbers "
                    "(pandas.get_dummies), or leave it out of the table."
                )
        values = torch.from_numpy(table[features].to_numpy(np.float32, na_value=np.nan).copy())
        columns = tuple(map(str, features))
        return Samples(finite(values, columns), found, column, columns=columns)

    def _hugging_face(self, data: Any, labels: Any) -> Samples:
        data = data.with_format(None)

        def find(kind: str, given: str | None, wanted: str) -> str | None:
            if given is not None and given not in data.column_names:
                raise DataError(unknown("column", given, data.column_names))
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
        label = self.label if labels is not None else find("ClassLabel", self.label, "label")
        if labels is None and label is None:
            raise DataError(
                f"Which column is the label is not said: give label=, one of {', '.join(data.column_names)}."
            )
        classes = getattr(data.features[label], "names", None) if label else None
        if image is None:  # numbers: a table
            samples = replace(self, label=label)._table(data.to_pandas(), labels)
            return replace(samples, column=column, classes=classes)
        found = labels if labels is not None or label is None else list(data[label])
        values, _ = self._items(data, found, image, "")
        return Samples(values, found, column, classes)

    def _array(self, data: Any) -> Tensor:
        if isinstance(data, Tensor):
            array = data.detach().cpu()
        else:
            try:
                given = np.asarray(data)
            except ValueError as error:
                raise DataError(
                    "The samples differ in size, and one array must hold them: bring them to one."
                ) from error
            if given.dtype.kind not in "biuf":
                raise DataError(f"The data are {given.dtype}, and not numbers: give an array of numbers.")
            if given.dtype.kind == "u" and given.itemsize > 1:
                given = given.astype(np.float32)  # torch has few of these types
            array = torch.from_numpy(given if given.flags.writeable else given.copy())
        if array.is_complex() or array.ndim < 2 or array.numel() == 0:
            raise DataError(
                f"The data have dtype {array.dtype} and shape {tuple(array.shape)}: give vectors (N, D), or images "
                "(N, C, H, W)."
            )
        if array.dtype == torch.uint8 and array.ndim in (3, 4):
            return pictures(array, many=True)
        if array.ndim == 4 and array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS:
            log.warning("Images of shape %s are taken as channels first, (C, H, W): permute them if they are not.",
                        tuple(array.shape[1:]))  # fmt: skip
        return finite(array.to(torch.float32).contiguous())

    def _items(self, data: Any, labels: Any, image: str, label: str) -> tuple[Tensor, Any]:
        """Sample after sample of what has a length and can be indexed; without `labels`, with those beside them."""
        count = len(data)
        if count == 0:
            raise DataError(f"'{self.name}' has no samples: give some.")
        first = self._sample(parted(data[0], image, label, labels is not None)[0], 0, Depth())
        found, depth = list[Any](), Depth()
        values = torch.empty(count, *first.shape, dtype=first.dtype)
        for number in counted(count, f"Reading {self.name}", self.verbose):
            sample, own = parted(data[number], image, label, labels is not None)
            array = self._sample(sample, number, depth)
            if array.shape != first.shape or array.dtype != first.dtype:
                raise DataError(
                    f"Sample {number} is {array.dtype} of shape {tuple(array.shape)} and sample 0 {first.dtype} of "
                    f"{tuple(first.shape)}: bring all to one, images with size=64 or a transform of their own."
                )
            values[number] = array
            found.append(own.item() if isinstance(own, Tensor | np.generic) and own.ndim == 0 else own)
        for sentence in depth.sentences("scans of so many bits are for the data set's own transform to scale"):
            log.warning("Of '%s', %s", self.name, sentence)
        return finite(values), found if labels is None else labels

    def _sample(self, sample: Any, number: int, depth: Depth) -> Tensor:
        """One sample as it is stored."""
        if isinstance(sample, Image.Image):
            array = torch.from_numpy(np.array(sample if sample.mode in ("L", "F") else rgb(sample, depth, str(number))))
        else:
            try:
                array = sample.detach().cpu() if isinstance(sample, Tensor) else torch.from_numpy(np.array(sample))
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"Sample {number} is {described(sample)}: give PIL images, arrays or tensors of numbers."
                ) from error
        if array.ndim == 0:
            raise DataError(f"Sample {number} is a single number: give vectors (D,) or images (C, H, W).")
        if isinstance(sample, Image.Image) or (array.dtype == torch.uint8 and array.ndim > 1):
            array = pictures(array, many=False)
        array = array if array.dtype == torch.uint8 and array.ndim == 3 else array.to(torch.float32)
        return array if self.size is None or array.ndim != 3 else resized(array, self.size)


# -- details -----------------------------------------------------------------------------------------------------------
def refuse_strange(data: Any) -> None:
    """What is not data, in the words of what to give instead."""
    ending = ""
    if isinstance(data, DataLoader):
        ending = "give its data set, loader.dataset."
    elif isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__len__")):
        ending = "samples are looked up by their number, in any order; give list(data), or a data set with a length."
    elif isinstance(data, Mapping):
        ending = "give one of its parts, such as data['train'], or all of them joined."
    elif isinstance(data, str | bytes):
        ending = "a data set that has a name is read by fedkeel.data.load."
    elif not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        ending = "give arrays, a pandas table, or a torch or Hugging Face data set."
    if ending:
        raise DataError(f"The data are {described(data)}: {ending}")


def is_rows(data: Any) -> bool:
    """Whether a list holds rows of numbers, and not samples that are to be looked at one by one."""
    return isinstance(data, list | tuple) and bool(data) and isinstance(data[0], list | int | float)


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


def pictures(array: Tensor, *, many: bool) -> Tensor:
    """Channels first: (H, W), (H, W, C) or (C, H, W) as (C, H, W); with `many`, of a batch of them."""
    if array.ndim == 2 + many:
        return array.unsqueeze(-3)
    if array.ndim != 3 + many:
        raise DataError(f"A picture has the shape {tuple(array.shape[many:])}: give (C, H, W).")
    last = array.shape[-3] not in CHANNELS and array.shape[-1] in CHANNELS
    return array.movedim(-1, -3).contiguous() if last else array


def resized(image: Tensor, size: int) -> Tensor:
    """Squeezed to a square: pictures as those that are read from files, other numbers alike."""
    if tuple(image.shape[1:]) == (size, size):
        return image
    if image.dtype == torch.uint8 and len(image) in CHANNELS:
        picture = Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())
        return pictures(torch.from_numpy(np.array(picture.resize((size, size), Image.Resampling.BILINEAR))), many=False)
    smooth = F.interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True, align_corners=False)[0]
    return smooth.round().to(torch.uint8) if image.dtype == torch.uint8 else smooth


def finite(values: Tensor, names: Sequence[str] = ()) -> Tensor:
    """The same, or a sentence that names the first value that is not a finite number."""
    for start in range(0, len(values), ROWS) if values.is_floating_point() else ():
        rows = values[start : start + ROWS].flatten(1)
        if not rows.isfinite().all():
            row, place = (int(number) for number in rows.isfinite().logical_not().nonzero()[0])
            where = f"in the column '{names[place]}'" if names else f"at place {place}"
            lost = values.flatten(1)[:, place].isfinite().logical_not().nonzero().flatten().tolist()
            have = "has" if len(lost) == 1 else "have"
            raise DataError(
                f"{numbered('Sample', lost)} {have} no finite number {where} ({rows[row, place].item()}): fill in "
                "what is missing, or leave such samples out."
            )
    return values


def counted(count: int, what: str, verbose: bool | None = None) -> Iterator[int]:
    """The numbers below `count`; where it takes long and a person looks, with a bar; or as told."""
    began = time.monotonic()
    for number in range(count):
        yield number
        if time.monotonic() - began > PATIENCE:
            break
    else:
        return
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    hidden = not (console.is_terminal or console.is_jupyter) if verbose is None else not verbose
    rest = range(number + 1, count)
    yield from track(rest, what, total=count, completed=number, console=console, transient=not verbose, disable=hidden)
