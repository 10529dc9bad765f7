"""HBN: Chen et al., "Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning",
ICML 2025, Eqs. 7-11 and Algorithm 1.

Statistics that are collected while the weights change fit neither the old weights nor the averaged ones. So each client
collects them before training, on the broadcast weights (Eq. 7); the server pools them as groups of one population
(Eq. 8) into a moving average (Eq. 11); and training normalises with a mixture of batch and global statistics whose
proportion each client learns for each channel and keeps (Eqs. 9-10, `nn.HybridBatchNorm`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from fedkeel import state
from fedkeel.aggregation import moving_average, pooled_moments
from fedkeel.errors import FedkeelError, nearest
from fedkeel.messages import Expected, Update
from fedkeel.method import Method
from fedkeel.methods import register
from fedkeel.nn.hybrid_batch_norm import MIXES, RECORDS, hybrid_norms, recorded_moments, to_hybrid
from fedkeel.parties import Batch, LocalClient, Server
from fedkeel.state import Tensors

CHOICES = {
    "record": RECORDS,
    "mix": MIXES,
    "statistics": ("pass", "moving-average"),
    "pooling": ("pooled", "mean"),
    "variant": ("paper", "released"),
}
RELEASED_SAMPLES = 64


@register("hbn")
class HBN(Method):
    """Unbiased global statistics, mixed with those of the batch in a proportion that each client learns and keeps."""

    paper = "Chen et al. 2025 (HBN)"
    needs_memory = True
    needs_batch_norm = True
    capturable = True
    replaces = frozenset({"statistics"})
    surgery_order = -1  # before `fedwon` removes what normalisation is left

    def __init__(
        self,
        momentum: float | None = None,
        stats_samples: int | None = None,
        stats_batch: int = 64,
        record: str = "mixture",
        mix: str = "learned",
        statistics: str = "pass",
        pooling: str = "pooled",
        local_momentum: float = 0.1,
        warm_start: bool = False,
        variant: str = "paper",
    ) -> None:
        """`momentum`: of Eq. 11, the share of the new; None for 0.01, in the released variant for 0.002.
        `stats_samples`: of the statistics pass, drawn at random; None for all. `stats_batch`: its batch size.
        `record`: what the pass collects, the "mixture" that a layer normalised with, or "batch" moments.
        Table 6: `statistics`, `pooling`, `mix`; `local_momentum` is that of "moving-average".
        `warm_start`: take the first round's batch moments whole, so that few rounds from scratch do.
        `variant`: "released" for the pass and the momentum of the authors' code.
        """
        given = {"record": record, "mix": mix, "statistics": statistics, "pooling": pooling, "variant": variant}
        for option, choice in given.items():
            if choice not in CHOICES[option]:
                raise FedkeelError(f"The '{option}' of hbn is '{choice}': {nearest(str(choice), CHOICES[option])}")
        self.momentum = momentum if momentum is not None else {"paper": 0.01, "released": 0.002}[variant]
        for option, share in (("momentum", self.momentum), ("local_momentum", local_momentum)):
            if not 0 < share <= 1:
                raise FedkeelError(f"The '{option}' of hbn is {share}: give a number above 0 and at most 1.")
        for option, number in (("stats_samples", stats_samples), ("stats_batch", stats_batch)):
            if number is not None and number < 1:
                raise FedkeelError(f"The '{option}' of hbn is {number}: give at least 1.")
        self.stats_samples, self.stats_batch = stats_samples, stats_batch
        self.record, self.mix = record, mix
        self.statistics_from, self.pooling = statistics, pooling
        self.local_momentum, self.warm_start, self.variant = local_momentum, warm_start, variant
        self._moments: list[tuple[str, str]] = []  # names of each layer's mean and variance
        self._factors: set[str] = set()

    def prepare(self, model: nn.Module) -> None:
        to_hybrid(model, mix=self.mix)
        self._moments = [(f"{layer}.running_mean", f"{layer}.running_var") for layer in hybrid_norms(model)]
        self._factors = {f"{layer}.alpha" for layer in hybrid_norms(model)}

    def is_local(self, name: str) -> bool:
        return name in self._factors

    # -- on the client ---------------------------------------------------------------------------------------
    def start(self, client: LocalClient) -> None:
        if self.statistics_from == "pass":
            client.scratch["moments"] = self._pass(client)
        else:
            for layer in hybrid_norms(client.model).values():
                layer.start_recording("batch", momentum=self.local_momentum)

    def finish(self, client: LocalClient) -> Tensors:
        """The moments go up in place of the global statistics, which training has used and left alone."""
        moments = client.scratch.get("moments") or recorded_moments(hybrid_norms(client.model))
        state.load(client.model, moments)
        return {}

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        return self._pass(client) if question == "statistics" else super().answer(client, question, tensors)

    @torch.no_grad()
    def _pass(self, client: LocalClient) -> Tensors:
        """Eq. 7: moments of the local data under the present weights; layers normalise as in training."""
        layers, training = hybrid_norms(client.model), client.model.training
        record = "batch" if self.warm_start and client.round == 0 else self.record
        client.model.eval()  # no dropout: the statistics are for a network without it
        for layer in layers.values():
            layer.train()
            layer.start_recording(record)
        client.repeat(("pass", record), lambda batch: client.model(batch.x), self._batches(client))
        client.model.train(training)
        return recorded_moments(layers)

    def _batches(self, client: LocalClient) -> Iterator[Batch]:
        if self.variant == "released":
            return islice(client.data.passes(RELEASED_SAMPLES, augment=True), 1)
        # Shuffled: data often lie class by class, and a batch of one class is normalised as no batch in training is.
        # A rest of one sample would hardly have moments; batches of one size are the same work again and again.
        return client.data.passes(
            self.stats_batch, samples=self.stats_samples, shuffle=True, least=(self.stats_batch + 1) // 2
        )

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        if question != "statistics":
            return {}
        return {name: Expected.like(name, server.statistics[name]) for pair in self._moments for name in pair}

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Eq. 8, then Eq. 11."""
        new = self._pool([update.statistics for update in updates], [update.samples for update in updates])
        old, momentum = server.statistics, 1.0 if self.warm_start and server.round == 0 else self.momentum
        return mean | {name: moving_average(old[name], moment, momentum) for name, moment in new.items()}

    def before_evaluation(self, server: Server) -> None:
        """Statistics lag the weights by a round: those of the weights to be tested, from the clients of this round."""
        if self.statistics_from == "pass":
            answers = server.ask(server.participants, "statistics").values()
            if answers:
                moments = self._pool([answer.tensors for answer in answers], [answer.samples for answer in answers])
                server.statistics = server.statistics | moments

    def _pool(self, moments: Sequence[Tensors], samples: Sequence[int]) -> Tensors:
        """Eq. 8 for every layer; N_k is the client's data size, whatever part of it the pass has seen."""
        counts = [min(n, RELEASED_SAMPLES) for n in samples] if self.variant == "released" else list(samples)
        if self.pooling == "mean":
            return state.mean([{name: m[name] for pair in self._moments for name in pair} for m in moments], counts)
        pooled: Tensors = {}
        for mean, var in self._moments:
            pooled[mean], pooled[var] = pooled_moments([m[mean] for m in moments], [m[var] for m in moments], counts)
        return pooled
