"""AlexNet with batch norm for Office-Caltech-10 and DomainNet (Zhuang and Lyu, FedWon, Table 7)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.models.catalogue import network
from fedkeel.models.encoder import Encoder, ImageSize, feature_map_size

_WINDOWS = [(11, 4, 2), (3, 2, 0), (5, 1, 2), (3, 2, 0), (3, 1, 1), (3, 1, 1), (3, 1, 1), (3, 2, 0)]


@network("alexnet", paper="FedWon, Table 7")
class AlexNet(Encoder):
    """AlexNet with batch norm after each of its five convolutions: 57.0 M parameters.

    FedWon's own recipe keeps the third convolution plain: `to_scaled_ws(model, skip=("encoder.conv3",))`.
    """

    def __init__(self, in_channels: int = 3, image_size: ImageSize | None = None, dropout: float = 0.5) -> None:
        super().__init__(feature_dim=4096)
        if image_size is not None:
            feature_map_size("alexnet", image_size, _WINDOWS)
        self.conv1 = nn.Conv2d(in_channels, 64, 11, stride=4, padding=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.bn2 = nn.BatchNorm2d(192)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.bn3 = nn.BatchNorm2d(384)
        self.conv4 = nn.Conv2d(384, 256, 3, padding=1)
        self.bn4 = nn.BatchNorm2d(256)
        self.conv5 = nn.Conv2d(256, 256, 3, padding=1)
        self.bn5 = nn.BatchNorm2d(256)
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(256 * 6 * 6, 4096)
        self.fc2 = nn.Linear(4096, 4096)

    def extract(self, x: Tensor) -> Tensor:
        x = F.relu_(F.max_pool2d(self.bn1(self.conv1(x)), 3, 2))
        x = F.relu_(F.max_pool2d(self.bn2(self.conv2(x)), 3, 2))
        x = F.relu(self.bn3(self.conv3(x)))
        x = F.relu(self.bn4(self.conv4(x)))
        x = F.relu_(F.max_pool2d(self.bn5(self.conv5(x)), 3, 2))
        x = self.avgpool(x).flatten(1)
        x = F.relu(self.fc1(self.dropout(x)))
        return F.relu(self.fc2(self.dropout(x)))
