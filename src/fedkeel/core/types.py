"""What every model returns, and the shape every model has: an encoder and a classifier head."""

from typing import NamedTuple

from torch import Tensor, nn


class Output(NamedTuple):
    """`features` (N, d) go into the head, `logits` (N, classes) come out of it.

    >>> Output(features=torch.zeros(4, 128), logits=torch.zeros(4, 10)).logits.shape
    torch.Size([4, 10])
    """

    features: Tensor
    logits: Tensor


class Classifier(nn.Module):
    """An encoder (images -> features) followed by a head (features -> logits).

    Methods that act on features or on the head rely on `encoder`, `head` and `feature_dim`.

    Args:
        encoder: images (N, C, H, W) -> features (N, feature_dim).
        head: features -> logits (N, num_classes).
        feature_dim: numbers in a feature.
        num_classes: of the task.

    >>> model = Classifier(nn.Flatten(), nn.Linear(12, 5), feature_dim=12, num_classes=5)
    >>> model(torch.zeros(2, 3, 2, 2)).logits.shape
    torch.Size([2, 5])
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
