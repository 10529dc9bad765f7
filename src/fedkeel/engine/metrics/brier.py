"""The Brier score (Brier 1950): how far predicted probabilities are from what came true, sum_c (q_c - 1[y = c])^2."""

import torch.nn.functional as F
from torch import Tensor

from fedkeel.engine.metrics import register_metric


@register_metric("brier", per_sample=True, lower=True, paper="Brier 1950")
def brier(logits: Tensor, labels: Tensor) -> Tensor:
    """Squared distance of the probabilities from the true class: 0 is certain and right, 2 certain and wrong."""
    return (logits.softmax(1) - F.one_hot(labels, logits.shape[1])).square().sum(1)
