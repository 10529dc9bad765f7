"""How well clusters of the features are the classes (FedCoda, Tables 5 and 12).

K-means with as many clusters as classes on the features of a test set, then the normalised mutual information between
clusters and labels: `formulas.diagnostics.clustering_nmi`.
"""

import numpy as np

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed
from fedkeel.analysis.snapshot import joined
from fedkeel.formulas.diagnostics import clustering_nmi

EVERYTHING = "all domains"


@diagnostic("nmi")
class ClusteringNMI(Diagnostic):
    """Normalised mutual information between K-means clusters of the test features and the labels: 1 where each class is
    a cluster of its own, 0 where clusters say nothing about the class."""

    title = "How well clusters of the features are the classes"
    paper = "FedCoda, Tables 5 and 12"

    def measure(self, snapshot: Snapshot) -> Values:
        outputs = snapshot.test_features()
        if len(outputs) > 1:
            outputs[EVERYTHING] = joined(list(outputs.values()))
        classes = snapshot.federation.num_classes
        found = {domain: clustering_nmi(o.features, o.labels, classes) for domain, o in outputs.items()}
        # The papers' tables have the unseen domain, where there is one.
        unseen = [value for domain, value in found.items() if domain in snapshot.held_out]
        return {"domains": found, "number": float(np.mean(unseen)) if unseen else list(found.values())[-1]}

    def figures(self, measured: list[Measured]) -> list[Figure]:
        last = measured[-1]
        found, number = last.values["domains"], last.values["number"]
        figures = [
            *over_rounds("By round", "NMI", measured, "domains"),
            bars(f"By domain, {last}", "NMI", {"NMI": found}, "domain", number=number),
        ]
        return keyed(figures, "NMI of features and classes", number, "high")
