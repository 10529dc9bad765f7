"""FedFM: Ye et al., "FedFM: Anchor-based Feature Matching for Data Heterogeneity in Federated Learning", IEEE
Transactions on Signal Processing 71, 2023.

Clients that train apart put the same class in different places of feature space. So every class has an anchor a_c that
all clients share: the mean feature of the class over all data, under the global model. The server makes it of the
clients' class means, and local training matches features z to the anchors, when features have come to mean something:

    L = CE - lambda log( exp(cos(z, a_y) / tau) / sum_c exp(cos(z, a_c) / tau) )            from round `from_round` on

The anchors are of the aggregated model, so they need one more exchange in each round, before training: the round's
clients are asked.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from fedkeel.formulas.losses import feature_alignment
from fedkeel.formulas.prototypes import local_prototypes
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, register
from fedkeel.options import NotNegative, Positive

log = logging.getLogger("fedkeel")


@register("fedfm")
@dataclass
class FedFM(Method):
    """Matches features to anchors, the class means of all clients' features under the global model."""

    paper = "Ye et al. 2023 (FedFM)"
    traits = Traits(capturable=True)

    lambda_: NotNegative = 50.0  # weight of the matching
    temperature: Positive = 0.1  # tau
    from_round: NotNegative = 20  # the first round that matches, from 0; below 1, the share of the rounds before it

    def before_training(self, server: Server) -> None:
        first = floor(server.rounds * self.from_round + 1e-9) if self.from_round < 1 else self.from_round
        if server.round == 0 and server.rounds <= first:
            log.warning("This run ends before 'fedfm' matches features: write 'fedfm(from_round=...)'.")
        if server.round >= first:
            answers = server.ask(server.participants, "anchors").values()
            server.extras = global_anchors([answer.tensors for answer in answers], server.extras)

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        """The class means of the client's features under the present weights, and how many samples each is of."""
        batches = client.data.passes(client.config.evaluation_batch)
        means, counts = local_prototypes(client.model, batches, client.num_classes)
        return {"means": means, "counts": counts}

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if "anchors" not in client.extras:
            return 0.0
        anchors, present = client.extras["anchors"], client.extras["present"]
        return self.lambda_ * feature_alignment(output.features, batch.y, anchors, self.temperature, present)

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        classes, width = server.network.num_classes, server.network.feature_dim
        answer = {"means": Expected((classes, width)), "counts": Expected((classes,), least=0)}
        return answer if question else {}


def global_anchors(sent: Sequence[Tensors], last: Tensors) -> Tensors:
    """Class means weighted by class counts; a class that none of these clients has keeps its last anchor."""
    if not sent:
        return last
    counts = torch.stack([tensors["counts"] for tensors in sent]).double()  # (K, C)
    means = torch.stack([tensors["means"] for tensors in sent]).double()  # (K, C, d)
    total = counts.sum(dim=0)
    new = ((counts[:, :, None] * means).sum(dim=0) / total.clamp_min(1)[:, None]).to(sent[0]["means"])
    present = total > 0
    if not last:
        return {"anchors": new, "present": present}
    return {"anchors": torch.where(present[:, None], new, last["anchors"]), "present": present | last["present"]}
