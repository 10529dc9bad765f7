"""How far the clients' batch-norm statistics lie apart, layer by layer and round by round (GReg, Figure 1).

The paper plots the "variance of the BN statistics across clients" of a shallow and of a deep layer, and leaves open
over what it is taken. Here it is `variance_across_clients` of the running means and of the running variances of the
clients of the round, each counting the same: the population variance of each channel, averaged over channels.
"""

import torch

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.analysis.layer_statistics import client_statistics
from fedkeel.formulas.diagnostics import variance_across_clients


@diagnostic("statistics-divergence")
class StatisticsDivergence(Diagnostic):
    """The variance over the clients of each layer's running means and variances, averaged over channels. The higher it
    is, the worse the global statistics fit any single client."""

    title = "How far the clients' batch-norm statistics lie apart"
    paper = "GReg, Figure 1"
    needs = "batch-norm statistics"

    def measure(self, snapshot: Snapshot) -> Values:
        clients = list(client_statistics(snapshot).values())
        return {
            kind: {
                layer: float(variance_across_clients(torch.stack([getattr(c[layer], kind) for c in clients])))
                for layer in clients[0]
            }
            for kind in ("mean", "variance")
        }

    def figures(self, measured: list[Measured]) -> list[Figure]:
        figures, last = [], measured[-1]
        for kind in ("mean", "variance"):
            title, label = f"{kind.capitalize()}s", f"variance of the {kind}s over clients"
            if len(measured) > 1:
                figures.append(by_round(title, label, {m.round: m.values[kind] for m in measured}, log_y=True))
            depth, values = f"{title} by depth, {last}", last.values[kind]
            series = {"clients": list(values.values())}
            figures.append(bars(depth, label, list(values), series, x_label="layer", log_y=True))
        means = list(last.values["mean"].values())
        return keyed(figures, "variance of batch-norm means over clients", sum(means) / len(means))
