"""Accuracy under global against batch statistics (GReg, Table 1).

Each domain's test set is classified twice by the global model: batch norm normalises with the aggregated statistics,
and with those of the test batch (`evaluation_batch` samples in a random order that is always the same). Where batch
statistics win, the global ones fit no client; where they lose, they only add noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.analysis.moment import Moment, Outputs
from fedkeel.config import from_one

KINDS = ("global", "batch")


def accuracy(outputs: Outputs) -> float:
    return float(np.mean(outputs.logits.argmax(axis=1) == outputs.labels))


@diagnostic("statistics-accuracy")
class StatisticsAccuracy(Diagnostic):
    """Test accuracy of each domain under both kinds of statistics."""

    title = "Accuracy under global and under batch statistics"
    what = (
        "Test accuracy of the global model when batch norm uses the aggregated statistics, and when it uses those of "
        "the test batch. Batch statistics ahead: the aggregated ones do not fit the domain."
    )
    paper = "GReg, Table 1"
    needs_batch_norm = True

    def measure(self, moment: Moment) -> Values:
        values: Values = {}
        for kind in KINDS:
            domains = {}
            for domain, sites in moment.tested().items():
                domains[domain] = float(np.mean([accuracy(moment.test_outputs(site, kind)) for site in sites]))
            values[kind] = {**domains, "average": moment.average(domains)}
        return values

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        last = measured[-1]
        figures = [
            bars(
                f"By domain, round {from_one(last.round)}",
                "accuracy (0 to 1)",
                list(last.values["global"]),
                {f"{kind} statistics": list(last.values[kind].values()) for kind in KINDS},
                x_label="domain",
            )
        ]
        if len(measured) > 1:
            rounds = {e.round: {f"{kind} statistics": e.values[kind]["average"] for kind in KINDS} for e in measured}
            figures.insert(0, by_round("Average over the domains", "accuracy (0 to 1)", rounds))
        lost = last.values["batch"]["average"] - last.values["global"]["average"]
        return keyed(figures, "accuracy lost to global statistics", lost, "low", percent=True)
