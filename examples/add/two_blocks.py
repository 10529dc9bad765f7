"""A small network without a flattened map: it takes images of every size."""

from __future__ import annotations

from torch import Tensor, nn

from fedkeel.models import Encoder, network
from fedkeel.options import Count


@network("two_blocks", paper="an example")
class TwoBlocks(Encoder):
    """Two convolutions with batch norm, then the mean over the image."""

    def __init__(self, in_channels: int = 3, width: Count = 32) -> None:
        super().__init__(feature_dim=2 * width)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)

    def extract(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.bn2(self.conv2(x)).relu().mean(dim=(2, 3))
