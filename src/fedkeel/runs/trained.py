"""A trained model to be used: the network, how images become its input, and what it says of them.

    trained = fedkeel.load("runs/hospitals")
    trained.predict("new/").classes
    trained.evaluate("labelled/").of("auc")
    trained.network(trained.preprocess(["a.png", "b.png"]))         # logits, (2, C)

A run directory holds all of it: neither the data nor the weights that the run started from need to be there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fedkeel.core.readable import csv_table
from fedkeel.data.federation import Federation, Transform, called
from fedkeel.data.formats.folders import is_litter
from fedkeel.data.formats.images import Depth, is_image, open_image, reason, rgb
from fedkeel.data.formats.lists import read_table
from fedkeel.errors import FedkeelError, quoted
from fedkeel.files import explained
from fedkeel.nn.scaled_ws_conv import fold
from fedkeel.options import described
from fedkeel.runs.evaluated import evaluate
from fedkeel.runs.measures import Measures

log = logging.getLogger("fedkeel")

BATCH = 64
DEEP = (1, 3, 4)  # channels of a picture: grey, colours, and these with transparency


class Deployed(nn.Module):
    """Images -> logits; with a transform, images as they are stored, uint8, -> logits."""

    def __init__(self, network: nn.Module, transform: Transform | None = None) -> None:
        super().__init__()
        self.network, self.transform = network, transform

    def forward(self, x: Tensor) -> Tensor:
        found = self.network(x if self.transform is None else as_tested(self.transform, x))
        logits: Tensor = found.logits if hasattr(found, "logits") else found
        return logits


def deployed(network: nn.Module) -> Deployed:
    """A copy that is not trained any further, with plain layers."""
    return Deployed(fold(network)).eval().requires_grad_(False)


def as_tested(transform: Transform, images: Tensor) -> Tensor:
    """A transform that draws gets the middle of each range, as in evaluation."""
    return transform(images, torch.full((1, transform.draws), 0.5, device=images.device))


@dataclass(frozen=True)
class Predictions:
    """What a model says of some images, in their order.

    >>> found = Predictions(["a.png"], torch.tensor([[0.1, 0.9]]), ["cat", "dog"])
    >>> found.classes, [round(share, 2) for share in found.confidence]
    (['dog'], [0.9])
    """

    images: Sequence[str]  # paths, or numbers from 0
    probabilities: Tensor  # (N, C)
    labels: Sequence[str]  # the class that each column is of
    unreadable: Mapping[str, str] = field(default_factory=dict)  # why an image is not among them, by its path
    unit: str = "image"  # or "row": what each is

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"Predictions({len(self)} {self.unit}s, {len(self.labels)} classes)"

    @property
    def classes(self) -> list[str]:
        """Of each image the class with the highest probability."""
        return [self.labels[index] for index in self.probabilities.argmax(1).tolist()]

    @property
    def confidence(self) -> list[float]:
        """Of each image that probability."""
        found: list[float] = self.probabilities.amax(1).tolist()
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        """A line for each image: its name, class and probability, and the probability of every class."""
        for image, name, p, each in zip(
            self.images, self.classes, self.confidence, self.probabilities.tolist(), strict=True
        ):
            yield {self.unit: image, "class": name, "probability": p, **dict(zip(self.headings(), each, strict=True))}

    def headings(self) -> list[str]:
        return [f"p({label})" for label in self.labels]

    def to_csv(self, path: str | Path) -> Path:
        """Write the rows, with six digits."""
        headings = [self.unit, "class", "probability", *self.headings()]
        lines = [[f"{v:.6f}" if isinstance(v, float) else v for v in row.values()] for row in self.rows()]
        with explained(Path(path), ""):
            Path(path).write_bytes(csv_table([headings, *lines]).encode())
        return Path(path)


@dataclass(frozen=True)
class Trained:
    """A trained network in evaluation mode, and what belongs to it.

    No example here: it comes of a run, see `fedkeel.load`.
    """

    network: nn.Module  # float images, (N, C, H, W), -> logits
    labels: tuple[str, ...]  # names of the classes, in the order of the logits
    shape: tuple[int, ...]  # channels, height and width that images are brought to before they are transformed
    transform: Transform  # as stored -> float, as in testing
    floats: bool = False  # samples are float arrays of that shape, a vector's is (D,), and are taken as they are
    columns: tuple[str, ...] = ()  # the names of a vector's numbers
    bits: int | None = None  # that grey images of 16 bits use
    table: Mapping[str, str] = field(default_factory=dict)  # the names of its columns, where they were others

    @staticmethod
    def around(network: nn.Module, federation: Federation, table: Mapping[str, str] | None = None) -> Trained:
        """A network, folded, and what the data that it was trained on say of its input."""
        floats = federation.images.is_floating_point()
        data = (tuple(federation.classes), federation.image_shape, federation.test_transform, floats)
        return Trained(deployed(network), *data, federation.columns, federation.bits, table or {})

    def preprocess(self, images: Any) -> Tensor:
        """Images as the network takes them, (N, C, H, W); `images` as in `predict`."""
        found = [stored for _, stored in self.stored(images)]
        if not found:
            raise FedkeelError("There is no image: give paths, PIL images, arrays, or a folder that has some in it.")
        return as_tested(self.transform, torch.cat(found))

    @torch.no_grad()
    def predict(self, images: Any, *, tolerate: bool = False, batch: int = BATCH) -> Predictions:
        """Classes and probabilities of images.

        Args:
            images: a path or a folder, a PIL image, a uint8 array or tensor, (H, W), (H, W, C), (C, H, W), or N of
                these, or a sequence of any of these. For a model of float images or vectors: an array, tensor or
                table (N, *shape), one sample of that shape, or a file of either (.npy, .csv). Tables are read by the
                names of the columns that it was trained on, where both have names.
            tolerate: leave out what cannot be read, and say so in `unreadable`; else it is an error.
            batch: images at a time.
        """
        unreadable: dict[str, str] = {}
        names, logits = self.logits(images, unreadable if tolerate else None, batch)
        return Predictions(names, logits.softmax(1), self.labels, unreadable, called(self.shape))

    @torch.no_grad()
    def logits(
        self, images: Any, unreadable: dict[str, str] | None = None, batch: int = BATCH
    ) -> tuple[list[str], Tensor]:
        """The names and logits, (N, C), of images as in `predict`; what cannot be read as in `stored`."""
        names: list[str] = []
        found: list[Tensor] = []
        device = next(self.network.parameters()).device
        for some, stored in self.stored(images, unreadable, batch):
            found.append(self.network(as_tested(self.transform, stored).to(device)).float().cpu())
            names += some
        if not found:
            few = f" ({next(iter(unreadable.values()))})" if unreadable else ""
            raise FedkeelError(f"There is no image to look at{few}: give image files, or a folder that has some in it.")
        return names, torch.cat(found)

    def evaluate(self, data: Any, labels: Any = None, *, sites: Any = None) -> Measures:
        """How good the model is on labelled images: every measure by site and class, with its 95 % interval.

        Args:
            data: a folder, DIR/CLASS/*.png or DIR/SITE/CLASS/*.png; a table (CSV) with the columns path, label and, if
                there are any, site; an .npz file with x_<site> and y_<site>; the name of a data set with its options,
                or a federation: of these the test images; pairs of image and label, as a torch data set has; or images
                as in `predict`, with `labels`.
            labels: of images that say nothing of their classes: names, or numbers in the order of the model's classes.
            sites: of each of these, the site where it is from.
        """
        return evaluate(self, data, labels, sites)

    def stored(
        self, images: Any, unreadable: dict[str, str] | None = None, batch: int = BATCH
    ) -> Iterator[tuple[list[str], Tensor]]:
        """Names and images as the data set stores them, so many at a time; `images` as in `predict`. What cannot be
        read goes into `unreadable`, and is an error without it."""
        everything, depth = self._each(images), Depth(self.bits)
        while some := list(islice(everything, batch)):
            names, read = list[str](), list[Tensor]()
            for name, picture in some:
                try:
                    read.append(self._stored(picture, name, depth))
                    names.append(name)
                except FedkeelError as error:
                    if unreadable is None:
                        raise
                    unreadable[name] = str(error)
            if read:
                yield names, torch.stack(read)
        for sentence in depth.sentences("if the model was trained on brighter ones, scale them to 16 bits first"):
            log.warning(sentence)

    def _each(self, images: Any) -> Iterator[tuple[str, Any]]:
        if not self.floats:
            return pictures(images, self.shape)
        found = float_samples(images, self.shape, self.columns)
        return ((str(number), sample) for number, sample in enumerate(found))

    def _stored(self, picture: Any, name: str, depth: Depth) -> Tensor:
        """As the data set stores its images: uint8, (C, H, W), or floats."""
        if self.floats:
            if not picture.isfinite().all():
                raise FedkeelError(f"The sample {name} has a value that is not a finite number: fill it in.")
            return picture  # type: ignore[no-any-return]
        if tuple(getattr(picture, "shape", ())) == self.shape:
            return picture.cpu() if isinstance(picture, Tensor) else torch.from_numpy(picture.copy())
        channels, height, width = self.shape
        try:
            image = opened(picture, depth, name)
            if channels == 3:
                image = rgb(image, depth, name)
            elif channels == 1 and image.mode != "L":
                image = rgb(image, depth, name).convert("L")
            if image.size != (width, height):
                image = image.resize((width, height), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, np.uint8)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises errors of many kinds for a broken file
            raise FedkeelError(f"The image '{name}' cannot be read: {reason(error)}.") from error
        return torch.from_numpy(pixels.reshape(height, width, channels).transpose(2, 0, 1).copy())


def opened(given: Any, depth: Depth, name: str) -> Image.Image:
    if isinstance(given, Path):
        with open_image(given, depth, name) as image:
            return image
    if isinstance(given, Image.Image):
        return given
    array = given.cpu().numpy() if isinstance(given, Tensor) else given
    if array.ndim == 3 and array.shape[0] in DEEP and (isinstance(given, Tensor) or array.shape[2] not in DEEP):
        array = array.transpose(1, 2, 0)
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def float_samples(given: Any, shape: tuple[int, ...], columns: Sequence[str] = ()) -> Tensor:
    """Samples of this shape, (N, *shape), from an array, a table, or files; by the names of columns, if there are."""
    if isinstance(given, list | tuple) and given and isinstance(given[0], str | Path):
        return torch.cat([float_samples(one, shape, columns) for one in given])
    try:
        if isinstance(given, str | Path):
            given = _numbers_in(Path(given), columns)
        elif columns and hasattr(given, "iloc"):  # a table, or a row of one
            named = (given if hasattr(given, "columns") else given.to_frame().T).rename(columns=str)
            _check_columns("The table", named.columns, columns)
            given = named[list(columns)]
        array = given.detach().cpu() if isinstance(given, Tensor) else torch.from_numpy(np.array(given, np.float32))
    except FedkeelError:  # which is a ValueError, and says itself what is to be done
        raise
    except (OSError, TypeError, ValueError) as error:
        what = f"'{given}' has" if isinstance(given, str | Path) else "What is given are"
        raise FedkeelError(
            f"{what} no numbers ({reason(error)}): this model takes arrays of shape (N, {', '.join(map(str, shape))})."
        ) from error
    found = array.float()[None] if array.shape == shape else array.float()
    if found.shape[1:] != shape or found.ndim < 2:
        raise FedkeelError(
            f"The samples have the shape {tuple(array.shape)}: give (N, {', '.join(map(str, shape))}), as in training."
        )
    return found


def _numbers_in(file: Path, columns: Sequence[str]) -> Any:
    if file.suffix.lower() == ".npy":
        return np.load(file, allow_pickle=False)
    if file.suffix.lower() != ".csv":
        raise ValueError("it is neither .csv nor .npy")
    table = read_table(file, ()) if columns else []
    if table and (set(columns) <= set(table[0]) or any(np.isnan(_number(cell)) for cell in table[0])):  # a heading
        _check_columns(f"'{file}'", table[0], columns)
        return np.array([[_number(row[column]) for column in columns] for row in table], np.float32)
    rows = np.genfromtxt(file, np.float32, delimiter=",", ndmin=2)
    return rows[1:] if len(rows) and np.isnan(rows[0]).all() else rows  # without the names of the columns


def _check_columns(what: str, present: Iterable[Any], columns: Sequence[str]) -> None:
    known = list(present)
    if missing := [column for column in columns if column not in known]:
        raise FedkeelError(
            f"{what} lacks {quoted(missing)}: it must have every column that the model was trained on, in any order."
        )


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan


def pictures(images: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Every image with its name: a path, or its number; `shape` is that of training."""
    for number, (name, picture) in enumerate(_each(images, shape)):
        yield name or str(number), picture


def _each(images: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(images, str | Path):
        yield from _files(Path(images))
    elif isinstance(images, Image.Image):
        yield "", images
    elif isinstance(images, np.ndarray | Tensor):
        if images.dtype not in (np.uint8, torch.uint8) or images.ndim not in (2, 3, 4):
            raise FedkeelError(
                f"The images have dtype {images.dtype} and shape {tuple(images.shape)}: give uint8, (H, W), "
                "(H, W, C), (C, H, W), or several of these."
            )
        ends = (images.shape[0], images.shape[-1])
        grey = images.ndim == 3 and (shape == (1, *images.shape[1:]) or not any(end in DEEP for end in ends))
        yield from (("", image) for image in (images if images.ndim == 4 or grey else [images]))
    elif isinstance(images, Sequence):
        for image in images:
            yield from _each(image, shape)
    else:
        raise FedkeelError(f"The images are {described(images)}: give paths, PIL images, arrays, or a folder.")


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.exists():
        raise FedkeelError(f"'{path}' does not exist: give an image, or a folder that has some in it.")
    if not path.is_dir():
        yield str(path), path
        return
    below = (file for file in sorted(path.rglob("*")) if file.is_file() and is_image(file))
    yield from ((str(file), file) for file in below if not any(map(is_litter, file.relative_to(path).parts)))
