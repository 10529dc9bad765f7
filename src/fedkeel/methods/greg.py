"""GReg: "Improving Batch Normalization in Federated Learning with Non-IID Features", under review, Eqs. 5-6 and
Algorithm 2.

Clients train with the statistics of their batches, the global model is tested with global ones, and where clients'
images look different the two disagree. So each step runs the batch under both and pulls the predictions together: q_b
with batch statistics, q_g with the broadcast global ones,

    L = CE(q_b, y) + alpha (KL(q_b || q_g) + KL(q_g || q_b)) / 2        from the second round on        (Eqs. 5-6)
    S_{t+1} = (1 - momentum) S_t + momentum * mean_k S^k                on the server, in every round   (Alg. 2)

so that the statistics of the next round are near. That presumes a network whose statistics mean something. From scratch
they start at (0, 1), and what is left of that grows from layer to layer under q_g: there the first mean is taken whole.

Gradients flow through both branches; running statistics are updated by the first one only. Both run as one batch
wherever the network allows it (`nn.paired_batch_norm`), else as two passes with the same result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from fedkeel.core.state import batch_norms, moment_names, untouched
from fedkeel.formulas.aggregation import moving_average
from fedkeel.formulas.losses import consistency_kl
from fedkeel.methods import Batch, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.nn.mixed_batch_norm import add_shares, mixed_statistics
from fedkeel.nn.paired_batch_norm import Pairing, Pairings, naive
from fedkeel.options import NotNegative, Only, Share

WarmStart = Literal["auto"] | bool
LACKING = "lacking"  # in a broadcast whose statistics are still those of a new network, though it is not the first
DUE = "due"  # in the server's memory until a round counts: the warm start that was asked for is still to come


@register("greg")
@dataclass
class GReg(Method):
    """Keeps predictions the same under batch and under global statistics."""

    paper = "GReg (under review), Eqs. 5-6"
    traits = Traits(needs_batch_norm=True, capturable=True)

    alpha: Annotated[NotNegative, Only("mode", "consistency")] = 1.0  # weight of Eq. 5
    momentum: Share = 0.1  # share of the new in the server's moving average (Alg. 2)
    mode: Literal["consistency", "global", "mix", "mix-learned", "ensemble"] = "consistency"  # the others: Table 9
    # of "mix"; "mix-learned" has one for each layer, a weight like any other, from 1/2
    lambda_: Annotated[Share, Only("mode", "mix")] = 0.5
    warm_start: WarmStart = "auto"  # take the first round's mean whole; "auto": unless weights are given

    _pairings: Pairings = field(default_factory=Pairings, init=False)

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        # afterwards: to see what batch norm the others have left
        return lambda: add_shares(batch_norms(model)) if self.mode == "mix-learned" else None

    def before_training(self, server: Server) -> None:
        server.need_global_statistics()
        if server.round == 0 and self.warm_start is True:
            server.memory = {DUE: torch.ones(())}
        # A later round has no aggregated statistics either, if none before it had enough clients to count.
        lacks = server.round > 0 and untouched(_of_batch_norm(server, server.statistics))
        server.extras = {LACKING: torch.ones(())} if lacks else {}

    def start(self, client: LocalClient) -> None:
        client.scratch["norms"], client.scratch["acts"] = batch_norms(client.model), _acts(client)
        if client.scratch["acts"] and self.mode == "consistency":
            # tried once for each resident model
            pairing = self._pairings.of(client.model, lambda: next(client.data.passes(3, samples=3)).x)
            client.scratch["pairing"] = pairing

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        if not client.scratch["acts"] or len(x) == 1:  # a single sample has no batch statistics to be consistent with
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

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Alg. 2, line 726."""
        warm = starts_warm(self.warm_start, server, _of_batch_norm(server, server.statistics))
        server.memory = {}
        return mean if warm else mean | moving_average(server.statistics, _of_batch_norm(server, mean), self.momentum)


def _of_batch_norm(server: Server, statistics: Tensors) -> Tensors:
    own = {name for layer in batch_norms(server.network) for name in moment_names(layer)}
    return {name: tensor for name, tensor in statistics.items() if name in own}


def _acts(client: LocalClient) -> bool:
    """Whether there are aggregated statistics; in round 0 there are none yet."""
    return client.round > 0 and LACKING not in client.extras


def starts_warm(choice: WarmStart, party: LocalClient | Server, statistics: Tensors) -> bool:
    """Whether the moving average of these statistics begins with the new ones. True: in the first round that counts.
    "auto": where they are still (0, 1), and no file was given to start from."""
    if choice == "auto":
        return not party.config.weights and untouched(statistics)
    return choice and (party.round == 0 or DUE in party.memory)
