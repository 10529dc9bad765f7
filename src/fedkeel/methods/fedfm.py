"""FedFM: Ye et al., "FedFM: Anchor-based Feature Matching for Data Heterogeneity in Federated Learning", IEEE
Transactions on Signal Processing 71, 2023.

Clients that train apart put the same class in different places of feature space. So every class has an anchor a_c that
all clients share: the mean feature of the class over all data, under the global model. The server makes it of the
clients' class means, and local training matches features z to the anchors, when features have come to mean something:

    L = CE - lambda log( exp(cos(z, a_y) / tau) / sum_c exp(cos(z, a_c) / tau) )            from round `from_round` on

The anchors are of the aggregated model, so they need one more exchange in each round, before training: the round's
clients are asked. `anchors="update"` saves it: the class means under the locally trained model come with the update.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Literal

import torch
from torch import Tensor

from fedkeel.config import from_one
from fedkeel.errors import FedkeelError
from fedkeel.formulas.losses import feature_alignment
from fedkeel.formulas.prototypes import local_prototypes
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.options import NotNegative, Positive

log = logging.getLogger("fedkeel")
MOST_SAMPLES = 2.0**40  # of a class: no client has more


@register("fedfm")
@dataclass
class FedFM(Method):
    """Matches features to anchors, the class means of all clients' features under the global model."""

    paper = "Ye et al. 2023 (FedFM)"
    traits = Traits(capturable=True)

    lambda_: NotNegative = 50.0  # weight of the matching
    temperature: Positive = 0.1  # tau
    from_round: NotNegative = 20  # the first round that matches, from 0; below 1, the share of the rounds before it
    anchors: Literal["asked", "update"] = "asked"  # in an exchange of their own, or sent with the update

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.from_round >= 1 and self.from_round % 1:
            given = f"The 'from_round' of fedfm is {self.from_round}"
            raise FedkeelError(f"{given}: give a round, or a share of them below 1.")

    def begins(self, rounds: int) -> int:
        """The first round that matches."""
        return floor(rounds * self.from_round + 1e-9) if self.from_round < 1 else int(self.from_round)

    def before_training(self, server: Server) -> None:
        begins = self.begins(server.rounds)
        if server.round == 0 and server.rounds <= begins:
            log.warning(
                f"'fedfm' matches features from round {from_one(begins)} on, and the run has {server.rounds} rounds, "
                "so it never will: write 'fedfm(from_round=...)'."
            )
        if self.anchors == "asked" and server.round >= begins:
            answers = server.ask(server.participants, "anchors").values()
            server.extras = global_anchors([answer.tensors for answer in answers], server.extras)

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        return local_anchors(client) if question == "anchors" else super().answer(client, question, tensors)

    def start(self, client: LocalClient) -> None:
        client.scratch["matches"] = client.round >= self.begins(client.rounds) and "anchors" in client.extras

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if not client.scratch["matches"]:
            return 0.0
        anchors, present = client.extras["anchors"], client.extras["present"]
        return self.lambda_ * feature_alignment(output.features, batch.y, anchors, self.temperature, present)

    def finish(self, client: LocalClient) -> Tensors:
        return local_anchors(client) if self._uploads(client) else {}

    def _uploads(self, party: LocalClient | Server) -> bool:
        return self.anchors == "update" and party.round + 1 >= self.begins(party.rounds)

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        if not question and not self._uploads(server):
            return {}
        classes, width = server.network.num_classes, server.network.feature_dim
        return {"means": Expected((classes, width)), "counts": Expected((classes,), least=0, most=MOST_SAMPLES)}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        return global_anchors([update.extras for update in updates if update.extras], server.extras)


def local_anchors(client: LocalClient) -> Tensors:
    """The class means of the client's features under the present weights, and how many samples each is of."""
    batches = client.data.passes(client.config.evaluation_batch)
    means, counts = local_prototypes(client.model, batches, client.num_classes)
    return {"means": means, "counts": counts}


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
