"""What the papers measure of a trained federation, as pure functions of tensors; `fedkeel.analysis` shows them.

| function | paper | what |
|---|---|---|
| `variance_across_clients` | GReg, Figure 1 | how far the clients' batch-norm statistics lie apart |
| `feature_divergence` | GReg, Sec. 4.4 | how differently two domains' features are distributed |
| `true_class_probability` | GReg, Figure 7 | the q^y of Proposition 1; the rest of it is in `losses` |
| `prototype_similarities`, `mean_similarity` | FedCoda, Table 7 | how alike the clients' prototypes are |
| `prototype_distances` | FedCoda, Eqs. 4-5 | how far they lie from the global ones |
| `clustering_nmi` | FedCoda, Tables 5 and 12 | how well clusters of the features are the classes |
| `gradient_norm`, `gradient_norms` | FedCoda, Figure 4, Lemma 1 | of all gradients together, of each |
| `effective_rank` | UniVarFL, Figure 1 | how many directions the classifier uses |

Symbols: K clients, C classes, d feature dimensions, N samples.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedkeel.formulas.aggregation import mean_prototype
from fedkeel.formulas.prototypes import global_prototypes
from fedkeel.formulas.similarity import cosines


def variance_across_clients(statistics: Tensor) -> Tensor:
    """The population variance over the clients, averaged over channels: (K, channels) -> scalar.

        v = 1/channels sum_c 1/K sum_k (s_k,c - 1/K sum_j s_j,c)^2

    Reference: GReg, Figure 1, which leaves the average open.

    >>> variance_across_clients(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
    tensor(0.5000)
    """
    return statistics.var(dim=0, correction=0).mean()


def feature_divergence(features_i: Tensor, features_j: Tensor, eps: float = 1e-5) -> Tensor:
    """Symmetric KL divergence of two sets of features, every channel taken as normal, averaged over channels.

        KL(N_i || N_j) + KL(N_j || N_i) = 1/2 (s_i + d) / s_j + 1/2 (s_j + d) / s_i - 1,    d = (m_i - m_j)^2

    Args:
        features_i, features_j: (N, d) and (M, d).
        eps: added to every variance s, since behind a ReLU a channel may not vary at all.

    Reference: GReg, Sec. 4.4.

    >>> feature_divergence(torch.tensor([[0.0], [2.0]]), torch.tensor([[2.0], [4.0]]), eps=0)  # d = 4, variances 1
    tensor(4.)
    """
    variance_i, variance_j = (f.var(dim=0, correction=0) + eps for f in (features_i, features_j))
    distance = (features_i.mean(dim=0) - features_j.mean(dim=0)).square()
    return ((variance_i + distance) / variance_j / 2 + (variance_j + distance) / variance_i / 2 - 1).mean()


def true_class_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """q^y, the predicted probability of the true class: (N, C) and (N,) -> (N,).

    Reference: GReg, Proposition 1 and Figure 7.

    >>> true_class_probability(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]))
    tensor([0.8000])
    """
    return F.cross_entropy(logits, labels, reduction="none").neg().exp()


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


def gradient_norms(parameters: Iterable[Tensor]) -> Tensor:
    """The L2 norm of each parameter's gradient, 0 without one, in double precision, on their device: (P,).

    Reference: FedCoda, Eq. 10 and Lemma 1.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradient_norms([weight, torch.zeros(1)]).tolist()
    [5.0, 0.0]
    """
    gradients = [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, in double precision, on their device.

    Reference: FedCoda, Figure 4; UniVarFL, Theorem 1.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradient_norm([weight]).item()
    5.0
    """
    return gradient_norms(parameters).square().sum().sqrt()


def effective_rank(singular_values: Tensor) -> float:
    """exp of the entropy of the normalised singular values: all equal give their number.

    Reference: Roy and Vetterli, 2007; for the classifier of UniVarFL, Figure 1.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 2.0])), 4)
    3.0
    """
    shares = singular_values[singular_values > 0] / singular_values.sum()
    return float(torch.special.entr(shares).sum().exp())
