"""Residual networks (He et al., CVPR 2016), with torchvision's parameter names so that its checkpoints fit."""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.models.encoder import Encoder, network

Stem = Literal["imagenet", "nopool", "small"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which the input is added."""

    expansion = 1

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


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions around which the input is added."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return F.relu(self.bn3(self.conv3(x)) + identity)


class ResNet(Encoder):
    """Four stages of residual blocks and global average pooling.

    `stem`: "imagenet" is a 7x7 convolution of stride 2 and max-pooling; "nopool" leaves the pooling out (UniVarFL);
    "small" is a 3x3 convolution of stride 1, for images of about 32 px.
    """

    def __init__(self, block: type[BasicBlock | Bottleneck], depths: list[int], in_channels: int, stem: Stem) -> None:
        super().__init__(feature_dim=512 * block.expansion)
        small = stem == "small"
        self.conv1 = nn.Conv2d(in_channels, 64, *((3, 1, 1) if small else (7, 2, 3)), bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if stem == "imagenet" else nn.Identity()
        self.layer1 = _stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.initialise_convolutions()

    def extract(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean(dim=(2, 3))


def _stage(
    block: type[BasicBlock | Bottleneck], in_channels: int, channels: int, depth: int, stride: int
) -> nn.Sequential:
    out_channels = channels * block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        convolution = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
        downsample = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))
    first = block(in_channels, channels, stride, downsample)
    return nn.Sequential(first, *(block(out_channels, channels, 1, None) for _ in range(depth - 1)))


@network("resnet10", paper="FedCoda, Section 4 (Digits)")
def resnet10(in_channels: int = 3, stem: Stem = "imagenet") -> ResNet:
    """ResNet with one basic block a stage, 512 features: 4.9 M parameters."""
    return ResNet(BasicBlock, [1, 1, 1, 1], in_channels, stem)


@network("resnet18", paper="GReg, HBN, FedWon, FedCoda, UniVarFL (He et al., 2016)")
def resnet18(in_channels: int = 3, stem: Stem = "imagenet") -> ResNet:
    """ResNet-18, 512 features: 11.2 M parameters."""
    return ResNet(BasicBlock, [2, 2, 2, 2], in_channels, stem)


@network("resnet34", paper="He et al., 2016")
def resnet34(in_channels: int = 3, stem: Stem = "imagenet") -> ResNet:
    """ResNet-34, 512 features: 21.3 M parameters."""
    return ResNet(BasicBlock, [3, 4, 6, 3], in_channels, stem)


@network("resnet50", paper="GReg, Table 4; HBN, Table 5 (He et al., 2016)")
def resnet50(in_channels: int = 3, stem: Stem = "imagenet") -> ResNet:
    """ResNet-50, bottleneck blocks, 2048 features: 23.5 M parameters."""
    return ResNet(Bottleneck, [3, 4, 6, 3], in_channels, stem)
