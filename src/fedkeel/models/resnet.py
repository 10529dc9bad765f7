"""Residual networks (He et al., CVPR 2016), with torchvision's parameter names so that its checkpoints fit."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.models.encoder import Encoder, network

Stem = Literal["imagenet", "nopool", "small"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added."""

    def __init__(self, in_channels: int, channels: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)) + identity)


class ResNet(Encoder):
    """Four stages of residual blocks and global average pooling.

    `stem`: "imagenet" is a 7x7 convolution of stride 2 and max-pooling; "nopool" leaves the pooling out (UniVarFL);
    "small" is a 3x3 convolution of stride 1, for images of about 32 px.
    """

    def __init__(self, depths: list[int], in_channels: int, stem: Stem) -> None:
        super().__init__(feature_dim=512)
        small = stem == "small"
        self.conv1 = nn.Conv2d(in_channels, 64, *((3, 1, 1) if small else (7, 2, 3)), bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if stem == "imagenet" else nn.Identity()
        self.layer1 = _stage(64, 64, depths[0], stride=1)
        self.layer2 = _stage(64, 128, depths[1], stride=2)
        self.layer3 = _stage(128, 256, depths[2], stride=2)
        self.layer4 = _stage(256, 512, depths[3], stride=2)
        for module in self.modules():  # as torchvision does
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def extract(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean(dim=(2, 3))


def _stage(in_channels: int, channels: int, depth: int, stride: int) -> nn.Sequential:
    downsample = None
    if stride != 1 or in_channels != channels:
        downsample = nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
    first = BasicBlock(in_channels, channels, stride, downsample)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1, None) for _ in range(depth - 1)))


@network("resnet10", paper="FedCoda, Section 4 (Digits)")
def resnet10(in_channels: int = 3, stem: Stem = "imagenet") -> ResNet:
    """ResNet with one basic block a stage, 512 features: 4.9 M parameters."""
    return ResNet([1, 1, 1, 1], in_channels, stem)


@network("resnet18", paper="GReg, HBN, FedWon, FedCoda, UniVarFL (He et al., 2016)")
def resnet18(in_channels: int = 3, stem: Stem = "imagenet") -> ResNet:
    """ResNet-18, 512 features: 11.2 M parameters."""
    return ResNet([2, 2, 2, 2], in_channels, stem)
