"""Transforms of place and size: resize, crop, flip, rotation."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.data.transforms import TRANSFORMS
from fedkeel.errors import DataError
from fedkeel.options import Count, Range, Share, checked


@TRANSFORMS.register("resize")
@dataclass(frozen=True)
class Resize:
    """Resize to size x size pixels (bilinear, antialiased)."""

    size: Count = 224
    draws = 0

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        if x.shape[-2:] == (self.size, self.size):
            return x
        return F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True, align_corners=False)


@TRANSFORMS.register("crop")
@dataclass(frozen=True)
class Crop:
    """Pad with zeros on every side, then cut out a window of the old size at a random place."""

    padding: Annotated[int, Range(0)] = 4  # pixels on every side
    draws = 2

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

    p: Share = 0.5  # probability
    draws = 1

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return torch.where(u[:, :, None, None] < self.p, x.flip(-1), x)


@TRANSFORMS.register("rotation")
@dataclass(frozen=True)
class Rotation:
    """Rotate about the centre by a random angle in [-degrees, degrees]; what comes from outside is black."""

    degrees: Annotated[float, Range(0, 180)] = 30.0  # most, to either side
    draws = 1

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

    size: Count | None = None
    scale: tuple[float, float] = (0.7, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    draws = 4

    def __post_init__(self) -> None:
        for what, given, highest in (("scale", self.scale, 1.0), ("ratio", self.ratio, 100.0)):
            if not isinstance(given, list | tuple) or len(given) != 2:
                raise DataError(f"{what} in resized-crop is {given!r}: give a range, such as (0.7, 1.0).")
            low = checked(given[0], Annotated[float, Range(0.01, 100)], f"{what} in resized-crop")
            checked(given[1], Annotated[float, Range(low, highest)], f"the end of {what} in resized-crop")

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


def sample(x: Tensor, theta: Tensor, size: tuple[int, ...], padding: str) -> Tensor:
    """Look up, for every pixel of the result, where `theta` (N, 2, 3) says it comes from (bilinear)."""
    grid = F.affine_grid(theta.to(x.dtype), [len(x), x.shape[1], *size], align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=padding, align_corners=False)
