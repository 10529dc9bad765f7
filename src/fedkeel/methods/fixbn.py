"""FixBN: Zhong et al., "Making Batch Normalization Great in Federated Deep Learning", NeurIPS workshop 2023.

The mean of models that were each trained under their own batch statistics is no minimum under shared ones. So training
has two stages: the rounds before `freeze_from` (half of all) are FedAvg; from then on batch norm uses the aggregated
statistics in training as in testing, and neither clients nor server change them any more. Scale and shift still train,
and only batch norm switches, not dropout. At the switch gradients jump: FedCoda, Table 6, clips their norm at 10. The
paper's momentum that outlives a round is not part of this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor

from torch import Tensor, nn

from fedkeel.core.state import batch_norms
from fedkeel.methods import LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.nn.calibration import expect_statistics
from fedkeel.nn.surgery import frozen_statistics
from fedkeel.options import NotNegative, Share


@register("fixbn")
@dataclass
class FixBN(Method):
    """FedAvg for half of the rounds; then batch norm trains with the aggregated statistics, which stay as they are."""

    paper = "Zhong et al. 2023"
    traits = Traits(needs_batch_norm=True, capturable=True, replaces={"statistics"})

    freeze_from: Share = 0.5  # share of the rounds after which statistics are frozen; 1 for never
    clip_norm: NotNegative = 0.0  # from then on, of all gradients together; 0 does not clip (FedCoda, Table 6: 10)

    def freezes(self, round: int, rounds: int) -> bool:
        """From round floor(T * freeze_from) on, T // 2 by default."""
        return round >= floor(rounds * self.freeze_from + 1e-9)  # 0.29 * 100 is below 29

    def prepare(self, model: nn.Module) -> None:
        expect_statistics(model)

    def before_training(self, server: Server) -> None:
        server.need_global_statistics()

    def start(self, client: LocalClient) -> None:
        frozen = client.scratch["freezes"] = self.freezes(client.round, client.rounds)
        client.scratch["frozen"] = batch_norms(client.model) if frozen else {}

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        with frozen_statistics(client.scratch["frozen"]):
            return super().forward(client, x)

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        if self.clip_norm and client.scratch["frozen"]:
            nn.utils.clip_grad_norm_(client.model.parameters(), self.clip_norm, foreach=True)

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return server.statistics if self.freezes(server.round, server.rounds) else mean
