"""FedAdam: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.

The server treats the mean change of a round as a gradient and takes an Adam step along it, so that weights that change
little still move:

    Delta = mean_i w_i - w
    m <- beta1 m + (1 - beta1) Delta,    v <- beta2 v + (1 - beta2) Delta^2
    w <- w + lr m / (sqrt(v) + tau)

m starts at 0 and v at tau^2, as in the paper; neither is corrected for its start. Only weights are stepped: on running
statistics, which HBN's Table 4 reports as the crash of FedAdam with batch norm, such a step means nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedkeel.core import state
from fedkeel.core.state import prefixed, select
from fedkeel.formulas.aggregation import moving_average
from fedkeel.methods import Method, Server, Tensors, Traits, Update, register
from fedkeel.options import Decay, Positive


@register("fedadam")
@dataclass
class FedAdam(Method):
    """The server takes an Adam step along the mean change of a round."""

    paper = "Reddi et al. 2021"
    traits = Traits(private={"central", "local"})

    server_lr: Positive = 0.01  # no weight moves much further than this in a round
    beta1: Decay = 0.9  # of the first moment
    beta2: Decay = 0.99  # of the second
    tau: Positive = 1e-3  # the degree of adaptivity: changes well below it are taken in proportion

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        change = state.subtract(mean, server.weights)
        m = select(server.memory, "m") or {name: torch.zeros_like(t) for name, t in change.items()}
        v = select(server.memory, "v") or {name: torch.full_like(t, self.tau**2) for name, t in change.items()}
        m = moving_average(m, change, 1 - self.beta1)
        v = moving_average(v, {name: tensor.square() for name, tensor in change.items()}, 1 - self.beta2)
        server.memory = prefixed(m, "m") | prefixed(v, "v")
        step = {name: m[name] / (v[name].sqrt() + self.tau) for name in change}
        return state.add(server.weights, step, self.server_lr)
