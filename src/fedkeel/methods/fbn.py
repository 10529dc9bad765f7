"""FBN: Guerraoui et al., "Overcoming the Challenges of Batch Normalization in Federated Learning", arXiv:2405.14670.

Batch norm uses the global statistics in training as in testing, without gradient through them, so every client trains
the function that is tested. A client sends mu_k, v_k, the plain means over its steps of the batches' means and (biased)
variances; with n_k its samples and N their sum, the server makes

    mu = sum_k n_k mu_k / N,    v = sum_k n_k (v_k + (mu_k - mu)^2) / (N - 1)
    S_{t+1} = (1 - momentum) S_t + momentum (mu, v)

`variant="released"` takes the spread around the new moving average of the mean, a slip of the code released with HBN's
comparison, and so counts its lag as spread. A batch of one sample has no statistics and is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedkeel.core.state import batch_norms, moment_names
from fedkeel.formulas.aggregation import moving_average, pooled_moments
from fedkeel.methods import LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.nn.calibration import expect_statistics
from fedkeel.nn.mixed_batch_norm import averaged_statistics
from fedkeel.options import PositiveShare


@register("fbn")
@dataclass
class FBN(Method):
    """Batch norm uses the global statistics in training too; the server pools the batches' into a moving average."""

    paper = "Guerraoui et al. 2024"
    traits = Traits(needs_batch_norm=True, capturable=True, replaces={"statistics"})

    momentum: PositiveShare = 0.1  # share of the new in the server's moving average
    variant: Literal["paper", "released"] = "paper"  # "released": the variance around that average

    def prepare(self, model: nn.Module) -> None:
        expect_statistics(model)

    def before_training(self, server: Server) -> None:
        server.need_global_statistics()

    def start(self, client: LocalClient) -> None:
        norms = client.scratch["norms"] = batch_norms(client.model)
        client.scratch["steps"] = {name: torch.zeros((), device=client.device) for name in norms}

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        """In training the running statistics become the means over this round's steps."""
        with averaged_statistics(client.scratch["norms"], client.broadcast.statistics, client.scratch["steps"]):
            return super().forward(client, x)

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        shares, samples = [server.share(update) for update in updates], sum(update.samples for update in updates)
        counts = [share / sum(shares) * samples for share in shares]
        new: Tensors = {}
        for mu, v in map(moment_names, batch_norms(server.network)):
            if mu not in mean:  # it has none, or another part keeps this layer on the clients
                continue
            sent = [[update.statistics[name] for update in updates] for name in (mu, v)]
            new[mu], new[v] = pooled_moments(sent[0], sent[1], counts)
            if self.variant == "released":  # around another point, the sum of squares has N times its distance more
                moved = moving_average(server.statistics, {mu: new[mu]}, self.momentum)[mu]
                new[v] = new[v] + samples / max(samples - 1, 1) * (new[mu] - moved).square()
        return mean | moving_average(server.statistics, new, self.momentum)
