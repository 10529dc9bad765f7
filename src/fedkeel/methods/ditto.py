"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.

One model for all is fair to few, and a model of its own has too few samples. So each client has both: the global one,
w_t, which is trained as ever, and a personal one, v_k, which is trained beside it and stays near:

    v_k <- v_k - lr grad( L_k(v_k) + lambda/2 ||v_k - w_t||^2 )        in the local epochs of each round

Each client is tested with v_k; one that never took part has none, and is tested with w.
"""

from dataclasses import dataclass
from itertools import chain, islice

import torch

from fedkeel.core import state
from fedkeel.errors import MethodError
from fedkeel.formulas.losses import proximal
from fedkeel.methods import LocalClient, Method, Server, Traits, register
from fedkeel.methods.fedprox import weights_and_anchors
from fedkeel.methods.scaffold import need_sgd
from fedkeel.nn.hybrid_batch_norm import hybrid_norms
from fedkeel.nn.surgery import frozen_statistics
from fedkeel.options import NotNegative


@register("ditto")
@dataclass
class Ditto(Method):
    """Each client trains a model of its own beside the global one, stays near it, and is tested with its own."""

    paper = "Li et al. 2021 (Ditto)"
    traits = Traits(needs_memory=True, personal=True)

    lambda_: NotNegative = 1.0  # how near v_k stays to w_t

    def before_training(self, server: Server) -> None:
        need_sgd(server, "ditto")
        if hybrid_norms(server.network):
            raise MethodError("'ditto' keeps statistics for each client, and 'hbn' has one for all: use one of them.")

    def start(self, client: LocalClient) -> None:
        """Train v_k, and leave the model with w_t."""
        model, config = client.model, client.config
        w_t = state.clone(model.state_dict())
        state.load(model, state.select(client.memory, "tested"))
        weights, anchors = weights_and_anchors(client)
        sgd = torch.optim.SGD(weights, client.learning_rate, config.momentum, weight_decay=config.weight_decay)
        passes = (
            client.data.passes(augment=True, shuffle=True) for _ in range(config.local_steps or config.local_epochs)
        )
        for x, y in islice(chain.from_iterable(passes), config.local_steps or None):
            with frozen_statistics({} if len(y) > 1 else model):  # a single sample has no batch statistics
                loss = client.task_loss(model(x).logits, y) + self.lambda_ * proximal(weights, anchors)
            sgd.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            sgd.step()
        client.memory = state.prefixed(state.clone(model.state_dict()), "tested")
        state.load(model, w_t)
