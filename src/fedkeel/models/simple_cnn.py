"""HBN's network for CIFAR (Chen et al., ICML 2025, Table 7)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.models.catalogue import network
from fedkeel.models.encoder import Encoder, ImageSize, check_image_shape, feature_map_size, height_width


@network("simple_cnn", paper="HBN, Table 7")
class SimpleCNN(Encoder):
    """Three 3x3 convolutions with batch norm and max-pooling, then a layer of 128: 0.16 M parameters at 32 px.

    `width` is the number of channels of the first block, 16 in the paper; the others have two and four times as many.
    `norm=False` leaves the batch norms out.
    """

    def __init__(
        self, in_channels: int = 3, image_size: ImageSize | None = None, width: int = 16, norm: bool = True
    ) -> None:
        super().__init__(feature_dim=128)
        self.image_size = height_width(image_size or 32)
        height, breadth = feature_map_size("simple_cnn", self.image_size, [(3, 1, 1), (2, 2, 0)] * 3)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width) if norm else nn.Identity()
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.bn3 = nn.BatchNorm2d(4 * width) if norm else nn.Identity()
        self.fc1 = nn.Linear(4 * width * height * breadth, 128)

    def extract(self, x: Tensor) -> Tensor:
        check_image_shape("simple_cnn", x, self.image_size)
        # ReLU and max-pooling commute, to the last bit; behind the pooling it has a quarter of the work.
        x = F.relu_(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu_(F.max_pool2d(self.bn2(self.conv2(x)), 2))
        x = F.relu_(F.max_pool2d(self.bn3(self.conv3(x)), 2))
        return F.relu(self.fc1(x.flatten(1)))
