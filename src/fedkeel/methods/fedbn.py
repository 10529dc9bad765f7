"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.

Batch norm absorbs a domain's look, so each client keeps its batch-norm layers (weights, statistics and
counters) to itself and shares the rest. The papers' rule is about layers; here it goes by what a layer is,
not by what it is called.

A client that never trained has no such layers. It takes the initial ones, normalised with the statistics of
its own test batches (`unseen="batch"`), or as they are (`unseen="initial"`).
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedkeel.core.state import BatchNorm
from fedkeel.methods import Method, Traits, register


@register("fedbn")
@dataclass
class FedBN(Method):
    """Each client keeps its batch-norm layers to itself; everything else is averaged."""

    paper = "Li et al. 2021 (FedBN)"
    traits = Traits(needs_memory=True, needs_batch_norm=True, personal=True)

    unseen: Literal["batch", "initial"] = "batch"  # statistics of a client that never trained

    def prepare(self, model: nn.Module) -> None:
        self.kept = batch_norm_entries(model)


def batch_norm_entries(model: nn.Module) -> set[str]:
    """Names in `state_dict()` of all that belongs to batch norms; one in two places has two names there."""
    layers = model.named_modules(remove_duplicate=False)
    return {f"{name}.{entry}" for name, layer in layers if isinstance(layer, BatchNorm) for entry in layer.state_dict()}
