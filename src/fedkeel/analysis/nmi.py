"""How well clusters of the features are the classes (FedCoda, Tables 5 and 12).

K-means with as many clusters as classes on the features of a test set, then the normalised mutual information between
clusters and labels: `clustering_nmi`.
"""

import numpy as np
import torch
from torch import Tensor

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed
from fedkeel.analysis.snapshot import joined

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


def clustering_nmi(features: Tensor, labels: Tensor, clusters: int, seed: int = 0) -> float:
    """Normalised mutual information of the labels and K-means clusters of the features, from 0 to 1.

        NMI = I(U; V) / ((H(U) + H(V)) / 2)

    The paper names neither the normalisation nor the starts of K-means: here the arithmetic mean, which scikit-learn
    has by default, and the best of ten seeded starts.

    Args:
        features: (N, d).
        labels: (N,).
        clusters: as many as there are classes; fewer where there are not that many different points.

    Reference: FedCoda, Tables 5 and 12.

    >>> clustering_nmi(torch.tensor([[0.0], [0.1], [9.0], [9.1]]), torch.tensor([0, 0, 1, 1]), clusters=2)
    1.0
    """
    from sklearn.cluster import KMeans  # takes a second
    from sklearn.metrics import normalized_mutual_info_score

    clusters = min(clusters, len(torch.unique(features, dim=0)))
    found = KMeans(n_clusters=clusters, n_init=10, random_state=seed).fit_predict(features.numpy())
    return float(normalized_mutual_info_score(labels.numpy(), found))
