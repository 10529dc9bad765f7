"""FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
arXiv:1909.06335.

Where clients differ, the means of successive rounds pull in different directions. The server treats the change of a
round as a gradient and takes it with momentum:

    Delta = mean_i w_i - w,    v <- beta v + Delta,    w <- w + lr v

Only weights have a momentum. Statistics of batch norm are averaged as ever: a variance that overshoots turns negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.core import state
from fedkeel.methods import Method, Server, Tensors, Traits, Update, register
from fedkeel.options import Decay, Positive


@register("fedavgm")
@dataclass
class FedAvgM(Method):
    """The server takes the mean change of a round with momentum."""

    paper = "Hsu et al. 2019"
    traits = Traits(private={"central", "local"})

    beta: Decay = 0.9  # the momentum
    server_lr: Positive = 1.0  # the server's learning rate

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        change = state.subtract(mean, server.weights)
        velocity = state.add(change, server.memory, self.beta) if server.memory else change
        server.memory = velocity
        return state.add(server.weights, velocity, self.server_lr)
