"""Batch-norm statistics of two clients, channel by channel (FedWon, Figure 1b).

The paper shows "BN channel-wise statistics from two clients, each with data from a single domain", the running mean and
variance of the 4th and 5th of the batch norms of a six-layer CNN. Here: any two clients, by default the first two of
different domains, and any layers, by default the last two.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, lines
from fedkeel.analysis.layer_statistics import client_statistics, normalised_layers, refuse_without_layers
from fedkeel.analysis.moment import Moment
from fedkeel.config import from_one
from fedkeel.data.federation import Client
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError, unknown


def two_domains(clients: Sequence[Client]) -> list[str]:
    """The first client and the next of another domain, or, where there is one domain only, the first two."""
    if not clients:
        return []
    first = clients[0]
    others = [client for client in clients[1:] if client.domain != first.domain] or list(clients[1:])
    return [first.name, *(other.name for other in others[:1])]


@diagnostic("bn-statistics")
class BatchNormStatistics(Diagnostic):
    """Running means and variances of some clients, by channel."""

    title = "Batch-norm statistics of two clients, channel by channel"
    what = (
        "Mean and variance of each channel of a layer, on two clients. Where the lines part, the clients' features are "
        "distributed differently, and one set of statistics cannot serve both."
    )
    paper = "FedWon, Figure 1b"

    def __init__(self, clients: str = "", layers: str = "") -> None:
        """`clients`, `layers`: names separated by commas; by default two clients and the last two layers."""
        self.clients, self.layers = _names(clients), _names(layers)

    def check(self, worker: Worker) -> None:
        refuse_without_layers(worker, self.name)
        for name in self.clients:
            if not worker.federation[name].samples:
                raise FedkeelError(f"The client '{name}' does not train, so it has no statistics: choose another.")
        layers = normalised_layers(worker.model)
        for name in self.layers:
            if name not in layers:
                raise FedkeelError(unknown("layer with batch-norm statistics", name, layers))

    def measure(self, moment: Moment) -> Values:
        statistics = client_statistics(moment)
        absent = [name for name in self.clients if name not in statistics]
        if absent:
            raise FedkeelError(f"'{absent[0]}' did not take part in this round.")
        return {
            client: {
                layer: {kind: getattr(statistics[client][layer], kind).tolist() for kind in ("mean", "variance")}
                for layer in self.layers or list(statistics[client])[-2:]
            }
            for client in self.clients or two_domains(moment.clients)
        }

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        """Of the last round alone: curves of many rounds could not be told apart."""
        last = measured[-1]
        return [
            lines(
                f"{layer}: {kind}, round {from_one(last.round)}",
                "channel",
                kind,
                {
                    client: (list(range(len(table[layer][kind]))), table[layer][kind])
                    for client, table in last.values.items()
                },
            )
            for layer in next(iter(last.values.values()))
            for kind in ("mean", "variance")
        ]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
