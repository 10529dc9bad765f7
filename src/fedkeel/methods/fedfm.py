"""FedFM: Ye et al., "FedFM: Anchor-based Feature Matching for Data Heterogeneity in Federated Learning", IEEE
Transactions on Signal Processing 71, 2023.

Clients that train apart put the same class in different places of feature space. So every class has an anchor a_c that
all clients share: the mean feature of the class over all data, under the global model. Each client computes the class
means of its own data under the broadcast model, and the server weighs them by the number of samples. Local training
then matches features z to the anchors, from round `from_round` on, when features have come to mean something:

    L = CE + lambda L_match
    L_match = -log( exp(cos(z, a_y) / tau) / sum_c exp(cos(z, a_c) / tau) )     contrastive guiding ("contrastive")
    L_match = 1/d || z/||z|| - a_y/||a_y|| ||^2                                 ("l2")

The anchors are of the aggregated model, so they need one more exchange in each round, before training: the round's
clients are asked. `anchors="update"` saves it: the class means under the locally trained model come with the update.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from math import floor

import torch
from torch import Tensor

from fedkeel.config import from_one
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError, nearest
from fedkeel.formulas.losses import feature_alignment
from fedkeel.formulas.prototypes import counted_prototypes, direction_distance
from fedkeel.methods import register

log = logging.getLogger("fedkeel")
MATCHINGS = ("contrastive", "l2")
ANCHORS = ("asked", "update")
MOST_SAMPLES = 2.0**40  # of a class: no client has more


@register("fedfm")
class FedFM(Method):
    """Matches features to anchors, the class means of all clients' features under the global model."""

    paper = "Ye et al. 2023 (FedFM)"
    traits = Traits(capturable=True)

    def __init__(
        self,
        lambda_: float = 50.0,
        temperature: float = 0.1,
        from_round: float = 20,
        matching: str = "contrastive",
        momentum: float = 0.0,
        anchors: str = "asked",
    ) -> None:
        """`lambda_`: weight of the matching. `temperature`: tau. `from_round`: the first round that matches, from 0;
        below 1, the share of the rounds before it. `matching`: "contrastive" or "l2". `momentum`: share of the old
        anchors in the new. `anchors`: "asked" in an exchange of their own, or sent with the "update".
        """
        for option, given, choices in (("matching", matching, MATCHINGS), ("anchors", anchors, ANCHORS)):
            if given not in choices:
                raise FedkeelError(f"The '{option}' of fedfm is '{given}': {nearest(str(given), choices)}")
        for option, number in (("lambda_", lambda_), ("from_round", from_round)):
            if number < 0:
                raise FedkeelError(f"The '{option}' of fedfm is {number}: give at least 0.")
        if from_round >= 1 and from_round % 1:
            raise FedkeelError(f"The 'from_round' of fedfm is {from_round}: give a round, or a share of them below 1.")
        if temperature <= 0:
            raise FedkeelError(f"The 'temperature' of fedfm is {temperature}: give a number above 0.")
        if not 0 <= momentum < 1:
            raise FedkeelError(f"The 'momentum' of fedfm is {momentum}: give a number from 0 to below 1.")
        self.lambda_, self.temperature, self.from_round = lambda_, temperature, from_round
        self.matching, self.momentum, self.anchors = matching, momentum, anchors

    def begins(self, rounds: int) -> int:
        """The first round that matches."""
        return floor(rounds * self.from_round + 1e-9) if self.from_round < 1 else int(self.from_round)

    # -- on the client ---------------------------------------------------------------------------------------
    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        return local_anchors(client) if question == "anchors" else super().answer(client, question, tensors)

    def matches(self, client: LocalClient) -> bool:
        return client.round >= self.begins(client.rounds) and "anchors" in client.extras

    def step_variant(self, client: LocalClient) -> Hashable:
        return self.matches(client)

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if not self.matches(client):
            return 0.0
        anchors, present = client.extras["anchors"], client.extras["present"]
        if self.matching == "l2":
            return self.lambda_ * direction_distance(output.features, batch.y, anchors, present)
        return self.lambda_ * feature_alignment(output.features, batch.y, anchors, self.temperature, present)

    def finish(self, client: LocalClient) -> Tensors:
        return local_anchors(client) if self._uploads(client.round, client.rounds) else {}

    def _uploads(self, round: int, rounds: int) -> bool:
        return self.anchors == "update" and round + 1 >= self.begins(rounds)

    # -- on the server ---------------------------------------------------------------------------------------
    def before_training(self, server: Server) -> None:
        if server.round == 0 and server.rounds <= self.begins(server.rounds):
            log.warning(
                "'fedfm' matches features from round %d on, and the run has %d rounds, so it never will: "
                "write 'fedfm(from_round=...)'.", from_one(self.begins(server.rounds)), server.rounds,
            )  # fmt: skip
        if self.anchors == "asked" and server.round >= self.begins(server.rounds):
            answers = server.ask(server.participants, "anchors").values()
            server.extras = self._global_anchors([answer.tensors for answer in answers], server.extras)

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        assert server.network is not None
        classes, width = server.network.num_classes, server.network.feature_dim
        anchors = {"means": Expected((classes, width)), "counts": Expected((classes,), least=0, most=MOST_SAMPLES)}
        if question:
            return anchors
        return anchors if self._uploads(server.round, server.rounds) else {}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        sent = [update.extras for update in updates if update.extras]
        return self._global_anchors(sent, server.extras)

    def _global_anchors(self, sent: Sequence[Tensors], last: Tensors) -> Tensors:
        """Class means weighted by class counts; a class that none of these clients has keeps its last anchor."""
        if not sent:
            return last
        counts = torch.stack([tensors["counts"] for tensors in sent]).double()  # (K, C)
        means = torch.stack([tensors["means"] for tensors in sent]).double()  # (K, C, d)
        total = counts.sum(dim=0)
        new = ((counts[:, :, None] * means).sum(dim=0) / total.clamp_min(1)[:, None]).to(sent[0]["means"])
        present = total > 0
        if last:
            old, known = last["anchors"], last["present"]
            new = torch.where((present & known)[:, None], torch.lerp(new, old, self.momentum), new)
            new, present = torch.where(present[:, None], new, old), present | known
        return {"anchors": new, "present": present}


def local_anchors(client: LocalClient) -> Tensors:
    """The class means of the client's features under the present weights, and how many samples each is of."""
    batches = client.data.passes(client.config.evaluation_batch)
    means, counts = counted_prototypes(client.model, batches, client.num_classes)
    return {"means": means, "counts": counts}
