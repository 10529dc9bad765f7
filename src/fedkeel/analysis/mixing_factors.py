"""How much of the global statistics HBN's layers have learnt to use (HBN, Eq. 9).

Each client has a factor alpha for each channel, and sigmoid(alpha) is the weight of the global statistics in its
mixture with those of the batch; it begins at one half. Shown is its mean over a layer's channels, of each client of
the round; after a run, of each that has trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.analysis.moment import Array, Moment
from fedkeel.config import from_one
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError
from fedkeel.nn.hybrid_batch_norm import hybrid_norms


def global_share(alpha: Array) -> float:
    """(C,) -> the mean over channels of sigmoid(alpha)."""
    return float((1 / (1 + np.exp(-np.asarray(alpha, dtype=np.float64)))).mean())


@diagnostic("mixing-factors")
class MixingFactors(Diagnostic):
    """Learnt weight of the global statistics, by layer and client."""

    title = "How much of the global statistics HBN's layers use"
    what = (
        "The learnt weight of the global statistics in each layer's mixture, averaged over channels: 1 is global only, "
        "0 the batch alone, and it begins at 0.5."
    )
    paper = "HBN, Eq. 9"

    def check(self, worker: Worker) -> None:
        if not any(layer.mix == "learned" for layer in hybrid_norms(worker.model).values()):
            raise FedkeelError(
                f"'{self.name}' looks at the factors that HBN learns, and '{worker.method.name}' has none: "
                "use it on a run with 'hbn'."
            )

    def measure(self, moment: Moment) -> Values:
        layers = list(hybrid_norms(moment.worker.model))
        kept = {client.name: moment.kept(client.name) for client in moment.clients}
        trained = {name: tensors for name, tensors in kept.items() if tensors}
        if not trained:
            raise FedkeelError("What the clients kept is not there: it is in the checkpoints of the run.")
        return {
            layer: {name: global_share(t[f"{layer}.alpha"].double().cpu().numpy()) for name, t in trained.items()}
            for layer in layers
        }

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        last = measured[-1]
        label, layers = "weight of the global statistics", list(last.values)
        clients = {
            name: [last.values[layer][name] for layer in layers] for name in next(iter(last.values.values()), {})
        }
        figures = [bars(f"By layer and client, round {from_one(last.round)}", label, layers, clients, x_label="layer")]
        if len(measured) > 1:
            means = {
                entry.round: {layer: float(np.mean(list(table.values()))) for layer, table in entry.values.items()}
                for entry in measured
            }
            figures.insert(0, by_round("Mean over the clients", label, means))
        shares = [share for table in last.values.values() for share in table.values()]
        return keyed(figures, label, float(np.mean(shares)))
