"""What every model returns, and the shape every model has: an encoder and a classifier head."""

from typing import NamedTuple

from torch import Tensor, nn


class Output(NamedTuple):
    """`features` (N, d) go into the head, `logits` (N, classes) come out of it."""

    features: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """An encoder (images -> features) followed by a head (features -> logits).

    Methods that act on features or on the head rely on `encoder`, `head` and `feature_dim`.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, feature_dim: int, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.feature_dim = feature_dim
        self.num_classes = num_classes

    def forward(self, x: Tensor) -> Output:
        features = self.encoder(x)
        return Output(features, self.head(features))
