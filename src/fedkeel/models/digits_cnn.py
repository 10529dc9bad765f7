"""The six-layer CNN for Digits-Five (Zhuang and Lyu, FedWon, Table 6)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.models.catalogue import network
from fedkeel.models.encoder import Encoder, ImageSize, check_image_shape, feature_map_size, height_width


@network("digits_cnn", paper="FedWon, Table 6")
class DigitsCNN(Encoder):
    """Three 5x5 convolutions with batch norm, two wide layers with dropout: 14.2 M parameters at 28 px.

    FedBN's network of the same shape has batch norm between the fully connected layers where FedWon has dropout.
    """

    def __init__(self, in_channels: int = 3, image_size: ImageSize | None = None, dropout: float = 0.5) -> None:
        super().__init__(feature_dim=512)
        self.image_size = height_width(image_size or 28)
        height, width = feature_map_size("digits_cnn", self.image_size, [(5, 1, 2), (2, 2, 0)] * 2 + [(5, 1, 2)])
        self.conv1 = nn.Conv2d(in_channels, 64, 5, padding=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.bn2 = nn.BatchNorm2d(64)
        self.conv3 = nn.Conv2d(64, 128, 5, padding=2)
        self.bn3 = nn.BatchNorm2d(128)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(128 * height * width, 2048)
        self.fc2 = nn.Linear(2048, 512)

    def extract(self, x: Tensor) -> Tensor:
        check_image_shape("digits_cnn", x, self.image_size)
        x = F.relu_(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu_(F.max_pool2d(self.bn2(self.conv2(x)), 2))
        x = F.relu(self.bn3(self.conv3(x))).flatten(1)
        x = F.relu(self.fc1(self.dropout(x)))
        return F.relu(self.fc2(self.dropout(x)))
