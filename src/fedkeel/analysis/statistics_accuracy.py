"""Accuracy under global against batch statistics (GReg, Table 1).

Each domain's test set is classified twice by the global model: batch norm normalises with the aggregated statistics,
and with those of the test batch (`evaluation_batch` samples in a random order that is always the same). Where batch
statistics win, the global ones fit no client; where they lose, they only add noise.
"""

import numpy as np

from fedkeel.analysis import Diagnostic, Measured, Outputs, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed

KINDS = {"global": "global statistics", "batch": "batch statistics"}


def accuracy(outputs: Outputs) -> float:
    return float((outputs.logits.argmax(dim=1) == outputs.labels).double().mean())


@diagnostic("statistics-accuracy")
class StatisticsAccuracy(Diagnostic):
    """Test accuracy of the global model when batch norm uses the aggregated statistics, and when it uses those of the
    test batch. Batch statistics ahead: the aggregated ones do not fit the domain."""

    title = "Accuracy under global and under batch statistics"
    paper = "GReg, Table 1"
    needs = "batch norm"

    def measure(self, snapshot: Snapshot) -> Values:
        def domains(kind: str) -> dict[str, float]:
            return {
                domain: float(np.mean([accuracy(snapshot.test_outputs(client, kind)) for client in clients]))
                for domain, clients in snapshot.testers().items()
            }

        return {kind: snapshot.with_average(domains(kind)) for kind in KINDS}

    def figures(self, measured: list[Measured]) -> list[Figure]:
        def averages(values: Values) -> dict[str, float | None]:
            return {name: values[kind]["average"] for kind, name in KINDS.items()}

        label, values = "accuracy (0 to 1)", measured[-1].values
        figures = [
            *over_rounds("Average over the domains", label, measured, averages),
            bars(f"By domain, {measured[-1]}", label, {name: values[kind] for kind, name in KINDS.items()}, "domain"),
        ]
        lost = values["batch"]["average"] - values["global"]["average"]
        return keyed(figures, "accuracy lost to global statistics", lost, "low", percent=True)
