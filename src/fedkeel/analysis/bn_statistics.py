"""Batch-norm statistics of two clients, channel by channel (FedWon, Figure 1b).

The paper shows "BN channel-wise statistics from two clients, each with data from a single domain", the running mean and
variance of the 4th and 5th of the batch norms of a six-layer CNN. Here: any two clients, by default the first two of
different domains, and any layers, by default the last two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic
from fedkeel.analysis.diagnostic import names
from fedkeel.analysis.figures import Figure, lines
from fedkeel.analysis.snapshot import RUNNING
from fedkeel.data.federation import Client
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError, unknown
from fedkeel.nn.calibration import normalised_layers


def two_domains(clients: Sequence[Client]) -> list[str]:
    """The first client and the next of another domain, or, where there is one domain only, the first two."""
    first, *rest = clients
    others = [client for client in rest if client.domain != first.domain] or rest
    return [client.name for client in (first, *others[:1])]


@diagnostic("bn-statistics")
@dataclass
class BatchNormStatistics(Diagnostic):
    """Mean and variance of each channel of a layer, on two clients. Where the lines part, the clients' features are
    distributed differently, and one set of statistics cannot serve both."""

    title = "Batch-norm statistics of two clients, channel by channel"
    paper = "FedWon, Figure 1b"
    needs = "batch-norm statistics"

    clients: str = ""  # their names, separated by commas; by default two of them
    layers: str = ""  # likewise; by default the last two

    def check(self, worker: Worker) -> None:
        super().check(worker)
        for name in names(self.clients):
            if not worker.federation[name].samples:
                raise FedkeelError(f"The client '{name}' does not train, so it has no statistics: choose another.")
        layers = normalised_layers(worker.model)
        for name in names(self.layers):
            if name not in layers:
                raise FedkeelError(unknown("layer with batch-norm statistics", name, layers))

    def measure(self, snapshot: Snapshot) -> Values:
        statistics = snapshot.layer_statistics()
        absent = [name for name in names(self.clients) if name not in statistics]
        if absent:
            raise FedkeelError(f"'{absent[0]}' did not take part in this round.")
        return {
            client: {
                layer: {kind: tensor.tolist() for kind, tensor in statistics[client][layer].items()}
                for layer in names(self.layers) or list(statistics[client])[-2:]
            }
            for client in names(self.clients) or two_domains(snapshot.clients)
        }

    def figures(self, measured: list[Measured]) -> list[Figure]:
        """Of the last round alone: curves of many rounds could not be told apart."""
        last, figures = measured[-1], []
        for layer in next(iter(last.values.values())):
            for kind in RUNNING:
                channels = {client: layers[layer][kind] for client, layers in last.values.items()}
                series = {client: (range(len(values)), values) for client, values in channels.items()}
                figures.append(lines(f"{layer}: {kind}, {last}", "channel", kind, series))
        return figures
