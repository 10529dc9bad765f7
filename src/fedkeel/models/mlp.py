"""A network of fully connected layers, for vectors: tables of numbers, or features made elsewhere."""

import itertools
import math
from typing import Literal

from torch import Tensor, nn

from fedkeel.models.encoder import Encoder, ImageSize, height_width, network
from fedkeel.options import Count, Decay


@network("mlp", paper="none; batch norm as Ioffe and Szegedy, 2015, have it")
class MLP(Encoder):
    """Fully connected layers, each with batch norm in one dimension and ReLU, for vectors; images are flattened.

    `hidden` is the width of each of the `layers`; `norm=none` leaves the batch norms out.
    """

    only_images = False

    def __init__(
        self,
        in_channels: int = 3,
        image_size: ImageSize | None = None,
        hidden: Count = 64,
        layers: Count = 2,
        norm: Literal["batch"] | None = "batch",
        dropout: Decay = 0.0,
    ) -> None:
        super().__init__(feature_dim=hidden)
        if image_size is not None:
            self.image_size = height_width(image_size)
        widths = [in_channels * math.prod(self.image_size or ()), *[hidden] * layers]
        self.layers = nn.Sequential()
        for inputs, outputs in itertools.pairwise(widths):
            self.layers.append(nn.Linear(inputs, outputs))
            self.layers.extend([nn.BatchNorm1d(outputs)] if norm == "batch" else [])
            self.layers.append(nn.ReLU())
            self.layers.extend([nn.Dropout(dropout)] if dropout else [])

    def extract(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x.flatten(1))
        return features
