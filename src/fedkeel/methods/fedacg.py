"""FedACG: Kim et al., "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024,
Algorithm 1.

The server's momentum m says where the model is going. Clients start from there instead of from where it is, and stay
near, so that what each finds fits the common direction:

    theta_0 = w + lambda m                                           what is broadcast
    L = CE + beta ||theta - theta_0||^2                              on the client
    m <- lambda m + mean_i (theta_i - theta_0),    w <- mean_i theta_i

so that w moves by m. The term has no 1/2, as in the authors' code. Only weights look ahead; statistics are averaged and
broadcast as ever. The model that is tested is w.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedkeel.core import state
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError
from fedkeel.formulas.losses import proximal
from fedkeel.methods import register


@register("fedacg")
class FedACG(Method):
    """Clients start from where the server's momentum leads, and stay near it."""

    paper = "Kim et al. 2024"
    traits = Traits(only_mean=True, capturable=True)

    def __init__(self, lambda_: float = 0.85, beta: float = 1e-3) -> None:
        """`lambda_`: how much of the momentum is kept, and how far ahead clients start. `beta`: weight of the term."""
        if not 0 <= lambda_ < 1:
            raise FedkeelError(f"The 'lambda_' of fedacg is {lambda_}: give a number from 0, below 1.")
        if beta < 0:
            raise FedkeelError(f"The 'beta' of fedacg is {beta}: give at least 0.")
        self.lambda_, self.beta = lambda_, beta

    def send(self, server: Server, weights: Tensors) -> Tensors:
        return state.add(weights, server.memory, self.lambda_) if server.memory else weights

    def start(self, client: LocalClient) -> None:
        parameters = dict(client.model.named_parameters())
        shared = [name for name in client.broadcast.weights if name in parameters]
        client.scratch["weights"] = [parameters[name] for name in shared]
        client.scratch["anchors"] = [client.broadcast.weights[name] for name in shared]

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        return 2 * self.beta * proximal(client.scratch["weights"], client.scratch["anchors"])

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """m <- lambda m + mean - (w + lambda m), which is mean - w: the terms with lambda cancel."""
        server.memory = state.subtract(mean, server.weights)
        return mean
