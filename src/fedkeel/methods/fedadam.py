"""FedAdam: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.

The server treats the mean change of a round as a gradient and takes an Adam step along it, so that weights that change
little still move:

    Delta = mean_i w_i - w
    m <- beta1 m + (1 - beta1) Delta,    v <- beta2 v + (1 - beta2) Delta^2
    w <- w + lr m / (sqrt(v) + tau)

m starts at 0 and v at tau^2, as in the paper; neither is corrected for its start. Only weights are stepped: on running
statistics, which HBN's Table 4 reports as the crash of FedAdam with batch norm, such a step means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedkeel.core import state
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, prefixed, select
from fedkeel.errors import FedkeelError
from fedkeel.formulas.aggregation import moving_average
from fedkeel.methods import register


@register("fedadam")
class FedAdam(Method):
    """The server takes an Adam step along the mean change of a round."""

    paper = "Reddi et al. 2021"
    traits = Traits(only_mean=True, private=True)

    def __init__(self, server_lr: float = 0.01, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        """`server_lr`: no weight moves much further than this in a round. `beta1`, `beta2`: of the moments.
        `tau`: the degree of adaptivity; changes well below it are taken in proportion.
        """
        for option, number in (("server_lr", server_lr), ("tau", tau)):
            if number <= 0:
                raise FedkeelError(f"The '{option}' of fedadam is {number}: give a number above 0.")
        for option, number in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= number < 1:
                raise FedkeelError(f"The '{option}' of fedadam is {number}: give a number from 0, below 1.")
        self.server_lr, self.beta1, self.beta2, self.tau = server_lr, beta1, beta2, tau

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        change = state.subtract(mean, server.weights)
        m = select(server.memory, "m") or {name: torch.zeros_like(t) for name, t in change.items()}
        v = select(server.memory, "v") or {name: torch.full_like(t, self.tau**2) for name, t in change.items()}
        m = moving_average(m, change, 1 - self.beta1)
        v = moving_average(v, {name: tensor.square() for name, tensor in change.items()}, 1 - self.beta2)
        server.memory = prefixed(m, "m") | prefixed(v, "v")
        step = {name: m[name] / (v[name].sqrt() + self.tau) for name in change}
        return state.add(server.weights, step, self.server_lr)
