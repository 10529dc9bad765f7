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

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedkeel.core import state
from fedkeel.formulas.losses import proximal
from fedkeel.methods import Batch, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.methods.fedprox import weights_and_anchors
from fedkeel.options import Decay, NotNegative


@register("fedacg")
@dataclass
class FedACG(Method):
    """Clients start from where the server's momentum leads, and stay near it."""

    paper = "Kim et al. 2024"
    traits = Traits(private={"central"}, capturable=True)

    lambda_: Decay = 0.85  # how much momentum is kept, and how far ahead clients start
    beta: NotNegative = 1e-3  # weight of the term

    def before_training(self, server: Server) -> None:
        """Clients start from w + lambda m."""
        if server.memory:
            server.weights = state.add(server.weights, server.memory, self.lambda_)

    def start(self, client: LocalClient) -> None:
        client.scratch["pairs"] = weights_and_anchors(client)

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        return 2 * self.beta * proximal(*client.scratch["pairs"])

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """m <- lambda m + mean - (w + lambda m), which is mean - w: the terms with lambda cancel."""
        server.memory = state.subtract(mean, server.weights)
        return mean
