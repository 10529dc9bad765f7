"""How well clusters of the features are the classes (FedCoda, Tables 5 and 12).

K-means with as many clusters as classes on the features of a test set, then the normalised mutual information between
clusters and labels: I(U; V) / ((H(U) + H(V)) / 2). The paper names neither the normalisation nor the starts of K-means:
here the arithmetic mean, which scikit-learn has by default, and the best of ten seeded starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.analysis.moment import Array, Moment
from fedkeel.config import from_one

EVERYTHING = "all domains"


def clustering_nmi(features: Array, labels: NDArray[np.int64], clusters: int, seed: int = 0) -> float:
    """Features (N, d) and labels (N,) -> NMI of K-means clusters and labels, from 0 to 1."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import normalized_mutual_info_score

    # More clusters than different points cannot be found.
    clusters = min(clusters, len(np.unique(features, axis=0)))
    found = KMeans(n_clusters=clusters, n_init=10, random_state=seed).fit_predict(features)
    return float(normalized_mutual_info_score(labels, found))


@diagnostic("nmi")
class ClusteringNMI(Diagnostic):
    """Normalised mutual information of clustered features and labels, by domain."""

    title = "How well clusters of the features are the classes"
    what = (
        "Normalised mutual information between K-means clusters of the test features and the labels: 1 where each "
        "class is a cluster of its own, 0 where clusters say nothing about the class."
    )
    paper = "FedCoda, Tables 5 and 12"

    def measure(self, moment: Moment) -> Values:
        outputs, classes = moment.test_features(), moment.federation.num_classes
        found = {domain: clustering_nmi(o.features, o.labels, classes) for domain, o in outputs.items()}
        if len(outputs) > 1:
            features = np.concatenate([o.features for o in outputs.values()])
            labels = np.concatenate([o.labels for o in outputs.values()])
            found[EVERYTHING] = clustering_nmi(features, labels, classes)
        # The papers' tables have the unseen domain, where there is one.
        asked = [value for domain, value in found.items() if domain in moment.held_out]
        return {"domains": found, "number": float(np.mean(asked)) if asked else list(found.values())[-1]}

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        last = measured[-1]
        found, number = last.values["domains"], last.values["number"]
        values = {"NMI": list(found.values())}
        figures = [
            bars(
                f"By domain, round {from_one(last.round)}", "NMI", list(found), values, x_label="domain", number=number
            )
        ]
        if len(measured) > 1:
            figures.insert(0, by_round("By round", "NMI", {e.round: e.values["domains"] for e in measured}))
        return keyed(figures, "NMI of features and classes", number, "high")
