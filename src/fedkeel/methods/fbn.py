"""FBN: Guerraoui et al., "Overcoming the Challenges of Batch Normalization in Federated Learning", arXiv:2405.14670.

Batch norm uses the global statistics in training as in testing, without gradient through them, so every client trains
the function that is tested. A client sends mu_k, v_k, the plain means over its steps of the batches' means and (biased)
variances; with n_k its samples and N their sum, the server makes

    mu = sum_k n_k mu_k / N,    v = sum_k n_k (v_k + (mu_k - mu)^2) / (N - 1)
    S_{t+1} = (1 - momentum) S_t + momentum (mu, v)

The code released with HBN's comparison takes the spread around the new moving average m of the mean, a slip, and so
counts its lag as spread: v = sum_k n_k (v_k + (mu_k - m)^2) / (N - 1). That is `variant="released"`; by default it is
around mu, as the law of total variance has it. A batch of one sample has no statistics and is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, batch_norms
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError, nearest
from fedkeel.formulas.aggregation import moving_average, pooled_moments
from fedkeel.methods import register
from fedkeel.methods.fixbn import refuse_without_global_statistics
from fedkeel.nn.mixed_batch_norm import averaged_statistics

STEPS = "_steps"
VARIANTS = ("paper", "released")


@register("fbn")
class FBN(Method):
    """Batch norm uses the global statistics in training too; the server pools the batches' into a moving average."""

    paper = "Guerraoui et al. 2024"
    traits = Traits(needs_batch_norm=True, capturable=True, replaces={"statistics"}, surgery_order=1)

    def __init__(self, momentum: float = 0.1, variant: str = "paper") -> None:
        """`momentum`: share of the new in the server's moving average. `variant`: "released" for the variance around
        that average instead of the clients' mean, as in the code released with HBN.
        """
        if variant not in VARIANTS:
            raise FedkeelError(f"The 'variant' of fbn is '{variant}': {nearest(str(variant), VARIANTS)}")
        if not 0 < momentum <= 1:
            raise FedkeelError(f"The 'momentum' of fbn is {momentum}: give a number above 0 and at most 1.")
        self.momentum, self.variant = momentum, variant
        self._layers: list[str] = []

    def prepare(self, model: nn.Module) -> None:
        norms = {name: norm for name, norm in batch_norms(model).items() if isinstance(norm.running_mean, Tensor)}
        self._layers = list(norms)
        for norm in norms.values():
            assert isinstance(norm.running_mean, Tensor)
            # Not persistent: it is no part of the model. Allocated once: a captured graph keeps counting on it.
            norm.register_buffer(STEPS, norm.running_mean.new_zeros(()), persistent=False)

    def before_training(self, server: Server) -> None:
        refuse_without_global_statistics(self.name, server)

    # -- on the client: the running statistics become the means over this round's steps ------------------------
    def start(self, client: LocalClient) -> None:
        norms = batch_norms(client.model)
        client.scratch["norms"] = norms
        client.scratch["steps"] = {name: getattr(norms[name], STEPS).zero_() for name in self._layers}

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        scratch = client.scratch
        with averaged_statistics(scratch["norms"], client.broadcast.statistics, scratch["steps"]):
            return super().forward(client, x)

    # -- on the server ---------------------------------------------------------------------------------------
    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        shares = [server.share(update) for update in updates]
        samples = sum(update.samples for update in updates)
        counts = [share / sum(shares) * samples for share in shares]
        new: Tensors = {}
        for layer in self._layers:
            mu, v = f"{layer}.running_mean", f"{layer}.running_var"
            if mu not in mean:  # another part keeps this layer on the clients
                continue
            sent = [[update.statistics[name] for update in updates] for name in (mu, v)]
            new[mu], new[v] = pooled_moments(sent[0], sent[1], counts)
            if self.variant == "released":  # around another point, the sum of squares has N times its distance more
                moved = moving_average(server.statistics, {mu: new[mu]}, self.momentum)[mu]
                new[v] = new[v] + samples / max(samples - 1, 1) * (new[mu] - moved).square()
        return mean | moving_average(server.statistics, new, self.momentum)
