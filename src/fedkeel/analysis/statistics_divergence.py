"""How far the clients' batch-norm statistics lie apart, layer by layer and round by round (GReg, Figure 1).

The paper plots the "variance of the BN statistics across clients" of a shallow and of a deep layer, and leaves open
over what it is taken. Here, with the running mean mu_k and variance s_k of client k in a layer of C channels:

    v(mu) = 1/C sum_c 1/K sum_k (mu_k,c - 1/K sum_j mu_j,c)^2        v(s) likewise

over the clients of the round, each counting the same: the population variance of each channel, averaged over channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.analysis.layer_statistics import client_statistics, refuse_without_layers
from fedkeel.analysis.moment import Array, Moment
from fedkeel.config import from_one
from fedkeel.engine.local import Worker


def variance_across_clients(statistics: Array) -> float:
    """(K, C) -> the variance over the K clients, averaged over the C channels."""
    return float(np.asarray(statistics, dtype=np.float64).var(axis=0).mean())


@diagnostic("statistics-divergence")
class StatisticsDivergence(Diagnostic):
    """Variance over the clients of the running means and variances of every layer."""

    title = "How far the clients' batch-norm statistics lie apart"
    what = (
        "The variance over the clients of each layer's running means and variances, averaged over channels. The higher "
        "it is, the worse the global statistics fit any single client."
    )
    paper = "GReg, Figure 1"

    def check(self, worker: Worker) -> None:
        refuse_without_layers(worker, self.name)

    def measure(self, moment: Moment) -> Values:
        statistics = list(client_statistics(moment).values())
        return {
            kind: {
                layer: variance_across_clients(np.stack([getattr(client[layer], kind) for client in statistics]))
                for layer in statistics[0]
            }
            for kind in ("mean", "variance")
        }

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        figures = []
        for kind, text in (("mean", "means"), ("variance", "variances")):
            title, label = text.capitalize(), f"variance of the {text} over clients"
            rounds = {entry.round: entry.values[kind] for entry in measured}
            if len(rounds) > 1:
                figures.append(by_round(title, label, rounds, log_y=True))
            last = measured[-1]
            figures.append(
                bars(
                    f"{title} by depth, round {from_one(last.round)}",
                    label,
                    list(last.values[kind]),
                    {"clients": list(last.values[kind].values())},
                    x_label="layer",
                    log_y=True,
                )
            )
        mean = float(np.mean(list(measured[-1].values["mean"].values())))
        return keyed(figures, "variance of batch-norm means over clients", mean)
