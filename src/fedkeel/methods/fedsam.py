"""FedSAM: Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022; Caldarola et al.,
"Improving Generalization in Federated Learning by Seeking Flat Minima", ECCV 2022.

The mean of clients' weights is a good model only if each client's minimum is wide enough to reach it. So each local
step uses the gradient not at w but at the worst point nearby:

    epsilon = rho g / ||g||,  g the gradient at w, its norm over all weights together
    w <- w - lr grad L(w + epsilon)

Every step costs two passes forward and backward. Running statistics are those of the first: the weights of the second
are no model that anyone uses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedkeel.core.client import LocalClient
from fedkeel.core.method import Method, Traits
from fedkeel.errors import FedkeelError
from fedkeel.methods import register


@register("fedsam")
class FedSAM(Method):
    """Steps along the gradient at the worst point nearby, so that clients end in wide minima."""

    paper = "Qu et al. 2022, Caldarola et al. 2022"
    traits = Traits(capturable=True, replaces={"gradients"})

    def __init__(self, rho: float = 0.1) -> None:
        """`rho`: how far away the worst point is looked for."""
        if rho <= 0:
            raise FedkeelError(f"The 'rho' of fedsam is {rho}: give a number above 0.")
        self.rho = rho

    @torch.no_grad()
    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        weights: list[Tensor] = [weight for weight in client.model.parameters() if weight.grad is not None]
        gradient = [weight.grad for weight in weights if weight.grad is not None]
        buffers = list(client.model.buffers())  # what the first pass made of them
        before = [tensor.detach().clone() for tensor in (*weights, *buffers)]
        norm = torch.stack(torch._foreach_norm(gradient)).norm()
        # A gradient of zero has no direction; then the second pass is at w too.
        epsilon = list(torch._foreach_mul(gradient, self.rho / norm.clamp_min(1e-12)))
        torch._foreach_add_(weights, epsilon)
        with torch.enable_grad():
            recompute()
        torch._foreach_copy_([*weights, *buffers], before)
