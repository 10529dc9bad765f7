"""How features, prototypes, labels and the classifier lie.

GReg, Figure 6; FedCoda, Eqs. 4-5, Tables 5, 7 and 12, Figures 3 and 7; HBN, Figure 3; UniVarFL, Figure 1.
"""

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedkeel.analysis.diagnostic import Numbers, diagnostic
from fedkeel.analysis.snapshot import Snapshot, joined, some_clients
from fedkeel.errors import FedkeelError
from fedkeel.formulas.prototypes import local_prototypes
from fedkeel.formulas.similarity import cosines
from fedkeel.options import Positive, Range


@diagnostic("representation-divergence", paper="GReg, Figure 6", better="low")
def representation_divergence(run: Snapshot, *, eps: Positive = 1e-5) -> Numbers:
    """How differently the domains' features are distributed.

    The symmetric KL divergence between the features of two domains' test sets, every channel taken as normal, averaged
    over channels. Low: the representation does not tell the domains apart.
    """

    # 1/2 (s_i + d) / s_j + 1/2 (s_j + d) / s_i - 1, d = (m_i - m_j)^2. `eps` is added to every variance s, since behind
    # a ReLU a channel may not vary at all.
    def divergence(i: Tensor, j: Tensor) -> float:
        s_i, s_j = (features.var(dim=0, correction=0) + eps for features in (i, j))
        d = (i.mean(dim=0) - j.mean(dim=0)).square()
        return float(((s_i + d) / s_j / 2 + (s_j + d) / s_i / 2 - 1).mean())

    features = {domain: joined(outputs).features for domain, outputs in run.tested().items()}
    found = {one: {other: divergence(i, j) for other, j in features.items()} for one, i in features.items()}
    pairs = [value for one, row in found.items() for other, value in row.items() if one != other]
    return {
        "divergence between domains": float(np.mean(pairs)) if pairs else None,
        "divergence by domain and domain": found,
    }


@diagnostic("prototype-similarity", paper="FedCoda, Table 7", better="high")
def prototype_similarity(run: Snapshot) -> Numbers:
    """How alike the clients' prototypes are.

    Cosine similarity of the class means of two clients' features, each under its own trained model, after a run under
    the global one, averaged over the classes that both have: 1 where the clients place the classes in the same
    directions. The mean is over the pairs of a class, then over classes.
    """
    prototypes, counts = [], []
    for client in run.clients:
        run.put_local(client)
        batches = run.batches(client, client.train)
        found, count = local_prototypes(run.worker.model, batches, run.federation.num_classes)
        prototypes.append(found.double())
        counts.append(count)
    present, names = torch.stack(counts).T > 0, [client.name for client in run.clients]
    by_class = torch.stack([cosines(rows, rows) for rows in torch.stack(prototypes).unbind(dim=1)])  # (C, K, K)
    by_class[~(present[:, :, None] & present[:, None, :])] = torch.nan
    pairs = torch.ones_like(by_class[0], dtype=torch.bool).triu(diagonal=1)
    rows = [dict(zip(names, row, strict=True)) for row in by_class.nanmean(dim=0).tolist()]
    return {
        "similarity of prototypes": by_class[:, pairs].nanmean(dim=1).nanmean(),
        "cosine similarity by client and client": dict(zip(names, rows, strict=True)),
    }


@diagnostic("nmi", paper="FedCoda, Tables 5 and 12", better="high")
def nmi(run: Snapshot) -> Numbers:
    """How well clusters of the features are the classes.

    Normalised mutual information between K-means clusters of the test features and the labels: 1 where each class is a
    cluster of its own, 0 where clusters say nothing about the class. Of the unseen domains where there are any, as in
    the paper, else of all together.
    """
    outputs = {domain: joined(parts) for domain, parts in run.tested().items()}
    if len(outputs) > 1:
        outputs["all domains"] = joined(list(outputs.values()))
    found = {domain: clustering_nmi(o.features, o.labels, run.federation.num_classes) for domain, o in outputs.items()}
    unseen = [value for domain, value in found.items() if domain in run.held_out] or list(found.values())[-1:]
    return {"NMI of features and classes": float(np.mean(unseen)), "NMI by domain": found}


