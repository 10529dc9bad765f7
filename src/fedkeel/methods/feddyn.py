"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, Algorithm 1.

Where clients differ, the optimum of each is none of all. So each client's loss is changed from round to round until
both agree, by its gradient g_k where it last ended. With m clients in all, S those of the round, and at first zeros:

    w_k = argmin L_k(w) - <g_k, w> + alpha/2 ||w - w_t||^2                 by the round's local steps
    g_k <- g_k - alpha (w_k - w_t)
    h <- h - alpha/m sum_{k in S} (w_k - w_t),    w_{t+1} = mean_{k in S} w_k - h / alpha

Only weights are regularised. With `weighting=samples`, sum and mean are weighted as all means of the run are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel.core import state
from fedkeel.formulas.losses import proximal
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.methods.fedprox import weights_and_anchors
from fedkeel.options import Positive


@register("feddyn")
@dataclass
class FedDyn(Method):
    """Changes each client's loss until its optimum is that of all, by the gradient where it last ended."""

    paper = "Acar et al. 2021 (FedDyn)"
    traits = Traits(needs_memory=True, capturable=True)

    alpha: Positive = 0.01  # the pull to the weights that are sent; the paper tries 0.1, 0.01 and 0.001

    def start(self, client: LocalClient) -> None:
        weights, _ = client.scratch["pairs"] = weights_and_anchors(client)
        g = client.memory or {str(i): torch.zeros_like(w, requires_grad=False) for i, w in enumerate(weights)}
        client.scratch["g"] = list(g.values())

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        weights, anchors = client.scratch["pairs"]
        inner = torch.stack([(g * w).sum() for g, w in zip(client.scratch["g"], weights, strict=True)]).sum()
        return self.alpha * proximal(weights, anchors) - inner

    @torch.no_grad()
    def finish(self, client: LocalClient) -> Tensors:
        triples = zip(client.scratch["g"], *client.scratch["pairs"], strict=True)
        client.memory = {str(i): g - self.alpha * (w - w_t) for i, (g, w, w_t) in enumerate(triples)}
        return {}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {}

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        change, share = state.subtract(mean, server.weights), len(server.participants) / server.num_clients
        h = {name: server.memory.get(name, torch.zeros_like(t)) - self.alpha * share * t for name, t in change.items()}
        server.memory = h
        return state.add(mean, h, -1 / self.alpha)
