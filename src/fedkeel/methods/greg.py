"""GReg: "Improving Batch Normalization in Federated Learning with Non-IID Features", under review, Eqs. 5-6 and
Algorithm 2.

Clients train with the statistics of their batches, the global model is tested with global ones, and where clients'
images look different the two disagree. So each step runs the batch under both and pulls the predictions together: q_b
with batch statistics, q_g with the broadcast global ones,

    L = CE(q_b, y) + alpha (KL(q_b || q_g) + KL(q_g || q_b)) / 2        from the second round on        (Eqs. 5-6)

and the server's statistics are a moving average, so that those of the next round are near (Alg. 2):

    S_{t+1} = (1 - momentum) S_t + momentum * mean_k S^k                in every round

which presumes a network whose statistics mean something, as the paper's pretrained ones do. From scratch they start at
(0, 1), and what is left of that grows from layer to layer under q_g, up to a loss that is not finite: so there the
first round's mean is taken whole.

Gradients flow through both branches; running statistics are updated by the first one only. Both run as one batch
wherever the network allows it (`nn.paired_batch_norm`), else as two passes with the same result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from fedkeel.config import Config
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, batch_norms, untouched
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError, nearest
from fedkeel.formulas.aggregation import moving_average
from fedkeel.formulas.losses import consistency_kl
from fedkeel.methods import register
from fedkeel.methods.fixbn import refuse_without_global_statistics
from fedkeel.nn.mixed_batch_norm import MIXTURES, add_shares, mixed_statistics
from fedkeel.nn.paired_batch_norm import Pairing, Pairings, naive

MODES = ("consistency", *MIXTURES)
LACKING = "lacking"  # in a broadcast whose statistics are still those of a new network, though it is not the first


@register("greg")
class GReg(Method):
    """Keeps predictions the same under batch and under global statistics."""

    paper = "GReg (under review), Eqs. 5-6"
    traits = Traits(needs_batch_norm=True, capturable=True, surgery_order=1)

    def __init__(
        self,
        alpha: float = 1.0,
        momentum: float = 0.1,
        mode: str = "consistency",
        lambda_: float = 0.5,
        warm_start: bool | str = "auto",
    ) -> None:
        """`alpha`: weight of Eq. 5. `momentum`: share of the new in the server's moving average of the statistics.
        `mode`: "consistency", or one of Table 9: "global", "mix" with `lambda_`, "mix-learned" (one lambda per layer,
        from 1/2; a weight like any other, so it travels and is averaged), "ensemble".
        `warm_start`: take the mean of the first round whole, because the initial statistics mean nothing; "auto":
        unless the run starts from given weights.
        """
        refuse_other_warm_starts("greg", warm_start)
        if mode not in MODES:
            raise FedkeelError(f"The 'mode' of greg is '{mode}': {nearest(str(mode), MODES)}")
        if alpha < 0:
            raise FedkeelError(f"The 'alpha' of greg is {alpha}: give at least 0.")
        for option, share in (("momentum", momentum), ("lambda_", lambda_)):
            if not 0 <= share <= 1:
                raise FedkeelError(f"The '{option}' of greg is {share}: give a number from 0 to 1.")
        self.alpha, self.momentum, self.mode, self.lambda_ = alpha, momentum, mode, lambda_
        self.warm_start = warm_start
        self._statistics: set[str] = set()
        self._pairings = Pairings()

    def prepare(self, model: nn.Module) -> None:
        norms = batch_norms(model)
        self._statistics = {f"{name}.{moment}" for name in norms for moment in ("running_mean", "running_var")}
        if self.mode == "mix-learned":
            add_shares(norms)

    def before_training(self, server: Server) -> None:
        refuse_without_global_statistics(self.name, server)
        # A later round has no aggregated statistics either, if none before it had enough clients to count.
        own = {name: tensor for name, tensor in server.statistics.items() if name in self._statistics}
        lacks = server.round > 0 and untouched(own)
        server.extras = {LACKING: torch.ones(())} if lacks else {}

    # -- on the client ---------------------------------------------------------------------------------------
    def start(self, client: LocalClient) -> None:
        client.scratch["norms"] = batch_norms(client.model)
        if _acts(client) and self.mode == "consistency":
            # tried once for each resident model
            pairing = self._pairings.of(client.model, lambda: next(client.data.passes(3, samples=3)).x)
            client.scratch["pairing"] = pairing

    def step_variant(self, client: LocalClient) -> Hashable:
        return _acts(client)

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        if not _acts(client) or len(x) == 1:  # a single sample has no batch statistics to be consistent with
            return super().forward(client, x)
        norms, statistics = client.scratch["norms"], client.broadcast.statistics
        if self.mode != "consistency":
            with mixed_statistics(norms, statistics, self.mode, self.lambda_):
                return super().forward(client, x)
        pairing = client.scratch["pairing"]
        run = pairing.run if isinstance(pairing, Pairing) else naive
        under_batch, under_global = run(client.model, norms, statistics, x)
        client.scratch["under_global"] = under_global.logits
        return under_batch

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        under_global: Tensor | None = client.scratch.pop("under_global", None)
        return 0.0 if under_global is None else self.alpha * consistency_kl(output.logits, under_global)

    # -- on the server ---------------------------------------------------------------------------------------
    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Alg. 2, line 726."""
        new = {name: mean[name] for name in mean if name in self._statistics}
        old = {name: server.statistics[name] for name in new}
        if starts_warm(self.warm_start, server.round, server.config, old):
            return mean
        return mean | moving_average(old, new, self.momentum)


def _acts(client: LocalClient) -> bool:
    """Whether there are aggregated statistics; in round 0 there are none yet."""
    return client.round > 0 and LACKING not in client.extras


def starts_warm(choice: bool | str, round: int, config: Config, statistics: Tensors) -> bool:
    """Whether the moving average of these statistics begins with the new ones. "auto": where they are still (0, 1), and
    no file was given to start from."""
    if choice == "auto":
        return not config.weights and untouched(statistics)
    return bool(choice) and round == 0


def refuse_other_warm_starts(method: str, given: object) -> None:
    if not isinstance(given, bool) and given != "auto":
        raise FedkeelError(f"The 'warm_start' of {method} is '{given}': give auto, true or false.")
