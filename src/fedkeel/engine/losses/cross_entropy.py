"""The cross-entropy, with smoothed labels and with weights for the classes."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedkeel.engine.losses import LOSSES, ClassWeights
from fedkeel.options import Share, check_fields


@LOSSES.register("cross-entropy")
@dataclass
class CrossEntropy:
    """-log of the probability of the true class, of which label_smoothing is given to all classes alike."""

    label_smoothing: Share = 0.0  # of the probability that is spread over all classes
    class_weights: Any = ""  # "balanced", or a number for each class

    def __post_init__(self) -> None:
        check_fields(self, "The '{}' of cross-entropy")
        self.weights = ClassWeights("class_weights", self.class_weights)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Divided is by the number of samples, not by their weights: a sample counts the same in every batch, alone too.
        smoothing = self.label_smoothing
        return F.cross_entropy(logits, labels, self.weights.values, label_smoothing=smoothing, reduction="none")
