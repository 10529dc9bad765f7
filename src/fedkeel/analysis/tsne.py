"""A map of the features in two dimensions, by class and domain (FedCoda, Figures 3 and 7).

t-SNE (van der Maaten and Hinton, 2008) of the penultimate-layer outputs on the test sets. The paper gives no
parameters: scikit-learn's defaults (perplexity 30, started from the principal components), seeded, on at most
`samples` images drawn at random in all, the same ones in every round. The NMI of the features stands beside it
(`fedkeel.analysis.nmi`). Of many recorded rounds `MOST_MAPS` are drawn; `diagnostics/tsne.jsonl` has all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, by_round, points
from fedkeel.analysis.moment import Array, Moment
from fedkeel.analysis.nmi import clustering_nmi
from fedkeel.config import from_one
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError, unknown

MOST_MAPS = 4


def embedding(features: Array, perplexity: float = 30.0, seed: int = 0) -> Array:
    """Features (N, d) -> places (N, 2). A perplexity that so few samples cannot have is lowered."""
    from sklearn.manifold import TSNE

    perplexity = min(perplexity, (len(features) - 1) / 3)
    init = "pca" if min(features.shape) >= 2 else "random"
    places = TSNE(n_components=2, perplexity=perplexity, init=init, random_state=seed).fit_transform(features)
    return np.asarray(places, dtype=np.float64)


@diagnostic("tsne")
class FeatureMap(Diagnostic):
    """t-SNE of the test features by class and domain, with their NMI."""

    title = "A map of the features"
    what = (
        "t-SNE of the test features. Classes that lie apart are easy to tell; colours of one class that lie apart by "
        "domain show a representation that still knows where an image is from. Distances between clusters mean little."
    )
    paper = "FedCoda, Figures 3 and 7"

    def __init__(self, samples: int = 1000, domains: str = "", perplexity: float = 30.0, seed: int = 0) -> None:
        """`samples`: at most, of all domains together. `domains`: only these, separated by commas."""
        if samples < 4 or not perplexity > 0:
            raise FedkeelError(
                "The 'samples' of tsne are at least 4, and its 'perplexity' is above 0: give such numbers."
            )
        self.samples, self.perplexity, self.seed = samples, perplexity, seed
        self.domains = [name.strip() for name in domains.split(",") if name.strip()]

    def check(self, worker: Worker) -> None:
        there = dict.fromkeys(site.domain for site in worker.federation.one_of_each() if len(site.test))
        for name in self.domains:
            if name not in there:
                raise FedkeelError(unknown("domain", name, there))

    def measure(self, moment: Moment) -> Values:
        outputs = moment.test_features()
        outputs = {name: o for name, o in outputs.items() if name in (self.domains or outputs)}
        features = np.concatenate([o.features for o in outputs.values()])
        labels = np.concatenate([o.labels for o in outputs.values()])
        domains = np.concatenate([np.full(len(o.labels), name) for name, o in outputs.items()])
        classes = moment.federation.classes
        nmi = clustering_nmi(features, labels, len(classes))
        if len(features) > self.samples:
            kept = np.sort(np.random.default_rng(self.seed).permutation(len(features))[: self.samples])
            features, labels, domains = features[kept], labels[kept], domains[kept]
        if len(features) < 4:
            raise FedkeelError(f"There are {len(features)} test images: a map needs at least 4.")
        places = embedding(features, self.perplexity, self.seed)
        return {
            "x": places[:, 0].tolist(),
            "y": places[:, 1].tolist(),
            "class": [classes[label] for label in labels],
            "domain": domains.tolist(),
            "nmi": nmi,
        }

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        figures = []
        if len(measured) > 1:
            figures.append(by_round("NMI by round", "NMI", {e.round: {"NMI": e.values["nmi"]} for e in measured}))
        for round, values in spread_out(measured, MOST_MAPS):
            note = f"NMI of K-means clusters of the features and the classes: {values['nmi']:.3f}."
            title = f"Test features, round {from_one(round)}"
            figures.append(points(title, values["x"], values["y"], values["class"], values["domain"], note=note))
        return figures


def spread_out(measured: Sequence[Measured], most: int) -> list[Measured]:
    """Of many, `most` at even distances, the first and the last among them."""
    if len(measured) <= most:
        return list(measured)
    return [measured[round(place * (len(measured) - 1) / (most - 1))] for place in range(most)]
