"""FedGMA: Tenison et al., "Gradient Masked Averaging for Federated Learning", TMLR 2023 (arXiv:2201.11986).

An entry of the weights that clients push in opposite directions holds what only some of them have. So the server takes
whole only those steps on which the signs of the clients' updates agree, and damps the others by how much they do:

    A = |1/K sum_k sign(w_k - w)|                agreement of an entry over the K clients of the round
    m = 1 where A >= tau, else A
    w <- w + eta m (mean_k w_k - w)              eta: learning rate of the server

Signs count alike, whatever a client's number of samples. The mean is what the run, or the parts written before this
one, make of the updates; statistics keep their own rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel.methods import Method, Server, Tensors, Update, register
from fedkeel.options import Positive, Share


def agreement_mask(differences: Tensor, threshold: float) -> Tensor:
    """m of each entry from the clients' differences: (K, ...) -> (...)."""
    agreement = differences.sign().sum(dim=0).abs() / len(differences)  # a sum of signs is exact, so K/K is 1
    return torch.where(agreement >= threshold, torch.ones_like(agreement), agreement)


@register("fedgma")
@dataclass
class FedGMA(Method):
    """Takes whole the steps on whose sign the clients agree, and damps the others."""

    paper = "Tenison et al. 2023"

    tau: Share = 0.4  # agreement from which a step is taken whole
    server_lr: Positive = 1.0  # eta

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        new: Tensors = {}
        for name, old in server.weights.items():
            differences = torch.stack([update.weights[name] - old for update in updates])
            mask = agreement_mask(differences, self.tau)
            new[name] = torch.lerp(old, mean[name], self.server_lr * mask)
        return new
