"""The small CNNs of UniVarFL and of MOON.

UniVarFL calls its network "a lightweight CNN (described in Appendix 3)" and the appendix is not part of the published
text. `small_cnn` has the layer sizes of its ancestor FedUV (Son et al., CVPR 2024); `moon_cnn` those of MOON
(Li et al., CVPR 2021), the other network of this line of work.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.models.catalogue import network
from fedkeel.models.encoder import Encoder, ImageSize, check_image_shape, feature_map_size, height_width

# (channels in multiples of 16 * width, kernel, stride), all without padding
_STAGES = [(1, 3, 1), (1, 1, 1), (2, 3, 2), (2, 3, 1), (2, 1, 1), (4, 3, 2), (4, 3, 1), (4, 1, 1)]


@network("small_cnn", paper="UniVarFL, Section 4 (layer sizes from FedUV)")
class SmallCNN(Encoder):
    """Eight small convolutions with batch norm and global average pooling: 0.08 M parameters at width 1.

    `width` multiplies every number of channels. UniVarFL puts a projector of 256 after it: `small_cnn(projector=256)`.
    """

    def __init__(self, in_channels: int = 3, image_size: ImageSize | None = None, width: int = 1) -> None:
        super().__init__(feature_dim=64 * width)
        if image_size is not None:
            feature_map_size("small_cnn", image_size, [(kernel, stride, 0) for _, kernel, stride in _STAGES])
        self.features = nn.Sequential()
        channels = in_channels
        for multiple, kernel, stride in _STAGES:
            out_channels = 16 * width * multiple
            self.features.append(nn.Conv2d(channels, out_channels, kernel, stride, bias=False))
            self.features.append(nn.BatchNorm2d(out_channels))
            self.features.append(nn.ReLU())
            channels = out_channels

    def extract(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(x)
        return features.mean(dim=(2, 3))


@network("moon_cnn", paper="MOON, Section 4")
class MoonCNN(Encoder):
    """Two 5x5 convolutions with max-pooling, then layers of 120 and 84, no batch norm: 0.06 M parameters at 32 px."""

    def __init__(self, in_channels: int = 3, image_size: ImageSize | None = None) -> None:
        super().__init__(feature_dim=84)
        self.image_size = height_width(image_size or 32)
        height, width = feature_map_size("moon_cnn", self.image_size, [(5, 1, 0), (2, 2, 0)] * 2)
        self.conv1 = nn.Conv2d(in_channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * height * width, 120)
        self.fc2 = nn.Linear(120, 84)

    def extract(self, x: Tensor) -> Tensor:
        check_image_shape("moon_cnn", x, self.image_size)
        x = F.relu_(F.max_pool2d(self.conv1(x), 2))
        x = F.relu_(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.relu(self.fc2(x))
