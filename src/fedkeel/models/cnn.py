"""The plain CNNs of the papers.

In those that pool, ReLU comes behind the pooling: the two commute, to the last bit, and there it has a quarter of the
work.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.models.encoder import Encoder, ImageSize, network


@network("simple_cnn", paper="HBN, Table 7")
class SimpleCNN(Encoder):
    """Three 3x3 convolutions with batch norm and max-pooling, then a layer of 128: 0.16 M parameters at 32 px.

    HBN's network for CIFAR (Chen et al., ICML 2025, HBN, Table 7).
    `width` is the number of channels of the first block, 16 in the paper; the others have two and four times as many.
    `norm=False` leaves the batch norms out.
    """

    def __init__(
        self, in_channels: int = 3, image_size: ImageSize | None = None, width: int = 16, norm: bool = True
    ) -> None:
        super().__init__(feature_dim=128)
        places = self.flattens(image_size or 32, 8)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width) if norm else nn.Identity()
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.bn3 = nn.BatchNorm2d(4 * width) if norm else nn.Identity()
        self.fc1 = nn.Linear(4 * width * places, 128)

    def extract(self, x: Tensor) -> Tensor:
        x = F.relu_(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu_(F.max_pool2d(self.bn2(self.conv2(x)), 2))
        x = F.relu_(F.max_pool2d(self.bn3(self.conv3(x)), 2))
        return F.relu(self.fc1(x.flatten(1)))


@network("digits_cnn", paper="FedWon, Table 6")
class DigitsCNN(Encoder):
    """Three 5x5 convolutions with batch norm, two wide layers with dropout: 14.2 M parameters at 28 px.

    The six-layer CNN for Digits-Five (Zhuang and Lyu, FedWon, Table 6).
    FedBN's network of the same shape has batch norm between the fully connected layers where FedWon has dropout.
    """

    def __init__(self, in_channels: int = 3, image_size: ImageSize | None = None, dropout: float = 0.5) -> None:
        super().__init__(feature_dim=512)
        places = self.flattens(image_size or 28, 4)
        self.conv1 = nn.Conv2d(in_channels, 64, 5, padding=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.bn2 = nn.BatchNorm2d(64)
        self.conv3 = nn.Conv2d(64, 128, 5, padding=2)
        self.bn3 = nn.BatchNorm2d(128)
        self.dropout = nn.Dropout(dropout)
        self.fc1 = nn.Linear(128 * places, 2048)
        self.fc2 = nn.Linear(2048, 512)

    def extract(self, x: Tensor) -> Tensor:
        x = F.relu_(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu_(F.max_pool2d(self.bn2(self.conv2(x)), 2))
        x = F.relu(self.bn3(self.conv3(x))).flatten(1)
        x = F.relu(self.fc1(self.dropout(x)))
        return F.relu(self.fc2(self.dropout(x)))


@network("alexnet", paper="FedWon, Table 7")
class AlexNet(Encoder):
    """AlexNet with batch norm after each of its five convolutions: 57.0 M parameters.

    For Office-Caltech-10 and DomainNet (Zhuang and Lyu, FedWon, Table 7).
    FedWon's own recipe keeps the third convolution plain: `to_scaled_ws(model, skip=("encoder.conv3",))`.
    """

    def __init__(self, in_channels: int = 3, dropout: float = 0.5) -> None:
        super().__init__(feature_dim=4096)
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


@network("small_cnn", paper="UniVarFL, Section 4 (layer sizes from FedUV)")
class SmallCNN(Encoder):
    """Eight small convolutions with batch norm and global average pooling: 0.08 M parameters at width 1.

    UniVarFL calls its network "a lightweight CNN (described in Appendix 3)" and the appendix is not part of the
    published text: these are the layer sizes of its ancestor FedUV (Son et al., CVPR 2024). `width` multiplies every
    number of channels. UniVarFL puts a projector of 256 after it: `small_cnn(projector=256)`.
    """

    def __init__(self, in_channels: int = 3, width: int = 1) -> None:
        super().__init__(feature_dim=64 * width)
        # (channels in multiples of 16 * width, kernel, stride), all without padding
        stages = [(1, 3, 1), (1, 1, 1), (2, 3, 2), (2, 3, 1), (2, 1, 1), (4, 3, 2), (4, 3, 1), (4, 1, 1)]
        self.features = nn.Sequential()
        for multiple, kernel, stride in stages:
            channels = 16 * width * multiple
            convolution = nn.Conv2d(in_channels, channels, kernel, stride, bias=False)
            self.features.extend([convolution, nn.BatchNorm2d(channels), nn.ReLU()])
            in_channels = channels

    def extract(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(x)
        return features.mean(dim=(2, 3))
