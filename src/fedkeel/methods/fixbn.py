"""FixBN: Zhong et al., "Making Batch Normalization Great in Federated Deep Learning", NeurIPS workshop 2023.

The mean of models that were each trained under their own batch statistics is no minimum under shared ones. So training
has two stages: the rounds before `freeze_from` (half of all) are FedAvg; from then on batch norm uses the aggregated
statistics in training as in testing, and neither clients nor server change them any more. Scale and shift still train.

Only batch norm switches: the code that HBN compares with puts the whole network into evaluation, dropout included. The
paper's momentum that outlives a round is not part of this. At the switch gradients jump, and FedCoda's comparison
(Table 6) converges only with their norm clipped, at 10.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import floor

from torch import Tensor, nn

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, batch_norms
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.methods import register
from fedkeel.nn.surgery import frozen_statistics


def refuse_without_global_statistics(method: str, server: Server) -> None:
    """For methods that train with the server's statistics: another part may keep all of them on the clients."""
    if not any(name.endswith("running_mean") for name in server.layout.statistics):
        raise MethodError(
            f"'{method}' uses the global statistics of batch norm, and no layer has any that travel: choose a model "
            "whose batch norm keeps running statistics, and leave out what keeps them local."
        )


@register("fixbn")
class FixBN(Method):
    """FedAvg for half of the rounds; then batch norm trains with the aggregated statistics, which stay as they are."""

    paper = "Zhong et al. 2023"
    traits = Traits(needs_batch_norm=True, capturable=True, replaces={"statistics"})

    def __init__(self, freeze_from: float = 0.5, clip_norm: float = 0.0) -> None:
        """`freeze_from`: share of the rounds after which statistics are frozen; 1 for never.
        `clip_norm`: from then on, clip the norm of all gradients together; 0 does not.
        """
        if not 0 <= freeze_from <= 1:
            raise FedkeelError(f"The 'freeze_from' of fixbn is {freeze_from}: give a number from 0 to 1.")
        if clip_norm < 0:
            raise FedkeelError(f"The 'clip_norm' of fixbn is {clip_norm}: give at least 0.")
        self.freeze_from, self.clip_norm = freeze_from, clip_norm

    def freezes(self, round: int, rounds: int) -> bool:
        """From round floor(T * freeze_from) on, T // 2 by default."""
        return round >= floor(rounds * self.freeze_from + 1e-9)  # 0.29 * 100 is below 29

    def before_training(self, server: Server) -> None:
        refuse_without_global_statistics(self.name, server)

    def start(self, client: LocalClient) -> None:
        frozen = self.freezes(client.round, client.rounds)
        client.scratch["frozen"] = batch_norms(client.model) if frozen else {}

    def step_variant(self, client: LocalClient) -> Hashable:
        return self.freezes(client.round, client.rounds)

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        with frozen_statistics(client.scratch["frozen"]):
            return super().forward(client, x)

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        if self.clip_norm and client.scratch["frozen"]:
            nn.utils.clip_grad_norm_(client.model.parameters(), self.clip_norm, foreach=True)

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return server.statistics if self.freezes(server.round, server.rounds) else mean
