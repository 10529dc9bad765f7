"""Colour transforms: jitter and greyscale, on batches with three channels and values in [0, 1]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel.data.source import number
from fedkeel.data.transforms import TRANSFORMS


@TRANSFORMS.register("grayscale")
@dataclass(frozen=True)
class Grayscale:
    """Replace the colours by their luminance with probability p, keeping three channels."""

    p: float = 0.1
    draws = 1

    def __post_init__(self) -> None:
        number("p in grayscale", self.p, 0, 1)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.where(u[:, :, None, None] < self.p, luminance(x).expand_as(x), x)


@TRANSFORMS.register("jitter")
@dataclass(frozen=True)
class ColourJitter:
    """Change brightness, contrast, saturation and hue at random, in this order.

    The first three are factors in [1 - v, 1 + v]; hue is shifted by up to v turns of the colour wheel.
    """

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.0
    draws = 4

    def __post_init__(self) -> None:
        for what in ("brightness", "contrast", "saturation"):
            number(f"{what} in jitter", getattr(self, what), 0, 1)
        number("hue in jitter", self.hue, 0, 0.5)

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
