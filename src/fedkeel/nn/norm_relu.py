"""A normalisation layer and the ReLU behind it, as one step that a method may compute at once.

Most activations of a network are written by a batch norm and read by a ReLU only. Where a method has its own kernels
for its normalisation, they can do both and save a pass over memory each way.

Where max-pooling follows, the ReLU comes after it: the two commute, to the last bit and in their gradients too, and the
ReLU has a quarter of the work.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

FUSED = "forward_relu"
"""Name of the attribute that holds, while a method is at work, what takes the place of layer and ReLU."""


def norm_relu(norm: nn.Module, x: Tensor) -> Tensor:
    """relu(norm(x))."""
    fused = norm.__dict__.get(FUSED)
    if fused is None:
        return F.relu(norm(x))
    y: Tensor = fused(x)
    return y


def norm_relu_pool(norm: nn.Module, x: Tensor, size: int = 2, stride: int | None = None) -> Tensor:
    """max_pool2d(relu(norm(x)))."""
    if FUSED in norm.__dict__:
        return F.max_pool2d(norm_relu(norm, x), size, stride)
    return F.relu_(F.max_pool2d(norm(x), size, stride))
