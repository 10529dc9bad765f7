"""HBN: Chen et al., "Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning",
ICML 2025, Eqs. 7-11 and Algorithm 1.

Statistics that are collected while the weights change fit neither the old weights nor the averaged ones. So each client
collects them before training, on the broadcast weights (Eq. 7); the server pools them as groups of one population
(Eq. 8) into a moving average (Eq. 11); and training normalises with a mixture of batch and global statistics whose
proportion each client learns for each channel and keeps (Eqs. 9-10, `nn.HybridBatchNorm`).

What a client collects is, in the paper's proof (A.2), the moments of a layer's inputs, and in the authors' code those
that the layer normalised with, the mixture of Eq. 9: `record`. Their code differs in more than that, and the paper's
tables are of it: `variant="released"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import nn

from fedkeel.config import Config
from fedkeel.core import state
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError, nearest
from fedkeel.formulas.aggregation import moving_average, pooled_moments, weighted_mean
from fedkeel.methods import register
from fedkeel.methods.greg import LACKING, refuse_other_warm_starts, starts_warm
from fedkeel.nn.hybrid_batch_norm import MIXES, RECORDS, hybrid_norms, recorded_moments, to_hybrid

CHOICES = {
    "record": RECORDS,
    "mix": MIXES,
    "statistics": ("pass", "moving-average"),
    "pooling": ("pooled", "mean"),
    "variant": ("paper", "released"),
}
RELEASED_SAMPLES = 64
SEEN = "seen"  # in the memory of a client that has factors of its own


@register("hbn")
class HBN(Method):
    """Unbiased global statistics, mixed with those of the batch in a proportion that each client learns and keeps."""

    paper = "Chen et al. 2025 (HBN)"
    traits = Traits(
        needs_memory=True, needs_batch_norm=True, capturable=True, replaces={"statistics"}, surgery_order=-1
    )

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
        warm_start: bool | str = "auto",
        variant: str = "paper",
    ) -> None:
        """`momentum`: of Eq. 11, the share of the new; None for 0.01, in the released variant for 0.002.
        `stats_samples`: of the statistics pass, drawn at random; None for all. `stats_batch`: its batch size.
        `record`: what the pass collects, the "mixture" that a layer normalised with, or "batch" moments.
        Table 6: `statistics`, `pooling`, `mix`; `local_momentum` is that of "moving-average". With `mix` "global" the
        mixture is the old global statistics, which would then never move: there it is always the "batch" moments.
        `warm_start`: take the first round's batch moments whole, so that few rounds from scratch do; "auto": in the
        paper's variant, unless the run starts from given weights.
        `variant`: "released" for the authors' code: moments of the first 64 samples in the order of their classes,
        augmented, which count as at most 64; and factors that are averaged for clients that have none yet. Its
        clipping and its schedule are options of the run: clip_norm=10, schedule=exponential, decay=0.998.
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
        if variant == "released" and (stats_samples is not None or stats_batch != RELEASED_SAMPLES):
            raise FedkeelError(
                f"The 'variant' of hbn is 'released', whose pass is one batch of the first {RELEASED_SAMPLES} samples: "
                "leave 'stats_samples' and 'stats_batch' out."
            )
        refuse_other_warm_starts("hbn", warm_start)
        self.stats_samples, self.stats_batch = stats_samples, stats_batch
        self.record, self.mix = "batch" if mix == "global" else record, mix
        self.statistics_from, self.pooling = statistics, pooling
        self.local_momentum, self.variant = local_momentum, variant
        self.warm_start = False if variant == "released" and warm_start == "auto" else warm_start
        self._moments: list[tuple[str, str]] = []  # names of each layer's mean and variance
        self._factors: list[str] = []

    def prepare(self, model: nn.Module) -> None:
        to_hybrid(model, mix=self.mix)
        self._moments = [(f"{layer}.running_mean", f"{layer}.running_var") for layer in hybrid_norms(model)]
        self._factors = [f"{layer}.alpha" for layer in hybrid_norms(model)]

    def is_local(self, name: str) -> bool:
        return name in self._factors

    @property
    def _averages_factors(self) -> bool:
        return self.variant == "released" and self.mix == "learned"

    # -- on the client ---------------------------------------------------------------------------------------
    def start(self, client: LocalClient) -> None:
        self._take_factors(client)
        if self.statistics_from == "pass":
            # After the first round the server says it: a look at the statistics would make every client wait for a GPU.
            first = client.round == 0 and self._starts_warm(0, client.config, client.broadcast.statistics)
            warm = first or LACKING in client.extras
            client.scratch["moments"] = self._pass(client, "batch" if warm else self.record)
        else:
            for layer in hybrid_norms(client.model).values():
                layer.start_recording("batch", momentum=self.local_momentum)

    def finish(self, client: LocalClient) -> Tensors:
        """The moments go up in place of the global statistics, which training has used and left alone."""
        moments = client.scratch.get("moments") or recorded_moments(hybrid_norms(client.model))
        state.load(client.model, moments)
        if not self._averages_factors:
            return {}
        client.memory = {SEEN: torch.ones((), device=client.device)}
        return {name: client.model.get_parameter(name).detach().clone() for name in self._factors}

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        if question != "statistics":
            return super().answer(client, question, tensors)
        self._take_factors(client)
        return self._pass(client, self.record)

    def _take_factors(self, client: LocalClient) -> None:
        """The engine has loaded the client's own; one that has none yet gets the mean of the last round's."""
        if self._averages_factors and SEEN not in client.memory:
            state.load(client.model, client.extras)

    @torch.no_grad()
    def _pass(self, client: LocalClient, record: str) -> Tensors:
        """Eq. 7: moments of the local data under the present weights; layers normalise as in training."""
        layers, training = hybrid_norms(client.model), client.model.training
        client.model.eval()  # no dropout: the statistics are for a network without it
        for layer in layers.values():
            layer.train()
            layer.start_recording(record)
        client.repeat(("pass", record), lambda batch: client.model(batch.x), self._batches(client))
        client.model.train(training)
        return recorded_moments(layers)

    def _batches(self, client: LocalClient) -> Iterator[Batch]:
        if self.variant == "released":
            return islice(client.data.passes(RELEASED_SAMPLES, augment=True, by_class=True), 1)
        # Shuffled: data often lie class by class, and a batch of one class is normalised as no batch in training is.
        # A rest of one sample would hardly have moments; batches of one size are the same work again and again.
        return client.data.passes(
            self.stats_batch, samples=self.stats_samples, shuffle=True, least=(self.stats_batch + 1) // 2
        )

    # -- on the server ---------------------------------------------------------------------------------------
    def before_training(self, server: Server) -> None:
        """The factors are there from the first broadcast on, so that it keeps its shape."""
        if not self._averages_factors:
            late = server.round > 0 and self._starts_warm(server.round, server.config, server.statistics)
            server.extras = {LACKING: torch.ones(())} if late else {}
        elif not server.extras:
            server.extras = {name: torch.zeros_like(t) for name, t in self._like_factors(server).items()}

    def _like_factors(self, server: Server) -> Tensors:
        """A tensor of the shape and on the device of each factor: the mean of its layer."""
        return {factor: server.statistics[mean] for factor, (mean, _) in zip(self._factors, self._moments, strict=True)}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        """In the authors' code the factors are averaged as the weights are, over the clients of the round."""
        if not self._averages_factors:
            return {}
        return weighted_mean([update.extras for update in updates], [server.share(update) for update in updates])

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        if question != "statistics":
            factors = self._like_factors(server) if self._averages_factors else {}
            return {name: Expected.like(name, tensor) for name, tensor in factors.items()}
        return {name: Expected.like(name, server.statistics[name]) for pair in self._moments for name in pair}

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Eq. 8, then Eq. 11."""
        new = self._pool([update.statistics for update in updates], [update.samples for update in updates])
        old = server.statistics
        momentum = 1.0 if self._starts_warm(server.round, server.config, old) else self.momentum
        return mean | moving_average(old, new, momentum)

    def _starts_warm(self, round: int, config: Config, statistics: Tensors) -> bool:
        own = {name: statistics[name] for pair in self._moments for name in pair}
        return starts_warm(self.warm_start, round, config, own)

    def before_evaluation(self, server: Server) -> None:
        """Statistics lag the weights by a round: those of the weights to be tested, from the clients of this round.

        Weights that were trained under the moving average alone are tested under it too: to them it is a constant.
        """
        if self.statistics_from == "pass" and self.mix != "global":
            answers = server.ask(server.participants, "statistics").values()
            if answers:
                moments = self._pool([answer.tensors for answer in answers], [answer.samples for answer in answers])
                server.statistics = server.statistics | moments

    def _pool(self, moments: Sequence[Tensors], samples: Sequence[int]) -> Tensors:
        """Eq. 8 for every layer; N_k is the client's data size, whatever part of it the pass has seen. In the authors'
        code it is the size of that part."""
        counts = list(samples)
        if self.variant == "released" and self.statistics_from == "pass":
            counts = [min(n, RELEASED_SAMPLES) for n in samples]
        if self.pooling == "mean":
            return weighted_mean([{name: m[name] for pair in self._moments for name in pair} for m in moments], counts)
        pooled: Tensors = {}
        for mean, var in self._moments:
            pooled[mean], pooled[var] = pooled_moments([m[mean] for m in moments], [m[var] for m in moments], counts)
        return pooled
