"""How much of the global statistics HBN's layers have learnt to use (HBN, Eq. 9).

Each client has a factor alpha for each channel, and sigmoid(alpha) is the weight of the global statistics in its
mixture with those of the batch; it begins at one half. Shown is its mean over a layer's channels, of each client of
the round; after a run, of each that has trained.
"""

import numpy as np

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError
from fedkeel.nn.hybrid_batch_norm import hybrid_norms


@diagnostic("mixing-factors")
class MixingFactors(Diagnostic):
    """The learnt weight of the global statistics in each layer's mixture, averaged over channels: 1 is global only, 0
    the batch alone, and it begins at 0.5."""

    title = "How much of the global statistics HBN's layers use"
    paper = "HBN, Eq. 9"

    def check(self, worker: Worker) -> None:
        if not any(layer.mix == "learned" for layer in hybrid_norms(worker.model).values()):
            raise FedkeelError(
                f"'{self.name}' looks at the factors that HBN learns, and '{worker.method.name}' has none: "
                "use it on a run with 'hbn'."
            )

    def measure(self, snapshot: Snapshot) -> Values:
        kept = {client.name: snapshot.kept(client.name) for client in snapshot.clients}
        trained = {name: tensors for name, tensors in kept.items() if tensors}
        if not trained:
            raise FedkeelError("What the clients kept is not there: it is in the checkpoints of the run.")
        return {
            layer: {name: float(t[f"{layer}.alpha"].double().sigmoid().mean()) for name, t in trained.items()}
            for layer in hybrid_norms(snapshot.worker.model)
        }

    def figures(self, measured: list[Measured]) -> list[Figure]:
        def means(values: Values) -> dict[str, float | None]:
            return {layer: float(np.mean(list(by_client.values()))) for layer, by_client in values.items()}

        label, values = "weight of the global statistics", measured[-1].values
        clients = {name: {layer: values[layer][name] for layer in values} for name in next(iter(values.values()))}
        shares = [share for by_client in values.values() for share in by_client.values()]
        figures = [
            *over_rounds("Mean over the clients", label, measured, means),
            bars(f"By layer and client, {measured[-1]}", label, clients, "layer"),
        ]
        return keyed(figures, label, float(np.mean(shares)))
