"""MOON: Li et al., "Model-Contrastive Federated Learning", CVPR 2021, Eqs. 3-4.

On skewed data a local model learns worse features than the global one it started from. So the features z of each image
are drawn to those of the global model and away from those of this client's own model of its last round:

    l_con = -log( exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau)) )     (Eq. 3)
    L = CE + mu l_con                                                                                       (Eq. 4)

Both other models are frozen and in evaluation mode; a client without a last model leaves the term out. The paper's
networks have a projector before the head, whose output z then is: `simple_cnn(projector=256)`.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core import state
from fedkeel.formulas.similarity import directions
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, register
from fedkeel.options import NotNegative, Positive


@register("moon")
@dataclass
class Moon(Method):
    """Draws features to those of the global model and away from those of the client's own last one."""

    paper = "Li et al. 2021 (MOON)"
    traits = Traits(needs_memory=True, capturable=True)

    mu: NotNegative = 1.0  # weight of Eq. 3
    temperature: Positive = 0.5  # tau

    # Two frozen networks beside each resident model, at addresses that stay: a captured step refers to them.
    _others: WeakKeyDictionary[nn.Module, list[nn.Module]] = field(default_factory=WeakKeyDictionary, init=False)

    def start(self, client: LocalClient) -> None:
        if not client.memory or self.mu == 0:
            return
        if client.model not in self._others:
            copies = [copy.deepcopy(client.model).eval().requires_grad_(False) for _ in range(2)]
            self._others[client.model] = copies
        with_global, with_previous = client.scratch["others"] = self._others[client.model]
        # The model as it was just loaded, with what this client keeps of it.
        state.load(with_global, client.model.state_dict())
        state.load(with_previous, client.model.state_dict(), client.memory)

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if "others" not in client.scratch:
            return 0.0
        with torch.no_grad():
            z_glob, z_prev = (directions(other(batch.x).features) for other in client.scratch["others"])
        z = directions(output.features)
        l_con = F.softplus(((z * z_prev).sum(dim=1) - (z * z_glob).sum(dim=1)) / self.temperature).mean()  # Eq. 3
        return self.mu * l_con

    def finish(self, client: LocalClient) -> Tensors:
        """The client remembers its trained model."""
        entries = client.model.state_dict()
        client.memory = state.copies(entries, [name for name in entries if state.is_continuous(entries[name])])
        return {}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {}
