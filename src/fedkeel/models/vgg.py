"""VGG with batch norm (Simonyan and Zisserman, 2014), under torchvision's parameter names so that checkpoints fit."""

from torch import Tensor, nn

from fedkeel.models.encoder import Encoder, ImageSize, feature_map_size, network

# Convolutions and their channels in each of the five blocks; a max-pooling ends each block.
_VGG11 = [[64], [128], [256, 256], [512, 512], [512, 512]]
_VGG19 = [[64, 64], [128, 128], [256] * 4, [512] * 4, [512] * 4]


class VGG(Encoder):
    """3x3 convolutions with batch norm in five blocks, then two fully connected layers of `hidden`.

    HBN removes the dropout of the original (Section 4.2, "Compatibility"), so it is 0 here unless asked for.
    `hidden=0` leaves the fully connected layers out: global average pooling gives 512 features, and the network has
    a tenth of the parameters, the usual choice for small images.
    """

    def __init__(
        self,
        name: str,
        blocks: list[list[int]],
        in_channels: int,
        image_size: ImageSize | None,
        hidden: int,
        dropout: float,
    ) -> None:
        super().__init__(feature_dim=hidden or 512)
        if image_size is not None:
            feature_map_size(name, image_size, [(2, 2, 0)] * len(blocks))
        layers: list[nn.Module] = []
        for block in blocks:
            for channels in block:
                layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
                in_channels = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7 if hidden else 1)
        self.classifier = nn.Sequential()
        if hidden:
            self.classifier.extend([nn.Linear(512 * 7 * 7, hidden), nn.ReLU(), nn.Dropout(dropout)])
            self.classifier.extend([nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)])
        self.initialise_convolutions()

    def extract(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x)).flatten(1)
        features: Tensor = self.classifier(x)
        return features


@network("vgg11", paper="HBN, Table 5 (Simonyan and Zisserman, 2014)")
def vgg11(in_channels: int = 3, image_size: ImageSize | None = None, hidden: int = 4096, dropout: float = 0.0) -> VGG:
    """VGG-11 with batch norm: 128.8 M parameters, 9.2 M with `hidden=0`."""
    return VGG("vgg11", _VGG11, in_channels, image_size, hidden, dropout)


@network("vgg19", paper="HBN, Table 5 (Simonyan and Zisserman, 2014)")
def vgg19(in_channels: int = 3, image_size: ImageSize | None = None, hidden: int = 4096, dropout: float = 0.0) -> VGG:
    """VGG-19 with batch norm: 139.6 M parameters, 20.0 M with `hidden=0`."""
    return VGG("vgg19", _VGG19, in_channels, image_size, hidden, dropout)
