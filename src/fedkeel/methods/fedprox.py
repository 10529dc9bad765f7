"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2.

The proximal term keeps local weights near the global ones, so that clients drift apart less.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.method import Method, Traits
from fedkeel.core.types import Output
from fedkeel.formulas.losses import proximal
from fedkeel.methods import register
from fedkeel.options import NotNegative


@register("fedprox")
@dataclass
class FedProx(Method):
    """Adds mu/2 times the squared distance to the global weights to the local loss."""

    paper = "Li et al. 2020"
    traits = Traits(capturable=True)

    mu: NotNegative = 0.01  # Eq. 2

    def start(self, client: LocalClient) -> None:
        parameters = dict(client.model.named_parameters())
        shared = [name for name in client.broadcast.weights if name in parameters]
        client.scratch["weights"] = [parameters[name] for name in shared]
        client.scratch["anchors"] = [client.broadcast.weights[name] for name in shared]

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        return self.mu * proximal(client.scratch["weights"], client.scratch["anchors"])
