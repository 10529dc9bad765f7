"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
2020, Eqs. 8-9.

A client with more data takes more local steps and moves further, so in a plain mean it counts twice for its size. So
its change is divided by a_k, how far its tau_k steps go along a constant gradient in units of the learning rate, and
the mean of all is multiplied by what they go on average:

    a_k = tau_k,  with momentum rho: (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho)
    w <- w - tau_eff sum_k p_k (w - w_k) / a_k,    tau_eff = sum_k p_k a_k,    p_k the clients' weights, of sum 1

Only weights are normalised; statistics are averaged. Where all take as many steps, this is FedAvg.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.methods import Expected, LocalClient, Method, Server, Tensors, Traits, Update, register
from fedkeel.methods.scaffold import begin_counting, count_step, need_sgd


@register("fednova")
class FedNova(Method):
    """Divides each client's change by how far its local steps go, so that more of them do not count for more."""

    paper = "Wang et al. 2020 (FedNova)"
    traits = Traits(capturable=True, replaces={"weights"})

    def before_training(self, server: Server) -> None:
        need_sgd(server, "fednova")

    def start(self, client: LocalClient) -> None:
        begin_counting(client)

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        count_step(client)

    def finish(self, client: LocalClient) -> Tensors:
        return {"a": client.scratch["steps"].clone()}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {"a": Expected((), least=1)}

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        a = torch.stack([update.extras["a"] for update in updates])
        shares = a.new_tensor([server.share(update) for update in updates])
        p = shares / shares.sum()
        factors = (p * a).sum() * p / a  # tau_eff p_k / a_k
        new = dict(server.weights)
        for update, factor in zip(updates, factors, strict=True):
            new = {name: new[name] - factor * (w - update.weights[name]) for name, w in server.weights.items()}
        return new
