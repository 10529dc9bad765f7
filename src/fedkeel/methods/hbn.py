"""HBN: Chen et al., "Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning",
ICML 2025, Eqs. 7-11 and Algorithm 1.

Statistics that are collected while the weights change fit neither the old weights nor the averaged ones. So each client
collects them before training, on the broadcast weights (Eq. 7); the server pools them as groups of one population
(Eq. 8) into a moving average (Eq. 11); and training normalises with a mixture of batch and global statistics whose
proportion each client learns for each channel and keeps (Eqs. 9-10, `nn.HybridBatchNorm`).

What a client collects is, in the paper's proof (A.2), the moments of a layer's inputs, and in the authors' code those
that the layer normalised with, the mixture of Eq. 9: `record`. Their code differs in more than that, and the paper's
tables are of it: `variant="released"` has the moments of the first 64 samples in the order of their classes, augmented,
which count as at most 64, and factors that are averaged for clients that have none yet. Its clipping and its schedule
are options of the run: clip_norm=10, schedule=exponential, decay=0.998.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Literal

import torch
from torch import nn

from fedkeel.core import state
from fedkeel.errors import FedkeelError
from fedkeel.formulas.aggregation import moving_average, pooled_moments, weighted_mean
from fedkeel.methods import Batch, Expected, LocalClient, Method, Server, Tensors, Traits, Update, register
from fedkeel.methods.greg import DUE, LACKING, WarmStart, starts_warm
from fedkeel.nn.hybrid_batch_norm import hybrid_norms, recorded_moments, to_hybrid
from fedkeel.options import Count, Only, PositiveShare, checked, hints_of

RELEASED_SAMPLES = 64
PASS, MOVING = Only("statistics", "pass"), Only("statistics", "moving-average")
SEEN = "seen"  # in the memory of a client that has factors of its own


@register("hbn")
class HBN(Method):
    """Unbiased global statistics, mixed with those of the batch in a proportion that each client learns and keeps."""

    paper = "Chen et al. 2025 (HBN)"
    # Not personal: the factors act in training alone, and one model is tested. Before `fedwon` removes what is left.
    traits = Traits(
        needs_memory=True,
        needs_batch_norm=True,
        personal=False,
        capturable=True,
        replaces={"statistics", "norms"},
    )

    def __init__(  # and no dataclass: the option `statistics` has the name of a hook
        self,
        momentum: PositiveShare | None = None,  # Eq. 11, the share of the new; None: 0.01, 0.002 if released
        stats_samples: Annotated[Count | None, PASS] = None,  # of the pass of Eq. 7, drawn at random; None for all
        stats_batch: Annotated[Count, PASS] = RELEASED_SAMPLES,  # of the pass
        # by the pass: what a layer normalised with, or raw moments
        record: Annotated[Literal["mixture", "batch"], PASS] = "mixture",
        mix: Literal["learned", "fixed", "global", "batch"] = "learned",  # Eq. 9: Table 6
        statistics: Literal["pass", "moving-average"] = "pass",  # Table 6
        pooling: Literal["pooled", "mean"] = "pooled",  # Eq. 8: Table 6
        local_momentum: Annotated[PositiveShare, MOVING] = 0.1,  # of "moving-average"
        warm_start: WarmStart = "auto",  # with the first round's moments: few rounds from scratch do
        variant: Literal["paper", "released"] = "paper",  # as described, or as the authors' code does it
    ) -> None:
        given = dict(locals())
        for option, hint in hints_of(HBN).items():
            checked(given[option], hint, f"The '{option}' of hbn")
        released = variant == "released"
        if released and (stats_samples is not None or stats_batch != RELEASED_SAMPLES):
            raise FedkeelError(
                f"The 'variant' of hbn is 'released', whose pass is one batch of the first {RELEASED_SAMPLES} samples: "
                "leave 'stats_samples' and 'stats_batch' out."
            )
        self.momentum = momentum if momentum is not None else 0.002 if released else 0.01
        self.stats_samples, self.stats_batch = stats_samples, stats_batch
        # With "global" the mixture is the old global statistics, which would then never move.
        self.record, self.mix = "batch" if mix == "global" else record, mix
        self.statistics_from, self.pooling, self.local_momentum = statistics, pooling, local_momentum
        self.variant, self.warm_start = variant, False if released and warm_start == "auto" else warm_start
        self._averages_factors = released and mix == "learned"
        self._moments: list[tuple[str, str]] = []  # names of each layer's mean and variance

    def prepare(self, model: nn.Module) -> None:
        to_hybrid(model, mix=self.mix)
        self._moments = [state.moment_names(layer) for layer in hybrid_norms(model)]
        self.kept = [f"{layer}.alpha" for layer in hybrid_norms(model)]  # the factors

    def start(self, client: LocalClient) -> None:
        self._take_factors(client)
        if self.statistics_from == "pass":
            # After the first round the server says it: a look at the statistics would make every client wait for a GPU.
            first = client.round == 0 and self._starts_warm(client, client.broadcast.statistics)
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
        return {name: client.model.get_parameter(name).detach().clone() for name in self.kept}

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
        for batch in self._batches(client):
            client.model(batch.x)
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

    def before_training(self, server: Server) -> None:
        """The factors are there from the first broadcast on, so that it keeps its shape."""
        if server.round == 0 and self.warm_start is True:
            server.memory = {DUE: torch.ones(())}
        if not self._averages_factors:
            late = server.round > 0 and self._starts_warm(server, server.statistics)
            server.extras = {LACKING: torch.ones(())} if late else {}
        elif not server.extras:
            server.extras = {name: torch.zeros_like(t) for name, t in self._like_factors(server).items()}

    def _like_factors(self, server: Server) -> Tensors:
        """A tensor of the shape and on the device of each factor: the mean of its layer."""
        return {factor: server.statistics[mean] for factor, (mean, _) in zip(self.kept, self._moments, strict=True)}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        """In the authors' code the factors are averaged as the weights are, over the clients of the round."""
        if not self._averages_factors:
            return {}
        return weighted_mean([update.extras for update in updates], [server.share(update) for update in updates])

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        if question != "statistics":
            factors = self._like_factors(server) if self._averages_factors else {}
            return {name: Expected.like(name, tensor) for name, tensor in factors.items()}
        return {name: Expected.like(name, tensor) for name, tensor in self._own(server.statistics).items()}

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Eq. 8, then Eq. 11."""
        new = self._pool([update.statistics for update in updates], [update.samples for update in updates])
        old = server.statistics
        momentum = 1.0 if self._starts_warm(server, old) else self.momentum
        server.memory = {}
        return mean | moving_average(old, new, momentum)

    def _starts_warm(self, party: LocalClient | Server, statistics: Tensors) -> bool:
        return starts_warm(self.warm_start, party, self._own(statistics))

    def _own(self, statistics: Tensors) -> Tensors:
        """Those of hybrid batch norms."""
        return {name: statistics[name] for pair in self._moments for name in pair}

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
            return weighted_mean([self._own(m) for m in moments], counts)
        pooled: Tensors = {}
        for mean, var in self._moments:
            pooled[mean], pooled[var] = pooled_moments([m[mean] for m in moments], [m[var] for m in moments], counts)
        return pooled
