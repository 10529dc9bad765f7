"""GReg: "Improving Batch Normalization in Federated Learning with Non-IID Features", Eqs. 5-6 and Algorithm 2.

Clients train with the statistics of their batches, the global model is tested with global ones, and on images that look
different the two disagree. So each step pulls together q_b, predicted with batch statistics, and q_g, with global S.

    l_reg = 1/2 KL(q_b || q_g) + 1/2 KL(q_g || q_b)                                              (Eq. 5)
    L = l(q_b, y) + alpha l_reg                           from the second round on               (Eq. 6)
    S <- (1 - momentum) S + momentum sum_k N_k / N S^k                                           (Algorithm 2)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor, nn

from fedkeel.core.state import batch_norms, moment_names
from fedkeel.formulas.aggregation import moving_average
from fedkeel.formulas.losses import consistency_kl
from fedkeel.methods import Batch, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.methods.warm_start import WarmStart, begins
from fedkeel.nn.mixed_batch_norm import add_shares, mixed_statistics
from fedkeel.nn.paired_batch_norm import Pairings, at_once, naive
from fedkeel.options import NotNegative, Only, Share


@register("greg")
@dataclass
class GReg(Method):
    """Keeps predictions the same under batch and under global statistics."""

    paper = "GReg (under review), Eqs. 5-6"
    traits = Traits(needs_batch_norm=True, capturable=True)

    alpha: Annotated[NotNegative, Only("mode", "consistency")] = 1.0  # of Eq. 6
    momentum: Share = 0.1  # of Algorithm 2: the share of the new
    mode: Literal["consistency", "global", "mix", "mix-learned", "ensemble"] = "consistency"  # the others: Table 9
    lambda_: Annotated[Share, Only("mode", "mix")] = 0.5  # "mix-learned" has one for each layer, a weight, from 1/2
    warm_start: WarmStart = "auto"  # take the first round's mean whole; "auto": unless weights are given

    _pairs: Pairings = field(default_factory=Pairings, init=False)  # how each resident model runs both at once

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        return lambda: add_shares(batch_norms(model)) if self.mode == "mix-learned" else None  # of what is left

    def before_training(self, server: Server) -> None:
        server.need_global_statistics()

    def start(self, client: LocalClient) -> None:
        client.scratch["norms"], client.scratch["acts"] = batch_norms(client.model), client.round > 0
        if client.scratch["acts"] and self.mode == "consistency":
            client.scratch["paired"] = self._pairs.of(client.model, lambda: next(client.data.passes(3, samples=3)).x)

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        """q_b; q_g is for the loss. A single sample has no batch statistics to be consistent with."""
        if not client.scratch["acts"] or len(x) == 1:
            return super().forward(client, x)
        norms, s = client.scratch["norms"], client.broadcast.statistics
        if self.mode != "consistency":
            with mixed_statistics(norms, s, self.mode, self.lambda_):
                return super().forward(client, x)
        run = at_once if client.scratch["paired"] else naive
        q_b, q_g = run(client.model, norms, s, x)
        client.scratch["q_g"] = q_g.logits
        return q_b

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        """Eq. 6 without its first term; Eq. 5 is `consistency_kl`."""
        q_g = client.scratch.pop("q_g", None)
        return 0.0 if q_g is None else self.alpha * consistency_kl(output.logits, q_g)

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Algorithm 2: the server's moving average of S^k."""
        names = [name for layer in batch_norms(server.network) for name in moment_names(layer)]
        new = {name: mean[name] for name in names if name in mean}
        if begins(self.warm_start, server, server.statistics):
            return mean
        return mean | moving_average(server.statistics, new, self.momentum)
