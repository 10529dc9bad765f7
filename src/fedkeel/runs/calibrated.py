"""A trained model for one site: the site's own statistics, mixed with the federation's, from a few images without
labels. See docs/calibration.md for the rule, and `fedkeel.nn.calibration` for how it is carried out.

    site = fedkeel.calibrate("runs/hospitals", "scans/")
    print(site)                                      # how far its images are from the federation's, and what came of it
    site.trained.predict("new/").classes
    site.save("north.safetensors")                   # fedkeel.load("runs/hospitals", calibrated="north.safetensors")
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedkeel
from fedkeel.core.client import Batch
from fedkeel.data.federation import Federation
from fedkeel.data.transforms import Unknown
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import PRIOR, Calibration, Calibrator, refuse_without_statistics
from fedkeel.nn.scaled_ws_conv import fold
from fedkeel.options import NotNegative, as_path, checked, described
from fedkeel.runs.export import FORMATS, describe, origin, target, write
from fedkeel.runs.run import Run
from fedkeel.runs.site_model import SiteModel
from fedkeel.runs.store import MODEL
from fedkeel.runs.trained import BATCH, Deployed, Trained, as_tested, deployed

ENDINGS = {".safetensors": "safetensors", **{ending: name for name, ending in FORMATS.items()}}


@dataclass(frozen=True)
class _Source:
    """What is calibrated: a network of our own, and what is known of it."""

    network: nn.Module
    name: str  # the beginning of a sentence
    reader: Trained | None = None  # reads images as the network was tested with; None where nobody knows how
    shape: tuple[int, ...] | None = None  # that the network takes, if known
    run: Run | None = None
    federation: Federation | None = None
    client: str | None = None


@dataclass(frozen=True, repr=False)
class Calibrated:
    """A model for one site, made by `fedkeel.calibrate`, which has an example. Printed, it says what was found.

    Attributes:
        model: the calibrated copy, in evaluation mode; entries are named as in what was given.
        calibration: how far the site's images are from the federation's, and what came of it.
        changed: how many of the images it takes for another class than the model that was given.
        trained: the same, to classify images with: see `Trained.predict`. None for a plain network, and where nobody
            knows how images become its input.
        unreadable: why an image was left out, by its path.
    """

    model: nn.Module
    calibration: Calibration
    changed: int
    trained: Trained | None
    unreadable: Mapping[str, str]
    _source: _Source
    _example: Tensor  # an image as the network takes it, (1, ...)

    def __repr__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> Iterator[str]:
        """For a person: how far the site is, what is expected, and what changes."""
        yield from self.calibration.sentences()
        if self.calibration.share:
            yield f"Taken for another class than before: {self.changed:,} of {self.calibration.images:,}."

    def to_dict(self) -> dict[str, Any]:
        """What was done: `calibration`, with the number of images that `changed` their class."""
        return {**self.calibration.to_dict(), "changed": self.changed}

    def save(self, file: str | Path, *, with_transform: bool = False) -> Path:
        """Write it to `file`, and what it is, with the record of what was done, to FILE.json beside it.

        Args:
            file: its name says what it becomes: .safetensors has the tensors, for `fedkeel.load(run, calibrated=file)`;
                .onnx and .pt2 run without Fedkeel, as what `fedkeel export` writes.
            with_transform: as for `fedkeel export`: take images as they are stored.
        """
        path, source, reader = as_path(file, "file"), self._source, self._source.reader
        format = check_file(path, with_transform=with_transform)
        if with_transform and reader is None:
            raise FedkeelError(f"How images become the input of {source.name} is not known here: prepare it yourself.")
        example, transform = self._example.cpu(), None
        if with_transform and reader is not None:
            # What its pixels are does not matter.
            dtype, transform = torch.float32 if reader.floats else torch.uint8, reader.transform
            example = torch.zeros(1, *reader.shape, dtype=dtype)
        about = describe(format, self._classes(), example)
        if source.run is not None and source.federation is not None:
            about |= origin(source.run, source.federation, source.client, done_inside=with_transform)
            about |= {"accuracy": None, "files": _checksums(source.run, source.client)}  # nobody has tested it
        about |= {"calibration": self.to_dict(), "version": fedkeel.__version__}
        if format == "safetensors":
            return SiteModel(self.model.state_dict(), about).write(path)
        return write(path, format, Deployed(fold(self.model), transform).cpu(), example, about)

    @torch.no_grad()
    def _classes(self) -> Sequence[str]:
        """Their names, or their numbers where they have none."""
        known = self._source.reader or self._source.federation
        if known is not None:
            return known.labels if isinstance(known, Trained) else known.classes
        return [str(number) for number in range(Deployed(self.model)(self._example).shape[1])]


def check_file(path: Path, *, with_transform: bool = False) -> str:
    """The format that a name says; refused before any image is read."""
    if path.suffix not in ENDINGS:
        raise FedkeelError(f"'{path}' does not say what it is to be: give a name that ends in {', '.join(ENDINGS)}.")
    if with_transform and path.suffix == ".safetensors":
        raise FedkeelError(
            f"'{path}' has tensors alone and no transform: leave --with-transform out, or write another kind of file."
        )
    return target(path, ENDINGS[path.suffix])


def calibrate(
    model: Run | Trained | nn.Module | str | Path,
    images: Any,
    prior: float = PRIOR,
    *,
    always: bool = False,
    client: str | None = None,
    tolerate: bool = False,
) -> Calibrated:
    """A copy of a trained model for one site: its normalisation gets the statistics of the site's images, which need no
    labels, mixed with the federation's. How much of each, the images decide: see docs/calibration.md.

    Args:
        model: a run or its directory, what `fedkeel.load` returns, or any network that gives logits. It stays as it is.
        images: of the site. For a run: as `Trained.predict` takes them, or a float tensor as the network takes it,
            (N, C, H, W). For a network: such a tensor, or batches of it.
        prior: how many images the federation's statistics are worth.
        always: take all that is different for the look of the images, whatever their class mix.
        client: whose model, for a method that keeps layers on its clients.
        tolerate: leave out what cannot be read, and say so in `unreadable`; else it is an error.

    >>> network = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    >>> site = fedkeel.calibrate(network, torch.randn(48, 3) + 7, prior=16, always=True)
    >>> site.calibration.images, site.calibration.share
    (48, 0.75)
    >>> bool((site.model[0].running_mean > 4).all()), network[0].running_mean.tolist()
    (True, [0.0, 0.0, 0.0])
    """
    prior, always = checked(prior, NotNegative, "'prior'"), checked(always, bool, "'always'")
    source = _source(model, client)
    refuse_without_statistics(source.network, source.name)
    unreadable: dict[str, str] = {}
    if source.run is not None and source.reader is None and not _is_float(images):
        raise FedkeelError(
            f"How images become what the network of '{source.run.directory}' sees is not known here, since it was done "
            "at its sites or by a transform given in Python: give fedkeel.calibrate a float tensor of its input."
        )
    # For a model of pixels, floats are what the network takes.
    reader = source.reader if source.reader and (source.reader.floats or not _is_float(images)) else None
    # Between passes they are kept as they are stored: pixels take a quarter of what the network sees.
    read = (batch for _, batch in reader.stored(images, unreadable if tolerate else None)) if reader else None
    stored = list(read or _given(images, source.shape))
    if not stored:
        few = f" ({next(iter(unreadable.values()))})" if unreadable else ""
        raise FedkeelError(f"There is no image to calibrate with{few}: give image files, or a folder that has some.")
    network, batches = Deployed(source.network).eval(), partial(_batches, source.network, stored, reader)
    before = _classes(network, batches(), source.name)
    calibration = Calibrator(source.network, network).calibrate(batches, prior, always=always)
    after = _classes(network, batches(), source.name) if calibration.share else before
    changed, example = int((before != after).sum()), next(batches()).x[:1]
    trained = source.reader and replace(source.reader, network=deployed(source.network))
    return Calibrated(source.network, calibration, changed, trained, unreadable, source, example)


def _source(model: Any, client: str | None) -> _Source:
    if isinstance(model, str | Path):
        model = Run(model)
    if isinstance(model, Run):
        network, federation = model.network(client)
        known = not isinstance(federation.test_transform, Unknown)
        reader = Trained.around(network, federation) if known else None
        shape = tuple(as_tested(federation.test_transform, federation.images[:1]).shape[1:])
        return _Source(network, f"The model of '{model.directory}'", reader, shape, model, federation, client)
    if client is not None:
        raise FedkeelError(f"The client '{client}' is one of a run: give the run, or leave it out.")
    if isinstance(model, Trained):
        inner = model.network.network if isinstance(model.network, Deployed) else model.network
        return _Source(copy.deepcopy(inner).eval(), "The model", model)
    if isinstance(model, nn.Module):
        return _Source(copy.deepcopy(model).eval(), "The model")
    raise FedkeelError(f"'model' is {described(model)}: give a run, its directory, or a network.")


def _checksums(run: Run, client: str | None) -> dict[str, str]:
    personal = [] if client is None else [run.personal_file(client, run.config.method)]
    return run.checksums([MODEL, *personal])


# -- images ----------------------------------------------------------------------------------------------------------
def _given(images: Any, shape: tuple[int, ...] | None) -> Iterator[Tensor]:
    """Batches as the network takes them."""
    several = isinstance(images, Iterable) and not isinstance(images, Tensor | np.ndarray | str)
    for batch in images if several else [images]:
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch  # with labels, as of a DataLoader
        if not _is_float(x) or x.ndim < 2 or (shape and tuple(x.shape[1:]) != shape):
            wanted = f"(N, {', '.join(map(str, shape))})" if shape else "(N, ...)"
            given = f"{x.dtype} of shape {tuple(x.shape)}" if hasattr(x, "dtype") else described(x)
            raise FedkeelError(f"The images are {given}: give a float tensor as the network takes it, {wanted}.")
        tensor = torch.as_tensor(x).detach()
        if not tensor.isfinite().all():
            raise FedkeelError("The images have a value that is not a finite number: leave out what is broken.")
        yield from (part for part in torch.split(tensor, BATCH) if len(part))


def _is_float(images: Any) -> bool:
    if isinstance(images, Tensor):
        return images.is_floating_point()
    return isinstance(images, np.ndarray) and images.dtype.kind == "f"


def _batches(network: nn.Module, stored: Iterable[Tensor], reader: Trained | None) -> Iterator[Batch]:
    """As the network takes them; nobody looks at the labels."""
    device = next((tensor.device for tensor in network.state_dict().values()), torch.device("cpu"))
    for images in stored:
        x = (images if reader is None else as_tested(reader.transform, images)).to(device)
        yield Batch(x, torch.zeros(len(x), dtype=torch.int64, device=device))


@torch.no_grad()
def _classes(network: nn.Module, batches: Iterable[Batch], name: str) -> Tensor:
    found = []
    for batch in batches:
        logits = network(batch.x)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise FedkeelError(f"{name} does not give logits, (N, classes), of a batch: give one that does.")
        found.append(logits.argmax(1).cpu())
    return torch.cat(found)
