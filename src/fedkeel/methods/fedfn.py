"""FedFN: Kim et al., "FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning",
NeurIPS workshop 2023.

Clients that see other classes make features of other lengths, and averaging mixes them up. So there is no normalisation
layer in the network, and one of the features f of d dimensions before the head:

    f <- sqrt(d) f / ||f||_2

HBN's experiments (Table 7) put it before the first fully connected layer: `before="fully-connected"`.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.core.method import Method, Traits
from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError, MethodError, nearest
from fedkeel.methods import register
from fedkeel.models.wrapped import Wrapped
from fedkeel.nn.surgery import remove_normalisation

PLACES = ("head", "fully-connected")
_SHORTEST = 1e-8
"""A feature vector shorter than this has no direction and becomes zero, with zero gradient."""


def normalise_features(features: Tensor) -> Tensor:
    """sqrt(d) f / ||f||_2 for each sample: (N, ...) -> (N, ...) with d values in a sample."""
    rows = features.flatten(1)
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    squared = rows.square().sum(dim=1, keepdim=True)
    has_one = squared > _SHORTEST**2
    rows = rows.where(has_one, 0) * squared.where(has_one, 1).rsqrt() * sqrt(rows.shape[1])
    return rows.to(features.dtype).view_as(features)


@register("fedfn")
class FedFN(Method):
    """No normalisation layers; the features before the head are scaled to the same length."""

    paper = "Kim et al. 2023"
    traits = Traits(private=True)

    def __init__(self, before: str = "head") -> None:
        """`before`: "head" as in the paper, or "fully-connected", the first such layer of the network (HBN)."""
        if before not in PLACES:
            raise FedkeelError(f"The 'before' of fedfn is '{before}': {nearest(str(before), PLACES)}")
        self.before = before

    def prepare(self, model: nn.Module) -> None:
        if not isinstance(model, Classifier):
            raise MethodError(f"'fedfn' needs to know the head of {type(model).__name__}: wrap it by `models.wrap`.")
        remove_normalisation(model)
        linear = next((layer for layer in model.modules() if isinstance(layer, nn.Linear)), None)
        if self.before == "fully-connected" and linear is not None and linear not in set(model.head.modules()):
            linear.register_forward_pre_hook(_normalise_input)
        elif isinstance(model, Wrapped):
            model.head.register_forward_pre_hook(_normalise_input)
        else:
            model.encoder.register_forward_hook(_normalise_output)


# Hooks and not modules: the names in `state_dict()` stay those of the network.
def _normalise_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return normalise_features(args[0]), *args[1:]


def _normalise_output(_: nn.Module, __: tuple[Any, ...], features: Tensor) -> Tensor:
    return normalise_features(features)
