"""FedCoda: "Cross-Domain Feature Alignment for Federated Domain Generalization", under review at TMLR (7236), Eqs. 4-5,
10, 21-26 and Algorithm 1.

Features are drawn to global prototypes, one for each class. For these to mean the same on every client, later rounds
normalise with the global statistics (with gradients clipped by the history of their norms), the class means of a batch
are pushed apart, and the server puts a prototype equally far from all clients' instead of near the many.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fedkeel.core.state import batch_norms
from fedkeel.errors import MethodError
from fedkeel.formulas.aggregation import fair_prototype, mean_prototype
from fedkeel.formulas.losses import feature_alignment, prototype_calibration
from fedkeel.formulas.prototypes import global_prototypes, local_prototypes
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.nn.calibration import expect_statistics
from fedkeel.nn.clipping import HistoryClip
from fedkeel.nn.surgery import frozen_statistics
from fedkeel.options import NotNegative, Only, Positive, Share

log = logging.getLogger("fedkeel")

RULES: dict[str, Callable[[Tensor], Tensor]] = {"fair": fair_prototype, "mean": mean_prototype}
CALIBRATED, ADAPTIVE = Only("calibrate_bn", True), Only("clip", "adaptive")


@register("fedcoda")
@dataclass
class FedCoda(Method):
    """Aligns features with fair global prototypes, under global batch-norm statistics in the later rounds."""

    paper = "FedCoda (TMLR submission 7236)"
    traits = Traits(capturable=True)

    lambda_fa: NotNegative = 1.0  # Eq. 24
    lambda_pc: Annotated[NotNegative, Only("calibrate_prototypes", True)] = 1.0  # Eq. 24
    temperature: Positive = 0.1  # Eq. 23
    # of the rounds, after which batch norm is calibrated and gradients clipped; 1: never
    calibrate_from: Annotated[Share, CALIBRATED] = 0.5
    calibrate_bn: bool = True  # and the clipping that belongs to it: Tables 3 and 4
    calibrate_prototypes: bool = True  # false leaves L_PC out: Tables 3 and 4
    aggregation: Literal["fair", "mean"] = "fair"  # Eqs. 25-26, or the mean of Eq. 5: Table 3
    clip: Annotated[Literal["adaptive", "fixed", "none"], CALIBRATED] = "adaptive"  # Table 6
    alpha: Annotated[Positive, ADAPTIVE, CALIBRATED] = 1.5  # Eq. 10
    beta: Annotated[Share, ADAPTIVE, CALIBRATED] = 0.99  # Eq. 10
    clip_norm: Annotated[Positive, Only("clip", "fixed")] = 10.0
    # of the norms: the text's, or Algorithm 1's, lines 18-23
    history_from: Annotated[Literal["start", "calibration"], ADAPTIVE, CALIBRATED] = "start"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.calibrate_prototypes:
            self.lambda_pc = 0.0

    def prepare(self, model: nn.Module) -> Callable[[], None] | None:
        def check() -> None:
            if not any(norm.running_mean is not None for norm in batch_norms(model).values()):
                raise MethodError(
                    "'fedcoda' calibrates batch norm, and there is none with running statistics: choose a model with "
                    "batch norm, or write 'fedcoda(calibrate_bn=false)'."
                )
            expect_statistics(model)

        return check if self.calibrate_bn else None

    def calibrates(self, round: int, rounds: int) -> bool:
        """Algorithm 1, line 8: t >= T/2."""
        return self.calibrate_bn and round >= ceil(rounds * self.calibrate_from - 1e-9)  # 0.07 * 100 is above 7

    def before_training(self, server: Server) -> None:
        if self.calibrate_bn:
            server.need_global_statistics()
        clients, width = len(server.participants), server.network.feature_dim
        aligns = self.lambda_fa > 0 or self.lambda_pc > 0
        if server.round == 0 and self.aggregation == "fair" and aligns and clients > width:
            log.warning(
                f"Points equally far from the prototypes of {clients} clients, in {width} dimensions, can lie far off: "
                "take a model with more features than clients, or write 'fedcoda(aggregation=mean)'."
            )

    def start(self, client: LocalClient) -> None:
        calibrates = client.scratch["calibrates"] = self.calibrates(client.round, client.rounds)
        client.scratch["frozen"] = batch_norms(client.model) if calibrates else {}
        if self._keeps_history(client):
            trained = [parameter for parameter in client.model.parameters() if parameter.requires_grad]
            clip = client.scratch["clip"] = HistoryClip(trained, self.alpha, self.beta)
            # The client's own history; where it has none, the mean of the others'; without any, the first norm.
            for history in (client.extras.get("history"), client.memory.get("history")):
                if history is not None:
                    clip.history.copy_(torch.where(history > 0, history, clip.history))

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        with frozen_statistics(client.scratch["frozen"]):
            return super().forward(client, x)

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        """Eq. 24 without its cross-entropy; nothing in round 0, when there are no global prototypes."""
        if "prototypes" not in client.extras:
            return 0.0
        points, present = client.extras["prototypes"], client.extras["present"]
        loss = self.lambda_fa * feature_alignment(output.features, batch.y, points, self.temperature, present)
        if self.lambda_pc > 0:
            loss = loss + self.lambda_pc * prototype_calibration(output.features, batch.y, points, present)
        return loss

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        if self._keeps_history(client):
            client.scratch["clip"].step(clip=client.scratch["calibrates"])
        elif self.clip == "fixed" and client.scratch["calibrates"]:
            nn.utils.clip_grad_norm_(client.model.parameters(), self.clip_norm, foreach=True)

    def finish(self, client: LocalClient) -> Tensors:
        extras: Tensors = {}
        if self._keeps_history(client):
            extras["history"] = client.scratch["clip"].history.clone()
            client.memory = {"history": extras["history"]}
        if self.lambda_fa > 0 or self.lambda_pc > 0:
            batches = client.data.passes(client.config.evaluation_batch)
            prototypes, counts = local_prototypes(client.model, batches, client.num_classes)
            extras |= {"prototypes": prototypes, "present": counts > 0}
        return extras

    def _keeps_history(self, party: LocalClient | Server) -> bool:
        begun = self.history_from == "start" or self.calibrates(party.round, party.rounds)
        return begun and self.calibrate_bn and self.clip == "adaptive"

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        network, expected = server.network, {}
        if self._keeps_history(server):
            trained = sum(parameter.requires_grad for parameter in network.parameters())
            expected["history"] = Expected((trained,), least=0)
        if self.lambda_fa > 0 or self.lambda_pc > 0:
            expected["prototypes"] = Expected((network.num_classes, network.feature_dim))
            expected["present"] = Expected((network.num_classes,), torch.bool)
        return expected

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        new: Tensors = {}
        sent, last = [update.extras for update in updates], server.extras
        if "history" in sent[0]:
            new["history"] = mean_history([extras["history"] for extras in sent], last.get("history"))
        if "prototypes" in sent[0]:
            new["prototypes"], new["present"] = global_prototypes(
                [extras["prototypes"] for extras in sent],
                [extras["present"] for extras in sent],
                RULES[self.aggregation],
                (last["prototypes"], last["present"]) if "prototypes" in last else None,
            )
        return new


def mean_history(histories: Sequence[Tensor], previous: Tensor | None) -> Tensor:
    """Mean norm of each parameter over the clients that have one; 0 stands for none. K tensors (P,) -> (P,)."""
    stacked = torch.stack(list(histories))
    clients = (stacked > 0).sum(dim=0)
    mean = stacked.sum(dim=0) / clients.clamp_min(1)
    return mean if previous is None else torch.where(clients > 0, mean, previous)
