"""How alike the clients' prototypes are (FedCoda, Table 7), and how far from the global one (Eqs. 4-5).

A local prototype p_k,c is the mean feature of class c over client k's training data under its own trained model, in
evaluation mode (Eq. 4). The paper measures "the cosine similarity of local prototypes across clients" and leaves the
average open: here the mean over the pairs of clients that both have a class, then over the classes. The distance of a
client is the mean over its classes of ||p_k,c - p_c||, p_c the mean over the clients that have the class (Eq. 5).

After a run the clients' models are gone: the global one, with the layers that a client keeps, takes their place.
"""

import torch
from torch import Tensor

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed, matrix
from fedkeel.formulas.aggregation import mean_prototype
from fedkeel.formulas.prototypes import global_prototypes, local_prototypes
from fedkeel.formulas.similarity import cosines


@diagnostic("prototype-similarity")
class PrototypeSimilarity(Diagnostic):
    """Cosine similarity of the class means of two clients' features, averaged over classes: 1 where the clients place
    the classes in the same directions. The distance is to the mean prototype of all clients."""

    title = "How alike the clients' prototypes are"
    paper = "FedCoda, Table 7, Eqs. 4-5"

    def measure(self, snapshot: Snapshot) -> Values:
        found = []
        for client in snapshot.clients:
            snapshot.put_local(client)
            batches = snapshot.batches(client, client.train)
            found.append(local_prototypes(snapshot.worker.model, batches, snapshot.federation.num_classes))
        prototypes, counts = map(torch.stack, zip(*found, strict=True))
        prototypes, present, names = prototypes.double(), counts > 0, [client.name for client in snapshot.clients]
        similarities = prototype_similarities(prototypes, present)
        return {
            "clients": names,
            "similarity": similarities.nanmean(dim=0).tolist(),
            "mean": float(mean_similarity(similarities)),
            "distance": dict(zip(names, prototype_distances(prototypes, present).tolist(), strict=True)),
        }

    def figures(self, measured: list[Measured]) -> list[Figure]:
        last = measured[-1]
        names, mean, apart = (last.values[key] for key in ("clients", "mean", "distance"))
        away, overall = ("Distance to the global prototypes", "distance"), "Mean over classes and pairs of clients"
        figures = over_rounds(overall, "cosine similarity", measured, lambda v: {"mean": v["mean"]})
        figures += over_rounds(*away, measured, "distance") or [bars(*away, {"distance": apart}, "client")]
        note = f"Mean over classes and pairs: {mean:.4f}." if mean is not None else "No two clients share a class."
        title = f"Cosine similarity of two clients' prototypes, {last}"
        square = matrix(title, names, names, last.values["similarity"], "client", "client", note=note, number=mean)
        return keyed([*figures, square], "similarity of prototypes", mean, "high")


def prototype_similarities(prototypes: Tensor, present: Tensor) -> Tensor:
    """Cosine similarity of each pair of clients' prototypes, class by class, NaN where one of the two has none.

    Args:
        prototypes: (K, C, d).
        present: (K, C), bool: which classes a client has.

    Returns:
        (C, K, K)

    Reference: FedCoda, Table 7.

    >>> prototypes = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])  # two clients, one class
    >>> prototype_similarities(prototypes, torch.tensor([[True], [True]]))
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    by_class = torch.stack([cosines(rows, rows) for rows in prototypes.unbind(dim=1)])
    shared = present.T[:, :, None] & present.T[:, None, :]
    return torch.where(shared, by_class, torch.nan)


def mean_similarity(similarities: Tensor) -> Tensor:
    """(C, K, K) -> the mean over the pairs that share a class, then over the classes; NaN if no two clients share one.

    Reference: FedCoda, Table 7, which leaves the average open.

    >>> mean_similarity(torch.tensor([[[1.0, 0.5], [0.5, 1.0]]]))
    tensor(0.5000)
    """
    pairs = torch.ones_like(similarities[0], dtype=torch.bool).triu(diagonal=1)
    return similarities[:, pairs].nanmean(dim=1).nanmean()


def prototype_distances(prototypes: Tensor, present: Tensor) -> Tensor:
    """Of each client the mean distance of its prototypes to those of all clients: (K, C, d), (K, C) -> (K,).

        1/|C_k| sum_{c in C_k} ||p_k,c - p_c||,    p_c the mean over the clients that have the class

    Reference: FedCoda, Eqs. 4-5.

    >>> prototype_distances(torch.tensor([[[0.0, 0.0]], [[6.0, 8.0]]]), torch.tensor([[True], [True]]))
    tensor([5., 5.])
    """
    centers, _ = global_prototypes(list(prototypes), list(present), mean_prototype)
    distances = (prototypes - centers).norm(dim=-1)
    return torch.where(present, distances, torch.nan).nanmean(dim=1)
