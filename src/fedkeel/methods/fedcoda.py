"""FedCoda: "Cross-Domain Feature Alignment for Federated Domain Generalization", under review at TMLR (7236), Eqs. 4-5,
10, 21-26 and Algorithm 1.

Features are drawn to global prototypes, one for each class. For these to mean the same on every client, later rounds
normalise with the global statistics (with gradients clipped by the history of their norms), the class means of a batch
are pushed apart, and the server puts a prototype equally far from all clients' instead of near the many.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import ceil

import torch
from torch import Tensor, nn

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, batch_norms
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError, MethodError, nearest
from fedkeel.formulas.aggregation import fair_prototype, mean_prototype
from fedkeel.formulas.losses import feature_alignment, prototype_calibration
from fedkeel.formulas.prototypes import global_prototypes, local_prototypes
from fedkeel.methods import register
from fedkeel.methods.fixbn import refuse_without_global_statistics
from fedkeel.nn.clipping import HistoryClip
from fedkeel.nn.surgery import frozen_statistics

CLIPS = ("adaptive", "fixed", "none")
HISTORIES = ("start", "calibration")
RULES: dict[str, Callable[[Tensor], Tensor]] = {"fair": fair_prototype, "mean": mean_prototype}


@register("fedcoda")
class FedCoda(Method):
    """Aligns features with fair global prototypes, under global batch-norm statistics in the later rounds."""

    paper = "FedCoda (TMLR submission 7236)"
    traits = Traits(capturable=True, surgery_order=1)

    def __init__(
        self,
        lambda_fa: float = 1.0,
        lambda_pc: float = 1.0,
        temperature: float = 0.1,
        calibrate_from: float = 0.5,
        calibrate_bn: bool = True,
        calibrate_prototypes: bool = True,
        aggregation: str = "fair",
        clip: str = "adaptive",
        alpha: float = 1.5,
        beta: float = 0.99,
        clip_norm: float = 10.0,
        history_from: str = "start",
    ) -> None:
        """`lambda_fa`, `lambda_pc`, `temperature`: of Eqs. 23-24. `calibrate_from`: share of rounds after which batch
        norm is calibrated and gradients clipped; 1: never. `alpha`, `beta`: of Eq. 10. `clip_norm`: of "fixed".
        `history_from`: whether the history of norms begins with the "start", as in the text, or with the "calibration",
        as in Algorithm 1, lines 18-23.
        Tables 3, 4, 6: `calibrate_bn`, `calibrate_prototypes`, `aggregation` ("fair" or "mean"), `clip`.
        """
        words = (("clip", clip, CLIPS), ("aggregation", aggregation, tuple(RULES)))
        for option, given, choices in (*words, ("history_from", history_from, HISTORIES)):
            if given not in choices:
                raise FedkeelError(f"The '{option}' of fedcoda is '{given}': {nearest(str(given), choices)}")
        for option, number in (("lambda_fa", lambda_fa), ("lambda_pc", lambda_pc)):
            if number < 0:
                raise FedkeelError(f"The '{option}' of fedcoda is {number}: give at least 0.")
        for option, number in (("temperature", temperature), ("alpha", alpha), ("clip_norm", clip_norm)):
            if number <= 0:
                raise FedkeelError(f"The '{option}' of fedcoda is {number}: give a number above 0.")
        for option, number in (("calibrate_from", calibrate_from), ("beta", beta)):
            if not 0 <= number <= 1:
                raise FedkeelError(f"The '{option}' of fedcoda is {number}: give a number from 0 to 1.")
        self.lambda_fa, self.lambda_pc = lambda_fa, lambda_pc if calibrate_prototypes else 0.0
        self.temperature, self.aggregation = temperature, aggregation
        self.calibrate_bn, self.calibrate_from = calibrate_bn, calibrate_from
        self.clip, self.alpha, self.beta, self.clip_norm = clip, alpha, beta, clip_norm
        self.history_from = history_from

    def prepare(self, model: nn.Module) -> None:
        if self.calibrate_bn and not any(norm.running_mean is not None for norm in batch_norms(model).values()):
            raise MethodError(
                "'fedcoda' calibrates batch norm, and there is none with running statistics: choose a model with batch "
                "norm, or write 'fedcoda(calibrate_bn=false)'."
            )

    def calibrates(self, round: int, rounds: int) -> bool:
        """Algorithm 1, line 8: t >= T/2."""
        return self.calibrate_bn and round >= ceil(rounds * self.calibrate_from - 1e-9)  # 0.07 * 100 is above 7

    def before_training(self, server: Server) -> None:
        if self.calibrate_bn:
            refuse_without_global_statistics(self.name, server)

    # -- on the client ---------------------------------------------------------------------------------------
    def start(self, client: LocalClient) -> None:
        calibrates = self.calibrates(client.round, client.rounds)
        client.scratch["frozen"] = batch_norms(client.model) if calibrates else {}
        client.scratch["calibrates"] = calibrates
        if self._keeps_history(client):
            trained = [(name, p) for name, p in client.model.named_parameters() if p.requires_grad]
            clip = client.scratch["clip"] = HistoryClip(trained, self.alpha, self.beta)
            # The client's own history; where it has none, the mean of the others'; without any, the first norm.
            for history in (client.extras.get("history"), client.memory.get("history")):
                if history is not None:
                    clip.history.copy_(torch.where(history > 0, history, clip.history))

    def step_variant(self, client: LocalClient) -> Hashable:
        return self.calibrates(client.round, client.rounds), "prototypes" in client.extras

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
            extras["prototypes"], extras["present"] = local_prototypes(client.model, batches, client.num_classes)
        return extras

    def _keeps_history(self, party: LocalClient | Server) -> bool:
        begun = self.history_from == "start" or self.calibrates(party.round, party.rounds)
        return begun and self.calibrate_bn and self.clip == "adaptive"

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        network, expected = server.network, {}
        assert network is not None
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
