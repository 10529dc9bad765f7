"""The loss gap between global and batch statistics, at test time and in training (GReg, Section 3, Figures 2 and 3).

    test time       D_te = l(f(x; w_g, S_g), y) - l(f(x; w_g, S_b), y)       after aggregation, on test samples
    training time   D_tr = l(f(x; w_k, S_g), y) - l(f(x; w_k, S_b), y)       S_g as broadcast, on training samples

w_g the global and w_k a client's weights, S_g the global statistics and S_b those of the batch, l the cross-entropy.
The paper leaves open when in local training w_k is taken and how samples are averaged. Here w_k is what the client
has at the end of its round; each domain's gap is the mean over its samples, and the average is over the domains that
train. Test batches have `evaluation_batch` samples, training batches `batch_size`, in a random order that is always
the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.analysis.moment import Array, Moment, Outputs
from fedkeel.config import from_one


def log_probabilities(logits: Array) -> Array:
    """log softmax, (N, C) -> (N, C)."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def cross_entropy(outputs: Outputs) -> Array:
    """l(q, y) = -log q^y of each sample, (N,)."""
    return np.asarray(-log_probabilities(outputs.logits)[np.arange(len(outputs.labels)), outputs.labels])


def loss_gaps(under_global: Outputs, under_batch: Outputs) -> Array:
    """D of each sample, (N,); both in the same order."""
    return np.asarray(cross_entropy(under_global) - cross_entropy(under_batch))


def test_time(moment: Moment) -> dict[str, float]:
    gaps: dict[str, list[Array]] = {}
    for domain, sites in moment.tested().items():
        for site in sites:
            under_global, under_batch = moment.test_outputs(site), moment.test_outputs(site, "batch")
            gaps.setdefault(domain, []).append(loss_gaps(under_global, under_batch))
    return _means(moment, gaps)


def training_time(moment: Moment) -> dict[str, float]:
    size = moment.worker.config.batch_size
    gaps: dict[str, list[Array]] = {}
    for client in moment.clients:
        moment.put_local(client, statistics="sent")
        pair = [moment.outputs(client, client.train, batch_size=size, statistics=kind) for kind in ("global", "batch")]
        gaps.setdefault(client.domain, []).append(loss_gaps(*pair))
    return _means(moment, gaps)


def _means(moment: Moment, gaps: dict[str, list[Array]]) -> dict[str, float]:
    domains = {domain: float(np.concatenate(parts).mean()) for domain, parts in gaps.items()}
    return {**domains, "average": moment.average(domains)}


@diagnostic("loss-gap")
class LossGap(Diagnostic):
    """Loss under global minus loss under batch statistics; the training-time gap only while training."""

    title = "Loss under global minus loss under batch statistics"
    what = (
        "Above zero, the model does worse with the global statistics that it is deployed with than with those of the "
        "batch that it was trained with. Zero or below is what training on pooled data shows."
    )
    paper = "GReg, Section 3, Figures 2 and 3"
    needs_batch_norm = True

    def measure(self, moment: Moment) -> Values:
        # The clients' own models are gone after the run.
        return {"test": test_time(moment)} | ({"training": training_time(moment)} if moment.updates else {})

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        figures = []
        for kind, title in (("test", "Test-time loss gap"), ("training", "Training-time loss gap")):
            rounds = {entry.round: entry.values[kind] for entry in measured if kind in entry.values}
            if len(rounds) > 1:
                figures.append(by_round(title, "loss gap", rounds))
            elif rounds:
                ((round, gaps),) = rounds.items()
                values = {"gap": list(gaps.values())}
                figures.append(
                    bars(f"{title}, round {from_one(round)}", "loss gap", list(gaps), values, x_label="domain")
                )
        return keyed(figures, "test-time loss gap", measured[-1].values["test"]["average"], "low")
