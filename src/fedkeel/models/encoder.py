"""What the networks of this package have in common: images in, features out, and the arithmetic of image sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedkeel.errors import FedkeelError

ImageSize = int | tuple[int, int]
"""Height and width of the images in pixels; one number for square ones."""

Window = tuple[int, int, int]
"""Kernel, stride and padding of a convolution or pooling layer."""


class Projector(nn.Sequential):
    """UniVarFL's projector: two layers, each linear, batch norm and ReLU ("Models" of its Section 4).

    The regularisers of UniVarFL act on its output; the paper takes `width` 256 for the small CNN and 512 for ResNet-18.
    """

    def __init__(self, feature_dim: int, width: int) -> None:
        super().__init__(
            nn.Linear(feature_dim, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )


class Encoder(nn.Module):
    """Images (N, C, H, W) -> features (N, `feature_dim`). A network writes `extract`."""

    # A member of the encoder and not a module around it: the names of the network's own parameters stay the same
    # with and without a projector, so a checkpoint fits both.
    projector: nn.Module | None

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.projector = None

    def extract(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        features = self.extract(x)
        return features if self.projector is None else self.projector(features)

    def project(self, width: int) -> None:
        """Put UniVarFL's projector after the network; its output becomes the features."""
        self.projector = Projector(self.feature_dim, width)
        self.feature_dim = width


def height_width(image_size: ImageSize) -> tuple[int, int]:
    """`(height, width)`, checked."""
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or any(not isinstance(side, int) or side < 1 for side in pair):
        raise FedkeelError(f"image_size is {image_size!r}: give pixels as one number or as (height, width).")
    return pair[0], pair[1]


def feature_map_size(network: str, image_size: ImageSize, windows: Sequence[Window]) -> tuple[int, int]:
    """Height and width after a chain of convolutions and poolings; an image that does not survive it is refused."""
    height, width = height_width(image_size)
    sides = [_through(side, windows) for side in (height, width)]
    if min(sides) < 1:
        smallest = next(side for side in range(1, 4096) if _through(side, windows) >= 1)
        raise FedkeelError(
            f"The model '{network}' needs images of at least {smallest} x {smallest} px and these have "
            f"{height} x {width}: enlarge the images or choose a model with a smaller stem."
        )
    return sides[0], sides[1]


def check_image_shape(network: str, x: Tensor, expected: tuple[int, int]) -> None:
    """Refuse images of another size than the one that the first fully connected layer was made for."""
    if x.shape[-2:] != torch.Size(expected):
        raise FedkeelError(
            f"This '{network}' was built for images of {expected[0]} x {expected[1]} px and got "
            f"{x.shape[-2]} x {x.shape[-1]}: build it with image_size=({x.shape[-2]}, {x.shape[-1]})."
        )


def _through(side: int, windows: Sequence[Window]) -> int:
    for kernel, stride, padding in windows:
        if side + 2 * padding < kernel:
            return 0
        side = (side + 2 * padding - kernel) // stride + 1
    return side
