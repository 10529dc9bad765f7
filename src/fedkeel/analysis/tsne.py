"""A map of the features in two dimensions, by class and domain (FedCoda, Figures 3 and 7).

t-SNE (van der Maaten and Hinton, 2008) of the penultimate-layer outputs on the test sets. The paper gives no
parameters: scikit-learn's defaults (perplexity 30, started from the principal components), seeded, on at most
`samples` images drawn at random in all, the same ones in every round. The NMI of the features stands beside it
(`fedkeel.analysis.nmi`). Of many recorded rounds `MOST_MAPS` are drawn; `diagnostics/tsne.jsonl` has all.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.diagnostic import names
from fedkeel.analysis.figures import Figure, points
from fedkeel.analysis.nmi import clustering_nmi
from fedkeel.analysis.snapshot import joined
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError, unknown
from fedkeel.options import Positive, Range

MOST_MAPS = 4


def embedding(features: Tensor, perplexity: float = 30.0, seed: int = 0) -> list[list[float]]:
    """Features (N, d) -> x and y of the N places. A perplexity that so few samples cannot have is lowered."""
    from sklearn.manifold import TSNE  # takes a second

    perplexity = min(perplexity, (len(features) - 1) / 3)
    init = "pca" if min(features.shape) >= 2 else "random"
    places = TSNE(n_components=2, perplexity=perplexity, init=init, random_state=seed).fit_transform(features.numpy())
    return places.astype(np.float64).T.tolist()  # type: ignore[no-any-return]


@diagnostic("tsne")
@dataclass
class FeatureMap(Diagnostic):
    """t-SNE of the test features. Classes that lie apart are easy to tell; colours of one class that lie apart by
    domain show a representation that still knows where an image is from. Distances between clusters mean little."""

    title = "A map of the features"
    paper = "FedCoda, Figures 3 and 7"

    samples: Annotated[int, Range(4)] = 1000  # at most, of all domains together
    domains: str = ""  # only these, separated by commas
    perplexity: Positive = 30.0  # about how many neighbours a point has
    seed: int = 0  # of its start

    def check(self, worker: Worker) -> None:
        there = dict.fromkeys(client.domain for client in worker.federation.one_of_each() if len(client.test))
        for name in names(self.domains):
            if name not in there:
                raise FedkeelError(unknown("domain", name, there))

    def measure(self, snapshot: Snapshot) -> Values:
        outputs = snapshot.test_features()
        outputs = {name: outputs[name] for name in outputs if name in (names(self.domains) or outputs)}
        features, _, labels = joined(list(outputs.values()))
        domains = [name for name, o in outputs.items() for _ in o.labels]
        classes = snapshot.federation.classes
        nmi = clustering_nmi(features, labels, len(classes))
        if len(features) < 4:
            raise FedkeelError(f"There are {len(features)} test samples: a map needs at least 4.")
        drawn = np.sort(np.random.default_rng(self.seed).permutation(len(features))[: self.samples])
        x, y = embedding(features[drawn], self.perplexity, self.seed)
        shown = {"class": [classes[label] for label in labels[drawn]], "domain": [domains[i] for i in drawn]}
        return {"x": x, "y": y, **shown, "nmi": nmi}

    def figures(self, measured: list[Measured]) -> list[Figure]:
        figures = over_rounds("NMI by round", "NMI", measured, lambda values: {"NMI": values["nmi"]})
        count = min(len(measured), MOST_MAPS)
        for place in range(count):  # at even distances, the first round and the last among them
            entry = measured[round(place * (len(measured) - 1) / max(count - 1, 1))]
            x, y, classes, domains, nmi = (entry.values[key] for key in ("x", "y", "class", "domain", "nmi"))
            note = f"NMI of K-means clusters of the features and the classes: {nmi:.3f}."
            figures.append(points(f"Test features, {entry}", x, y, classes, domains, note=note))
        return figures
