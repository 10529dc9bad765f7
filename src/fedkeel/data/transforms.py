"""Transforms of batches of images, on any device.

Each one works on a whole float batch (N, C, H, W) with values in [0, 1], and takes its randomness from outside: `u`,
uniform numbers of shape (N, draws). None asks the host anything, so all can be captured in a CUDA graph.

    parse_transforms("crop(padding=4)+flip+normalise(mean=0.5, std=0.5)")

Colour changes are in `fedkeel.data.colour`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import spec
from fedkeel.data.federation import Transform
from fedkeel.data.source import number, whole
from fedkeel.errors import DataError, FedkeelError
from fedkeel.registry import Registry

TRANSFORMS: Registry[Transform] = Registry("transform")

STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Pipeline:
    """Transforms one after another; a uint8 batch first becomes float32 in [0, 1]."""

    transforms: tuple[Transform, ...] = ()

    @property
    def draws(self) -> int:
        return sum(transform.draws for transform in self.transforms)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.to(torch.float32) / 255
        start = 0
        for transform in self.transforms:
            x = transform(x, u[:, start : start + transform.draws])
            start += transform.draws
        return x


def parse_transforms(text: str) -> Pipeline:
    """A pipeline from its text: transforms joined by `+`; the empty text only converts to float."""
    if not text.strip():
        return Pipeline()
    return Pipeline(tuple(TRANSFORMS.make(part.name, **part.options) for part in spec.parse_sum(text)))


@dataclass(frozen=True)
class Unknown(Pipeline):
    """Stands for a transform of which nothing is left but what it made of an image: its result is taken as it is."""


def transforms_text(transform: Transform) -> str | None:
    """The text that `parse_transforms` makes this very transform of; None for what cannot be written so."""
    if type(transform) is not Pipeline:
        return None
    names: dict[Any, str] = {entry.build: entry.name for entry in TRANSFORMS}
    parts: list[Any] = list(transform.transforms)
    if not all(type(part) in names and is_dataclass(part) for part in parts):
        return None
    given = [{f.name: getattr(part, f.name) for f in fields(part)} for part in parts]
    text = "+".join(str(spec.Spec(names[type(part)], options)) for part, options in zip(parts, given, strict=True))
    try:
        return text if parse_transforms(text) == transform else None
    except FedkeelError:
        return None


@TRANSFORMS.register("resize")
@dataclass(frozen=True)
class Resize:
    """Resize to size x size pixels (bilinear, antialiased)."""

    size: int = 224
    draws = 0

    def __post_init__(self) -> None:
        whole("size in resize", self.size, 1)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        if x.shape[-2:] == (self.size, self.size):
            return x
        return F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True, align_corners=False)


@TRANSFORMS.register("crop")
@dataclass(frozen=True)
class Crop:
    """Pad with zeros on every side, then cut out a window of the old size at a random place."""

    padding: int = 4
    draws = 2

    def __post_init__(self) -> None:
        whole("padding in crop", self.padding, 0)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        places = 2 * self.padding + 1
        # u just below 1 may round up to `places` in float32.
        offsets = (u * places).long().clamp(max=places - 1)
        rows = offsets[:, 0, None] + torch.arange(height, device=x.device)
        columns = offsets[:, 1, None] + torch.arange(width, device=x.device)
        padded = F.pad(x, [self.padding] * 4)
        samples = torch.arange(len(x), device=x.device)
        # Two steps of plain indexing between slices: (N, H, C, W + 2p), then (N, W, H, C).
        cut = padded.transpose(1, 2)[samples[:, None], rows]
        return cut.permute(0, 3, 1, 2)[samples[:, None], columns].permute(0, 3, 2, 1).contiguous()


@TRANSFORMS.register("flip")
@dataclass(frozen=True)
class Flip:
    """Mirror left and right with probability p."""

    p: float = 0.5
    draws = 1

    def __post_init__(self) -> None:
        number("p in flip", self.p, 0, 1)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.where(u[:, :, None, None] < self.p, x.flip(-1), x)


@TRANSFORMS.register("rotation")
@dataclass(frozen=True)
class Rotation:
    """Rotate about the centre by a random angle in [-degrees, degrees]; what comes from outside is black."""

    degrees: float = 30.0
    draws = 1

    def __post_init__(self) -> None:
        number("degrees in rotation", self.degrees, 0, 180)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        angle = (2 * u[:, 0] - 1) * (self.degrees * math.pi / 180)
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        # affine_grid has both axes in [-1, 1]: the ratio keeps angles right in images that are not square.
        ratio = x.shape[-2] / x.shape[-1]
        rows = (torch.stack([cos, -sin * ratio, zero], 1), torch.stack([sin / ratio, cos, zero], 1))
        return sample(x, torch.stack(rows, 1), tuple(x.shape[-2:]), "zeros")


@TRANSFORMS.register("resized-crop")
@dataclass(frozen=True)
class ResizedCrop:
    """Cut out a window of random area and aspect ratio and resize it to size x size pixels.

    `scale` is the range of the window's share of the area, `ratio` that of width over height. A window that would
    stick out is clipped at the image's border. `size=None` keeps the size of the image.
    """

    size: int | None = None
    scale: tuple[float, float] = (0.7, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    draws = 4

    def __post_init__(self) -> None:
        if self.size is not None:
            whole("size in resized-crop", self.size, 1)
        for what, given, highest in (("scale", self.scale, 1.0), ("ratio", self.ratio, 100.0)):
            if not isinstance(given, list | tuple) or len(given) != 2:
                raise DataError(f"{what} in resized-crop is {given!r}: give a range, such as (0.7, 1.0).")
            number(
                f"the end of {what} in resized-crop",
                given[1],
                number(f"{what} in resized-crop", given[0], 0.01, 100),
                highest,
            )

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        area = self.scale[0] + u[:, 0] * (self.scale[1] - self.scale[0])
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        aspect = torch.exp(low + u[:, 1] * (high - low)) * (x.shape[-2] / x.shape[-1])
        width = (area * aspect).sqrt().clamp(max=1)
        height = (area / aspect).sqrt().clamp(max=1)
        centre_x = (2 * u[:, 2] - 1) * (1 - width)
        centre_y = (2 * u[:, 3] - 1) * (1 - height)
        zero = torch.zeros_like(width)
        rows = (torch.stack([width, zero, centre_x], 1), torch.stack([zero, height, centre_y], 1))
        size = tuple(x.shape[-2:]) if self.size is None else (self.size, self.size)
        return sample(x, torch.stack(rows, 1), size, "border")


@TRANSFORMS.register("normalise")
@dataclass(frozen=True)
class Normalise:
    """Subtract a mean and divide by a standard deviation, one for all channels or one per channel.

    `like` takes both from a data set: "imagenet" or "cifar10".
    """

    mean: float | Sequence[float] = 0.5
    std: float | Sequence[float] = 0.5
    like: str | None = None
    draws = 0

    def __post_init__(self) -> None:
        for what, given in (("mean", self.mean), ("std", self.std)):
            for value in given if isinstance(given, list | tuple) else [given]:
                number(f"{what} in normalise", value, -1e6, 1e6)
        if self.like is not None:
            if self.like not in STATISTICS:
                raise DataError(f"There are no statistics of '{self.like}': choose from {', '.join(STATISTICS)}.")
            mean, std = STATISTICS[self.like]
            object.__setattr__(self, "mean", mean)
            object.__setattr__(self, "std", std)
        if any(value <= 0 for value in channels(self.std)):
            raise DataError(f"std in normalise is {self.std}: every standard deviation must be above 0.")

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return (x - on_device(channels(self.mean), x.device)) / on_device(channels(self.std), x.device)


def channels(values: float | Sequence[float]) -> tuple[float, ...]:
    return (float(values),) if isinstance(values, int | float) else tuple(float(value) for value in values)


@lru_cache(maxsize=64)
def on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Per-channel values as a (1, C, 1, 1) tensor, made once: a CUDA graph cannot capture a copy from the host."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32).to(device)[None, :, None, None]


def sample(x: Tensor, theta: Tensor, size: tuple[int, ...], padding: str) -> Tensor:
    """Look up, for every pixel of the result, where `theta` (N, 2, 3) says it comes from (bilinear)."""
    grid = F.affine_grid(theta.to(x.dtype), [len(x), x.shape[1], *size], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)
