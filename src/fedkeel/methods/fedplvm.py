"""FedPLVM: Wang et al., "Taming Cross-Domain Representation Variance in Federated Prototype Learning with
Heterogeneous Data Domains", NeurIPS 2024.

One mean feature for a class says nothing of how widely the class spreads, and it spreads more in hard domains. So each
client clusters its features of each class (FINCH) and sends the clusters' means; the server clusters those of all
clients into global prototypes p in G_c. With z the feature of a sample of class y and g_c the plain mean of G_c,

    L = CE + lambda (L_alpha + L_c)
    L_alpha = -log( sum_{p in G_y} exp(cos(z, p)^alpha / tau) / sum_{p in all} exp(cos(z, p)^alpha / tau) )
    L_c = 2 (1 - cos(z, g_y))^2

from the second round on. A power alpha below 1 lifts small similarities: it keeps classes apart, and L_c makes up for
the pull within a class that it weakens. Features are those of the trained local model in evaluation mode.

A negative cosine has no such power, and the released code fails on it: here it counts as 0 (`prototype_contrast`).
`lambda_` is that of the released code; GReg's experiments use 1.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError
from fedkeel.formulas.prototypes import class_means, clustered, cosine_pull, prototype_contrast, regrouped
from fedkeel.methods import register


@register("fedplvm")
class FedPLVM(Method):
    """Draws features to their class's prototypes, which are clusters of the clients' clusters of features."""

    paper = "Wang et al. 2024 (FedPLVM)"
    traits = Traits(capturable=True)

    def __init__(self, lambda_: float = 100.0, alpha: float = 0.25, temperature: float = 0.07) -> None:
        """`lambda_`: weight of both terms. `alpha`: power of the similarities in L_alpha. `temperature`: tau."""
        if lambda_ < 0:
            raise FedkeelError(f"The 'lambda_' of fedplvm is {lambda_}: give at least 0.")
        if not 0 < alpha <= 1:
            raise FedkeelError(f"The 'alpha' of fedplvm is {alpha}: give a number above 0 and at most 1.")
        if temperature <= 0:
            raise FedkeelError(f"The 'temperature' of fedplvm is {temperature}: give a number above 0.")
        self.lambda_, self.alpha, self.temperature = lambda_, alpha, temperature

    # -- on the client ---------------------------------------------------------------------------------------
    def start(self, client: LocalClient) -> None:
        if "prototypes" in client.extras:
            client.scratch["means"], client.scratch["known"] = class_means(
                client.extras["prototypes"], client.extras["classes"], client.num_classes
            )

    def step_variant(self, client: LocalClient) -> Hashable:
        return "prototypes" in client.extras

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if "prototypes" not in client.extras:
            return 0.0
        features, points, classes = output.features, client.extras["prototypes"], client.extras["classes"]
        contrast = prototype_contrast(features, batch.y, points, classes, self.temperature, self.alpha)
        pull = cosine_pull(features, batch.y, client.scratch["means"], client.scratch["known"])
        return self.lambda_ * (contrast + pull)

    @torch.no_grad()
    def finish(self, client: LocalClient) -> Tensors:
        model, training = client.model, client.model.training
        model.eval()
        batches = client.data.passes(client.config.evaluation_batch)
        features, labels = zip(*((model(batch.x).features, batch.y) for batch in batches), strict=True)
        model.train(training)
        points, classes = clustered(torch.cat(features), torch.cat(labels))
        return {"prototypes": points.to(client.device), "classes": classes.to(client.device)}

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        assert server.network is not None
        classes = Expected(("P",), torch.int64, least=0, most=server.network.num_classes - 1)
        return {"prototypes": Expected(("P", server.network.feature_dim)), "classes": classes}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        last = server.extras
        points, classes = regrouped(
            [(update.extras["prototypes"], update.extras["classes"]) for update in updates],
            (last["prototypes"], last["classes"]) if "prototypes" in last else None,
        )
        return {"prototypes": points, "classes": classes}
