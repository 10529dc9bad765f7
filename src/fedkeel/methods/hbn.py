"""HBN: Chen et al., "Hybrid Batch Normalisation: Resolving the Dilemma of Batch Normalisation in Federated Learning",
ICML 2025, Eqs. 7-11 and Algorithm 1.

Statistics that are collected while the weights change fit neither the old weights nor the averaged ones. So they are
collected before training, on the broadcast weights w_g, and pooled as groups of one population. Training mixes them
with mu_b and v_b of the batch, in a share a = sigmoid(alpha) that each client learns for each channel and keeps:

    mu_k, v_k = S(w_g; D_k)                                                           (Eq. 7)
    mu_g = sum_k N_k / N mu_k,   v_g = sum_k N_k (v_k + (mu_k - mu_g)^2) / (N - 1)    (Eq. 8)
    m = (1 - a) mu_b + a mu_g,   v = (1 - a) v_b + a v_g                              (Eq. 9)
    y = gamma (x - m) / sqrt(v + eps) + beta                                          (Eq. 10)
    S_g <- (1 - momentum) S_g + momentum (mu_g, v_g)                                  (Eq. 11)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from fedkeel.core import state
from fedkeel.formulas.aggregation import moving_average, pooled_moments, weighted_mean
from fedkeel.methods import Batch, Expected, LocalClient, Method, Server, Tensors, Traits, Update, register
from fedkeel.methods.warm_start import WarmStart, begins
from fedkeel.nn.hybrid_batch_norm import hybrid_norms, recorded_moments, to_hybrid
from fedkeel.options import Count, Only, PositiveShare, checked, hints_of

PASS = Only("statistics", "pass")
PASS_BATCH, LOCAL_MOMENTUM = 64, 0.1  # samples in a batch of it; of batch norm, for statistics="moving-average"


@register("hbn")
class HBN(Method):
    """Unbiased global statistics, mixed with those of the batch in a proportion that each client learns and keeps."""

    paper = "Chen et al. 2025 (HBN)"
    # Not personal: the factors act in training alone, and one model is tested.
    traits = Traits(
        needs_memory=True, needs_batch_norm=True, personal=False, capturable=True, replaces={"statistics", "norms"}
    )
    released: "ClassVar[type[HBN]]"  # in hbn_released.py
    usual_momentum: ClassVar[float] = 0.01
    usual_start: ClassVar[WarmStart] = "auto"

    def __init__(  # and no dataclass: the option `statistics` has the name of a hook
        self,
        momentum: PositiveShare | None = None,  # Eq. 11, the share of the new; None: 0.01, 0.002 if released
        stats_samples: Annotated[Count | None, PASS, Only("variant", "paper")] = None,  # of Eq. 7, at random; all
        record: Annotated[Literal["mixture", "batch"], PASS] = "mixture",  # in Eq. 7: those of Eq. 9, or raw as in A.2
        mix: Literal["learned", "fixed", "global", "batch"] = "learned",  # Eq. 9: Table 6
        statistics: Literal["pass", "moving-average"] = "pass",  # Eq. 7: Table 6
        pooling: Literal["pooled", "mean"] = "pooled",  # Eq. 8: Table 6
        warm_start: WarmStart = "auto",  # with the first round's moments: few rounds from scratch do
        variant: Literal["paper", "released"] = "paper",  # as described, or as the authors' code does it
    ) -> None:
        given = dict(locals())
        for option, hint in hints_of(HBN).items():
            checked(given[option], hint, f"The '{option}' of hbn")
        if variant == "released":
            self.__class__ = self.released
        self.momentum, self.stats_samples = momentum or self.usual_momentum, stats_samples
        self.record, self.mix = "batch" if mix == "global" else record, mix  # that mixture would never move
        self.has_pass, self.pooling = statistics == "pass", pooling
        self.warm_start = self.usual_start if warm_start == "auto" else warm_start

    def start(self, client: LocalClient) -> None:
        """Eq. 7, before training."""
        if self.has_pass:
            first = client.round == 0 and begins(self.warm_start, client, client.broadcast.statistics)
            client.scratch["moments"] = self.collect(client, "batch" if first else self.record)
        else:
            for layer in hybrid_norms(client.model).values():
                layer.start_recording("batch", momentum=LOCAL_MOMENTUM)

    @torch.no_grad()
    def collect(self, client: LocalClient, record: str) -> Tensors:
        """S(w; D_k) of Eq. 7 for the present weights w; layers normalise as in training."""
        layers, training = hybrid_norms(client.model), client.model.training
        client.model.eval()  # no dropout: the statistics are for a network without it
        for layer in layers.values():
            layer.train()
            layer.start_recording(record)
        for batch in self.batches(client):
            client.model(batch.x)
        client.model.train(training)
        return recorded_moments(layers)

    def batches(self, client: LocalClient) -> Iterator[Batch]:
        # Shuffled: data often lie class by class, and a batch of one class is normalised as no batch in training is.
        return client.data.passes(PASS_BATCH, samples=self.stats_samples, shuffle=True, least=PASS_BATCH // 2)

    def pool(self, sent: Sequence[Tensors], samples: Sequence[int]) -> Tensors:
        """Eq. 8 for each layer. N_k is the client's data size, whatever part of it the pass has seen."""
        if self.pooling == "mean":
            return weighted_mean([{name: s[name] for pair in self.moments for name in pair} for s in sent], samples)
        new: Tensors = {}
        for mu, v in self.moments:
            new[mu], new[v] = pooled_moments([s[mu] for s in sent], [s[v] for s in sent], samples)
        return new

    def prepare(self, model: nn.Module) -> None:
        """Eqs. 9-10: every batch norm becomes a `HybridBatchNorm`, whose alpha stays on the client."""
        layers = to_hybrid(model, mix=self.mix)
        self.moments = [state.moment_names(layer) for layer in layers]
        self.kept = [f"{layer}.alpha" for layer in layers]

    def finish(self, client: LocalClient) -> Tensors:
        """The moments go up in place of the global statistics, which training has used and left alone."""
        state.load(client.model, client.scratch.get("moments") or recorded_moments(hybrid_norms(client.model)))
        return {}

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Eq. 11, of what Eq. 8 makes of the clients' moments."""
        new = self.pool([update.statistics for update in updates], [update.samples for update in updates])
        first = begins(self.warm_start, server, server.statistics)
        return mean | moving_average(server.statistics, new, 1.0 if first else self.momentum)

    def before_evaluation(self, server: Server) -> None:
        """Algorithm 1, round T + 1: Eqs. 7-8 for the weights to be tested, with the clients of this round. Weights that
        were trained under the moving average alone are tested under it too: to them it is a constant."""
        if not self.has_pass or self.mix == "global":
            return
        if answers := server.ask(server.participants, "statistics").values():
            new = self.pool([answer.tensors for answer in answers], [answer.samples for answer in answers])
            server.statistics = server.statistics | new

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        if question != "statistics":
            return super().answer(client, question, tensors)
        return self.collect(client, self.record)

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        names = [name for pair in self.moments for name in pair] if question == "statistics" else []
        return {name: Expected.like(name, server.statistics[name]) for name in names}
