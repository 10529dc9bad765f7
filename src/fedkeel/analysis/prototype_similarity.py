"""How alike the clients' prototypes are (FedCoda, Table 7), and how far from the global one (Eqs. 4-5).

A local prototype p_k,c is the mean feature of class c over client k's training data under its own trained model, in
evaluation mode (Eq. 4). The paper measures "the cosine similarity of local prototypes across clients" and leaves the
average open: here the mean over the pairs of clients that both have a class, then over the classes. The distance of a
client is the mean over its classes of ||p_k,c - p_c||, p_c the mean over the clients that have the class (Eq. 5).

After a run the clients' models are gone: the global one, with the layers that a client keeps, takes their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed, matrix
from fedkeel.analysis.moment import Array, Moment, Outputs
from fedkeel.config import from_one


def prototypes(outputs: Outputs, num_classes: int) -> Array:
    """(C, d): the mean feature of each class, NaN where there is none of it (Eq. 4)."""
    found = np.full((num_classes, outputs.features.shape[1]), np.nan)
    for c in np.unique(outputs.labels):
        found[c] = outputs.features[outputs.labels == c].mean(axis=0)
    return found


def similarities(local: Array) -> Array:
    """Prototypes (K, C, d) -> cosine similarity of each pair of clients by class, (C, K, K); NaN where one has none."""
    norms = np.linalg.norm(local, axis=-1, keepdims=True)
    unit = (local / np.where(norms == 0, 1, norms)).transpose(1, 0, 2)
    return np.asarray(unit @ unit.transpose(0, 2, 1))


def mean_similarity(local: Array) -> float:
    """The mean over the pairs that share a class, then over the classes; NaN if no two clients share one."""
    by_class = similarities(local)
    means = []
    for c in range(len(by_class)):
        pairs = [by_class[c, i, j] for i, j in combinations(range(len(local)), 2) if np.isfinite(by_class[c, i, j])]
        if pairs:
            means.append(np.mean(pairs))
    return float(np.mean(means)) if means else float("nan")


def distances(local: Array) -> list[float]:
    """Prototypes (K, C, d) -> of each client the mean distance to the global prototypes."""
    there = np.asarray(np.isfinite(local).all(axis=-1))
    count = np.maximum(there.sum(axis=0), 1)[:, None]
    center = np.where(there[..., None], local, 0).sum(axis=0) / count
    return [
        float(np.linalg.norm(own[mask] - center[mask], axis=1).mean()) for own, mask in zip(local, there, strict=True)
    ]


@diagnostic("prototype-similarity")
class PrototypeSimilarity(Diagnostic):
    """Cosine similarity of the clients' prototypes, and their distance to the global one."""

    title = "How alike the clients' prototypes are"
    what = (
        "Cosine similarity of the class means of two clients' features, averaged over classes: 1 where the clients "
        "place the classes in the same directions. The distance is to the mean prototype of all clients."
    )
    paper = "FedCoda, Table 7, Eqs. 4-5"

    def measure(self, moment: Moment) -> Values:
        local = []
        for client in moment.clients:
            moment.put_local(client)
            local.append(prototypes(moment.outputs(client, client.train), moment.federation.num_classes))
        stacked, names = np.stack(local), [client.name for client in moment.clients]
        by_class = similarities(stacked)
        shared = np.isfinite(by_class)
        pairs = np.where(shared, by_class, 0).sum(axis=0) / np.where(shared.any(axis=0), shared.sum(axis=0), np.nan)
        return {
            "clients": names,
            "similarity": pairs.tolist(),
            "mean": mean_similarity(stacked),
            "distance": dict(zip(names, distances(stacked), strict=True)),
        }

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        last = measured[-1]
        names, mean = last.values["clients"], last.values["mean"]
        figures = []
        if len(measured) > 1:
            means = {entry.round: {"mean": entry.values["mean"]} for entry in measured}
            figures.append(by_round("Mean over classes and pairs of clients", "cosine similarity", means))
            apart = {entry.round: entry.values["distance"] for entry in measured}
            figures.append(by_round("Distance to the global prototypes", "distance", apart))
        else:
            apart = last.values["distance"]
            values = {"distance": list(apart.values())}
            figures.append(bars("Distance to the global prototypes", "distance", list(apart), values, x_label="client"))
        note = f"Mean over classes and pairs: {mean:.4f}." if mean is not None else "No two clients share a class."
        title = f"Cosine similarity of two clients' prototypes, round {from_one(last.round)}"
        square = matrix(title, names, names, last.values["similarity"], "client", "client", note=note, number=mean)
        return keyed([*figures, square], "similarity of prototypes", mean, "high")
