"""FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
arXiv:1909.06335.

Where clients differ, the means of successive rounds pull in different directions. The server treats the change of a
round as a gradient and takes it with momentum:

    Delta = mean_i w_i - w,    v <- beta v + Delta,    w <- w + lr v

Only weights have a momentum. Statistics of batch norm are averaged as ever: a variance that overshoots turns negative.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.core import state
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError
from fedkeel.methods import register


@register("fedavgm")
class FedAvgM(Method):
    """The server takes the mean change of a round with momentum."""

    paper = "Hsu et al. 2019"
    traits = Traits(only_mean=True, private=True)

    def __init__(self, beta: float = 0.9, server_lr: float = 1.0) -> None:
        """`beta`: the momentum. `server_lr`: the server's learning rate."""
        if not 0 <= beta < 1:
            raise FedkeelError(f"The 'beta' of fedavgm is {beta}: give a number from 0, below 1.")
        if server_lr <= 0:
            raise FedkeelError(f"The 'server_lr' of fedavgm is {server_lr}: give a number above 0.")
        self.beta, self.server_lr = beta, server_lr

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        change = state.subtract(mean, server.weights)
        velocity = state.add(change, server.memory, self.beta) if server.memory else change
        server.memory = velocity
        return state.add(server.weights, velocity, self.server_lr)