def clustering_nmi(features: Tensor, labels: Tensor, classes: int) -> float:
    """I(U; V) / ((H(U) + H(V)) / 2) of the labels (N,) and K-means clusters of the features (N, d), from 0 to 1.

    FedCoda names neither the normalisation nor the starts of K-means: here the arithmetic mean, which scikit-learn has
    by default, and the best of ten seeded starts.

    >>> clustering_nmi(torch.tensor([[0.0], [0.1], [9.0], [9.1]]), torch.tensor([0, 0, 1, 1]), classes=2)
    1.0
    """
    from sklearn.cluster import KMeans  # takes a second
    from sklearn.metrics import normalized_mutual_info_score

    clusters = min(classes, len(torch.unique(features, dim=0)))
    found = KMeans(n_clusters=clusters, n_init=10, random_state=0).fit_predict(features.numpy())
    return float(normalized_mutual_info_score(labels.numpy(), found))


@diagnostic("tsne", paper="FedCoda, Figures 3 and 7")
def tsne(run: Snapshot, *, samples: Annotated[int, Range(4)] = 1000, perplexity: Positive = 30.0) -> Numbers:
    """A map of the features.

    t-SNE of the test features, of at most so many samples, the same in every round. Classes that lie apart are easy to
    tell; colours of one class that lie apart by domain show a representation that still knows where an image is from.
    Distances between clusters mean little.
    """
    from sklearn.manifold import TSNE  # takes a second

    outputs = {domain: joined(parts) for domain, parts in run.tested().items()}
    features, _, labels = joined(list(outputs.values()))
    if len(features) < 4:
        raise FedkeelError(f"There are {len(features)} test samples: a map needs at least 4.")
    domains = [name for name, found in outputs.items() for _ in found.labels]
    drawn = np.sort(np.random.default_rng(0).permutation(len(features))[:samples])
    init, perplexity = "pca" if features.shape[1] > 1 else "random", min(perplexity, (len(drawn) - 1) / 3)
    places = TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(features[drawn].numpy())
    about = {"class": [run.federation.classes[i] for i in labels[drawn]], "domain": [domains[i] for i in drawn]}
    return {"map of the test features": dict(zip("xy", places.astype(np.float64).T.tolist(), strict=True)) | about}


@diagnostic("singular-values", paper="UniVarFL, Figure 1", better="high")
def singular_values(run: Snapshot) -> Numbers:
    """Singular values of the classifier.

    Of the final layer's weights, largest first, and the exponential of the entropy of their shares, the effective rank
    (Roy and Vetterli, 2007). A steep fall means that the classifier has come to use few directions of the feature
    space, as it does on skewed data.
    """
    run.put_global(run.clients[0])
    matrices = [w for name, w in run.worker.entries.items() if name.startswith("head.") and w.ndim == 2]
    if not matrices:
        raise FedkeelError("The head of this model has no matrix of weights: choose another diagnostic.")
    values = torch.linalg.svdvals(matrices[-1].detach().double().cpu())
    rank = torch.special.entr(values / values.sum()).sum().exp()
    return {"effective rank of the classifier": rank, "singular value by index": {"global model": values}}


@diagnostic("label-distribution", paper="HBN, Figure 3")
def label_distribution(run: Snapshot) -> Numbers:
    """How many samples of each class each client has.

    Rows that look alike: the labels are spread evenly. Rows with few filled cells: clients see few classes, as under a
    small Dirichlet coefficient. Of more than a hundred clients it is a hundred.
    """
    data, clients = run.federation, some_clients(run.federation, run.worker.config.seed)
    counts = {client.name: data.labels[client.train].bincount(minlength=data.num_classes) for client in clients}
    rows = {name: dict(zip(data.classes, found.tolist(), strict=True)) for name, found in counts.items()}
    return {"training samples by client and class": rows}
