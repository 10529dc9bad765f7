"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1.

As FedPer, the body phi is averaged and each client keeps its head h_k. But h_k is fitted to the body that was sent
before the body moves, so that the body learns what serves heads that already fit:

    h_k <- h_k - lr grad_h L_k(h_k, phi)         in the first local steps, phi as it was sent
    phi_k <- phi_k - lr grad_phi L_k(h_k, phi_k)         in the others, h_k as it is then
    phi <- mean_k phi_k
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from torch import Tensor

from fedkeel.methods import LocalClient, register
from fedkeel.methods.fedper import FedPer
from fedkeel.options import Share


@register("fedrep")
@dataclass
class FedRep(FedPer):
    """Each client keeps its head and fits it first, with the body fixed; then it trains the body, which is averaged."""

    paper = "Collins et al. 2021 (FedRep)"

    head_share: Share = 0.5  # of the local steps, in which the head trains; with local_epochs=2, one epoch for each

    def start(self, client: LocalClient) -> None:
        """How many steps are left to the head."""
        config, kept = client.config, {*self.kept}
        whole, rest = divmod(client.samples, config.batch_size)
        passes = config.local_epochs * (whole if config.drop_last and whole else whole + (rest > 0))
        steps = config.local_steps or passes
        client.scratch["left"] = min(ceil(self.head_share * steps - 1e-9), steps - 1)
        parameters = list(client.model.named_parameters())
        client.scratch["head"] = [parameter for name, parameter in parameters if name in kept]
        client.scratch["body"] = [parameter for name, parameter in parameters if name not in kept]

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        """What rests has no gradient."""
        for parameter in client.scratch["body" if client.scratch["left"] > 0 else "head"]:
            parameter.grad = None
        client.scratch["left"] -= 1
