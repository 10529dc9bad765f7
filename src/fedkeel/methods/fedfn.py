"""FedFN: Kim et al., "FedFN: Feature Normalization for Alleviating Data Heterogeneity Problem in Federated Learning",
NeurIPS workshop 2023.

Clients that see other classes make features of other lengths, and averaging mixes them up. So there is no normalisation
layer in the network, and one of the features f of d dimensions before the head:

    f <- sqrt(d) f / ||f||_2

HBN's experiments (Table 7) put it before the first fully connected layer: `before="fully-connected"`.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from torch import Tensor, nn

from fedkeel.core.types import Classifier
from fedkeel.formulas.similarity import directions
from fedkeel.methods import Method, Traits, register
from fedkeel.models.wrapped import Wrapped
from fedkeel.nn.surgery import change_input, change_output, remove_normalisation


def normalise_features(features: Tensor) -> Tensor:
    """sqrt(d) f / ||f||_2 for each sample: (N, ...) -> (N, ...) with d values in a sample."""
    rows = directions(features.flatten(1))
    return (rows * sqrt(rows.shape[1])).to(features.dtype).view_as(features)


@register("fedfn")
@dataclass
class FedFN(Method):
    """No normalisation layers; the features before the head are scaled to the same length."""

    paper = "Kim et al. 2023"
    traits = Traits(private={"local"})

    before: Literal["head", "fully-connected"] = "head"  # as in the paper, or the first such layer of the network (HBN)

    def prepare(self, model: Classifier) -> None:
        remove_normalisation(model)
        linear = next((layer for layer in model.modules() if isinstance(layer, nn.Linear)), None)
        if self.before == "fully-connected" and linear is not None and linear not in set(model.head.modules()):
            change_input(linear, normalise_features)
        elif isinstance(model, Wrapped):
            change_input(model.head, normalise_features)
        else:
            change_output(model.encoder, normalise_features)
