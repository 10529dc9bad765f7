"""Transforms of colour: normalisation, greyscale and jitter; the last two on three channels with values in [0, 1]
(`of_colours`), and not on floats that may be anything."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from fedkeel.data.transforms import TRANSFORMS
from fedkeel.errors import DataError
from fedkeel.options import Range, Share, checked

STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@TRANSFORMS.register("normalise")
@dataclass(frozen=True)
class Normalise:
    """Subtract a mean and divide by a standard deviation, one for all channels or one per channel.

    `like` takes both from a data set: "imagenet" or "cifar10".
    """

    mean: float | Sequence[float] = 0.5  # of images with values in [0, 1]
    std: float | Sequence[float] = 0.5  # likewise
    like: str | None = None
    draws = 0

    def __post_init__(self) -> None:
        for what, given in (("mean", self.mean), ("std", self.std)):
            for value in given if isinstance(given, list | tuple) else [given]:
                checked(value, Annotated[float, Range(-1e6, 1e6)], f"{what} in normalise")
        if self.like is not None:
            if self.like not in STATISTICS:
                raise DataError(f"There are no statistics of '{self.like}': choose from {', '.join(STATISTICS)}.")
            mean, std = STATISTICS[self.like]
            object.__setattr__(self, "mean", mean)
            object.__setattr__(self, "std", std)
        if any(value <= 0 for value in channels(self.std)):
            raise DataError(f"std in normalise is {self.std}: every standard deviation must be above 0.")

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        # Where channels lie last, whole rows of them: a CPU would go three numbers at a time.
        row = x.shape[3] if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) else 0
        mean, std = (on_device(channels(values), x.device, x.ndim, row) for values in (self.mean, self.std))
        return (x - mean).div_(std)


def channels(values: float | Sequence[float]) -> tuple[float, ...]:
    return (float(values),) if isinstance(values, int | float) else tuple(float(value) for value in values)


@lru_cache(maxsize=64)
def on_device(values: tuple[float, ...], device: torch.device, ndim: int, row: int) -> Tensor:
    """Values for each channel of images, (1, C, 1, 1), or along a row of them with channels last, (1, C, 1, W); or for
    each feature of vectors. Made once: a CUDA graph cannot capture a copy from the host."""
    with torch.inference_mode(False):
        made = torch.tensor(values, dtype=torch.float32).to(device).view(1, -1, *[1] * (ndim - 2))
        by_row = row and len(values) > 1
        return made.expand(-1, -1, -1, row).contiguous(memory_format=torch.channels_last) if by_row else made


@TRANSFORMS.register("grayscale")
@dataclass(frozen=True)
class Grayscale:
    """Replace the colours by their luminance with probability p, keeping three channels."""

    p: Share = 0.1  # probability
    draws = 1
    of_colours = True

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.where(u[:, :, None, None] < self.p, luminance(x).expand_as(x), x)


@TRANSFORMS.register("jitter")
@dataclass(frozen=True)
class ColourJitter:
    """Change brightness, contrast, saturation and hue at random, in this order.

    The first three are factors in [1 - v, 1 + v]; hue is shifted by up to v turns of the colour wheel.
    """

    brightness: Share = 0.4  # most that it changes by, as a factor
    contrast: Share = 0.4  # likewise
    saturation: Share = 0.4  # likewise
    hue: Annotated[float, Range(0, 0.5)] = 0.0  # most turns of the colour wheel
    draws = 4
    of_colours = True

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        spread = 2 * u[:, :, None, None, None] - 1
        black = torch.zeros_like(x)
        x = blend(x, black, 1 + self.brightness * spread[:, 0])
        x = blend(x, luminance(x).mean(dim=(1, 2, 3), keepdim=True), 1 + self.contrast * spread[:, 1])
        x = blend(x, luminance(x), 1 + self.saturation * spread[:, 2])
        if self.hue:
            h, s, v = to_hsv(x)
            x = from_hsv((h + self.hue * spread[:, 3, :, :, 0]) % 1, s, v)
        return x


def luminance(x: Tensor) -> Tensor:
    """ITU-R 601 luma, of shape (N, 1, H, W)."""
    return 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]


def blend(x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """`factor` 1 keeps x, 0 gives `other`, more than 1 moves away from it; kept in [0, 1]."""
    return (other + factor * (x - other)).clamp(0, 1)


def to_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue, saturation and value, each of shape (N, H, W) in [0, 1]."""
    red, green, blue = x.unbind(1)
    value, chroma = x.amax(1), x.amax(1) - x.amin(1)
    safe = chroma.clamp(min=1e-12)
    from_green = (blue - red) / safe + 2
    from_blue = (red - green) / safe + 4
    hue = torch.where(value == red, (green - blue) / safe, torch.where(value == green, from_green, from_blue))
    return (hue / 6) % 1, chroma / value.clamp(min=1e-12), value


def from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """The colours (N, 3, H, W) of hue, saturation and value."""
    chroma = value * saturation
    bands = []
    for offset in (5, 3, 1):
        k = (offset + 6 * hue) % 6
        bands.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(bands, 1)
