"""FedCoda: "Cross-Domain Feature Alignment for Federated Domain Generalization", under review at TMLR (7236), Eqs. 4-5,
10, 21-26 and Algorithm 1.

Features are drawn to global prototypes, one for each class. For these to mean the same on every client, the second half
of the rounds normalises with the global statistics, the class means z_c of a batch are pushed apart, and the server
puts a prototype equally far from all clients', d_k = ||p_k - p||, instead of near the many.

    p_k,c = mean of f(x) over the client's samples of class c                                      (Eq. 4)
    g <- min(alpha gamma / ||g||, 1) g,    gamma <- beta gamma + (1 - beta) ||g||                  (Eq. 10)
    L_PC = 1/C sum_i log( 1/(C-1) sum_{j != i} exp(z_i . z_j) )                                    (Eqs. 21-22)
    L_FA = -log( exp(sim(f(x), p_y) / tau) / sum_c exp(sim(f(x), p_c) / tau) )                     (Eq. 23)
    L = L_CE + lambda_FA L_FA + lambda_PC L_PC                                                     (Eq. 24)
    p = argmin 1/K sum_k (d_k - 1/K sum_i d_i)^2    from the start sum_k d_k / (sum_i d_i) p_k     (Eqs. 25-26)
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fedkeel.core.state import batch_norms
from fedkeel.formulas.aggregation import fair_prototype, mean_prototype
from fedkeel.formulas.losses import feature_alignment, prototype_calibration
from fedkeel.formulas.prototypes import global_prototypes, local_prototypes
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.nn.calibration import expect_statistics
from fedkeel.nn.clipping import HistoryClip
from fedkeel.nn.surgery import frozen_statistics
from fedkeel.options import NotNegative, Only, Positive, Share

log = logging.getLogger("fedkeel")
CALIBRATED, ADAPTIVE = Only("calibrate_bn", True), Only("clip", "adaptive")


@register("fedcoda")
@dataclass
class FedCoda(Method):
    """Aligns features with fair global prototypes, under global batch-norm statistics in the later rounds."""

    paper = "FedCoda (TMLR submission 7236)"
    traits = Traits(capturable=True)

    lambda_fa: NotNegative = 1.0  # Eq. 24
    lambda_pc: Annotated[NotNegative, Only("calibrate_prototypes", True)] = 1.0  # Eq. 24
    temperature: Positive = 0.1  # tau of Eq. 23
    calibrate_from: Annotated[Share, CALIBRATED] = 0.5  # of the rounds, until which batch norm is not; 1: never
    calibrate_bn: bool = True  # and the clipping that belongs to it: Tables 3 and 4
    calibrate_prototypes: bool = True  # false leaves L_PC out: Tables 3 and 4
    aggregation: Literal["fair", "mean"] = "fair"  # Eqs. 25-26, or the mean of Eq. 5: Table 3
    clip: Annotated[Literal["adaptive", "fixed", "none"], CALIBRATED] = "adaptive"  # Table 6
    alpha: Annotated[Positive, ADAPTIVE, CALIBRATED] = 1.5  # Eq. 10
    beta: Annotated[Share, ADAPTIVE, CALIBRATED] = 0.99  # Eq. 10
    clip_norm: Annotated[Positive, Only("clip", "fixed")] = 10.0
    history_from: Annotated[Literal["start", "calibration"], ADAPTIVE, CALIBRATED] = "start"  # text; Alg. 1, l. 18-23

    def calibrates(self, round: int, rounds: int) -> bool:
        """Algorithm 1, line 8: t >= T/2."""
        return self.calibrate_bn and round >= ceil(rounds * self.calibrate_from - 1e-9)  # 0.07 * 100 is above 7

    def prepare(self, model: nn.Module) -> None:
        if self.calibrate_bn:
            expect_statistics(model)

    def before_training(self, server: Server) -> None:
        if self.calibrate_bn:
            server.need_global_statistics()
        clients, width = len(server.participants), server.network.feature_dim
        if server.round == 0 and self.aggregation == "fair" and clients > width:
            log.warning("The fair prototypes of %d clients can lie far off with only %d features: take a model with "
                        "more, or write 'fedcoda(aggregation=mean)'.", clients, width)  # fmt: skip

    def start(self, client: LocalClient) -> None:
        calibrates = client.scratch["calibrates"] = self.calibrates(client.round, client.rounds)
        client.scratch["frozen"] = batch_norms(client.model) if calibrates else {}
        if self._has_history(client):
            trained = [parameter for parameter in client.model.parameters() if parameter.requires_grad]
            clip = client.scratch["clip"] = HistoryClip(trained, self.alpha, self.beta)
            # The client's own history; where it has none, the mean of the others'; without any, the first norm.
            clip.history.copy_(client.memory.get("history", client.extras.get("history", clip.history)))

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        with frozen_statistics(client.scratch["frozen"]):
            return super().forward(client, x)

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        """Eq. 24 without its cross-entropy; nothing in round 0, when there are no global prototypes."""
        if "prototypes" not in client.extras:
            return 0.0
        z, p, present = output.features, client.extras["prototypes"], client.extras["present"]
        loss = self.lambda_fa * feature_alignment(z, batch.y, p, self.temperature, present)
        if self.lambda_pc > 0 and self.calibrate_prototypes:
            loss = loss + self.lambda_pc * prototype_calibration(z, batch.y, p, present)
        return loss

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        """Eq. 10."""
        if self._has_history(client):
            client.scratch["clip"].step(clip=client.scratch["calibrates"])
        elif self.clip == "fixed" and client.scratch["calibrates"]:
            nn.utils.clip_grad_norm_(client.model.parameters(), self.clip_norm, foreach=True)

    def finish(self, client: LocalClient) -> Tensors:
        """Eq. 4, and the history of norms."""
        client.memory = {"history": client.scratch["clip"].history.clone()} if self._has_history(client) else {}
        if not self.lambda_fa and not self.lambda_pc:
            return dict(client.memory)
        batches = client.data.passes(client.config.evaluation_batch)
        prototypes, counts = local_prototypes(client.model, batches, client.num_classes)
        return client.memory | {"prototypes": prototypes, "present": counts > 0}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        """Eqs. 25-26 for each class; and the mean norm of each parameter over the clients that have one (0: none)."""
        sent, last, new = [update.extras for update in updates], server.extras, Tensors()
        if self._has_history(server):
            history = torch.stack([extras["history"] for extras in sent])
            clients = (history > 0).sum(dim=0)
            mean = history.sum(dim=0) / clients.clamp_min(1)
            new["history"] = torch.where(clients > 0, mean, last.get("history", mean))
        if "prototypes" in sent[0]:
            p, present = [extras["prototypes"] for extras in sent], [extras["present"] for extras in sent]
            rule = fair_prototype if self.aggregation == "fair" else mean_prototype
            known = (last["prototypes"], last["present"]) if "prototypes" in last else None
            new["prototypes"], new["present"] = global_prototypes(p, present, rule, known)
        return new

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        shape = (server.network.num_classes, server.network.feature_dim)
        trained = sum(parameter.requires_grad for parameter in server.network.parameters())
        history = {"history": Expected((trained,), least=0)} if self._has_history(server) else {}
        prototypes = {"prototypes": Expected(shape), "present": Expected(shape[:1], torch.bool)}
        return history | prototypes if self.lambda_fa or self.lambda_pc else history

    def _has_history(self, party: LocalClient | Server) -> bool:
        clips = self.calibrate_bn and self.clip == "adaptive"
        return clips and (self.history_from == "start" or self.calibrates(party.round, party.rounds))
