"""MobileNetV2 (Sandler et al., CVPR 2018), with torchvision's parameter names so that its checkpoints fit."""

from torch import Tensor, nn

from fedkeel.models.encoder import Encoder, network

# Table 2 of the paper: expansion, channels, blocks, stride
_STAGES = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]


class _ConvBNReLU6(nn.Sequential):
    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU6(),
        )


class InvertedResidual(nn.Module):
    """Expand with a 1x1, filter each channel with a 3x3, project with a linear 1x1 convolution."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.adds_input = stride == 1 and in_channels == out_channels
        self.conv = nn.Sequential(
            *([_ConvBNReLU6(in_channels, hidden, 1)] if expansion != 1 else []),
            _ConvBNReLU6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.adds_input else out


@network("mobilenetv2", paper="FedWon, Section 5; HBN, Table 5 (Sandler et al., 2018)")
class MobileNetV2(Encoder):
    """MobileNetV2 without its dropout by default, 1280 features: 2.2 M parameters."""

    def __init__(self, in_channels: int = 3, dropout: float = 0.0) -> None:
        super().__init__(feature_dim=1280)
        self.features = nn.Sequential(_ConvBNReLU6(in_channels, 32, 3, stride=2))
        channels = 32
        for expansion, out_channels, blocks, stride in _STAGES:
            for block in range(blocks):
                self.features.append(InvertedResidual(channels, out_channels, stride if block == 0 else 1, expansion))
                channels = out_channels
        self.features.append(_ConvBNReLU6(channels, self.feature_dim, 1))
        self.dropout = nn.Dropout(dropout)
        self.initialise_convolutions()

    def extract(self, x: Tensor) -> Tensor:
        features: Tensor = self.features(x)
        pooled: Tensor = self.dropout(features.mean(dim=(2, 3)))
        return pooled
