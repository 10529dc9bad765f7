"""FedPLVM: Wang et al., "Taming Cross-Domain Representation Variance in Federated Prototype Learning with
Heterogeneous Data Domains", NeurIPS 2024.

One mean feature for a class says nothing of how widely the class spreads, and it spreads more in hard domains. So each
client clusters its features of each class (FINCH) and sends the clusters' means; the server clusters those of all
clients into global prototypes p in G_c. With z the feature of a sample of class y and g_c the plain mean of G_c,

    L = CE + lambda (L_alpha + L_c)                                                     from the second round on
    L_alpha = -log( sum_{p in G_y} exp(cos(z, p)^alpha / tau) / sum_{p in all} exp(cos(z, p)^alpha / tau) )
    L_c = 2 (1 - cos(z, g_y))^2

A power alpha below 1 lifts small similarities: it keeps classes apart, and L_c makes up for the pull within a class
that it weakens. A negative cosine, on which the released code fails, counts as 0 (`prototype_contrast`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel.formulas.prototypes import clustered, prototype_contrast
from fedkeel.formulas.similarity import directions
from fedkeel.methods import Batch, Expected, LocalClient, Output, Server, Tensors, Traits, Update, register
from fedkeel.methods.fpl import ClusterPrototypes
from fedkeel.options import NotNegative, Positive, PositiveShare


@register("fedplvm")
@dataclass
class FedPLVM(ClusterPrototypes):
    """Draws features to their class's prototypes, which are clusters of the clients' clusters of features."""

    paper = "Wang et al. 2024 (FedPLVM)"
    traits = Traits(capturable=True)

    lambda_: NotNegative = 100.0  # weight of both terms
    alpha: PositiveShare = 0.25  # power of the similarities in L_alpha
    temperature: Positive = 0.07  # tau

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if "prototypes" not in client.extras:
            return 0.0
        features, points, classes = output.features, client.extras["prototypes"], client.extras["classes"]
        contrast = prototype_contrast(features, batch.y, points, classes, self.temperature, self.alpha)
        g_y, known = (client.scratch[name].index_select(0, batch.y) for name in ("means", "known"))
        cosine = (directions(features) * directions(g_y)).sum(dim=1)
        pull: Tensor = (2 * (1 - cosine).square()).where(known, 0).sum() / known.sum().clamp_min(1)  # L_c
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

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        classes = Expected(("P",), torch.int64, least=0, most=server.network.num_classes - 1)
        return {"prototypes": Expected(("P", server.network.feature_dim)), "classes": classes}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        return self.regroup(server, [(update.extras["prototypes"], update.extras["classes"]) for update in updates])
