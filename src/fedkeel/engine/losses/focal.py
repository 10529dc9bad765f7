"""The focal loss: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fedkeel.engine.losses import LOSSES, ClassWeights
from fedkeel.options import NotNegative, check_fields


@LOSSES.register("focal", paper="Lin et al. 2017")
@dataclass
class Focal:
    """-alpha (1 - p)^gamma log p with p the probability of the true class: samples that are certain count little."""

    gamma: NotNegative = 2.0  # how little samples count that are predicted well; 0 is the cross-entropy
    alpha: Any = ""  # "balanced", or a number for each class

    def __post_init__(self) -> None:
        check_fields(self, "The '{}' of focal")
        self.weights = ClassWeights("alpha", self.alpha)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        entropy = F.cross_entropy(logits, labels, reduction="none")
        # 1 - p, exact where p is nearly 1; a power below 1 has no derivative at 0.
        losses = (-entropy.neg().expm1()).clamp_min(1e-12) ** self.gamma * entropy
        return losses if self.weights.values is None else losses * self.weights.values[labels]
