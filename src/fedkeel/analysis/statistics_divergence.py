"""How far the clients' batch-norm statistics lie apart, layer by layer and round by round (GReg, Figure 1).

The paper plots the "variance of the BN statistics across clients" of a shallow and of a deep layer, and leaves open
over what it is taken. Here it is `variance_across_clients` of the running means and of the running variances of the
clients of the round, each counting the same: the population variance of each channel, averaged over channels.
"""

import torch
from torch import Tensor

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed
from fedkeel.analysis.snapshot import RUNNING


@diagnostic("statistics-divergence")
class StatisticsDivergence(Diagnostic):
    """The variance over the clients of each layer's running means and variances, averaged over channels. The higher it
    is, the worse the global statistics fit any single client."""

    title = "How far the clients' batch-norm statistics lie apart"
    paper = "GReg, Figure 1"
    needs = "batch-norm statistics"

    def measure(self, snapshot: Snapshot) -> Values:
        clients = list(snapshot.layer_statistics().values())
        return {
            kind: {
                layer: float(variance_across_clients(torch.stack([c[layer][kind] for c in clients])))
                for layer in clients[0]
            }
            for kind in RUNNING
        }

    def figures(self, measured: list[Measured]) -> list[Figure]:
        figures, last = list[Figure](), measured[-1]
        for kind in RUNNING:
            title, label = f"{kind.capitalize()}s", f"variance of the {kind}s over clients"
            figures += over_rounds(title, label, measured, kind, log_y=True)
            by_layer = {"clients": last.values[kind]}
            figures.append(bars(f"{title} by depth, {last}", label, by_layer, "layer", log_y=True))
        means = list(last.values["mean"].values())
        return keyed(figures, "variance of batch-norm means over clients", sum(means) / len(means))


def variance_across_clients(statistics: Tensor) -> Tensor:
    """The population variance over the clients, averaged over channels: (K, channels) -> scalar.

        v = 1/channels sum_c 1/K sum_k (s_k,c - 1/K sum_j s_j,c)^2

    Reference: GReg, Figure 1, which leaves the average open.

    >>> variance_across_clients(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
    tensor(0.5000)
    """
    return statistics.var(dim=0, correction=0).mean()
