"""Prototypes: a class as one point in feature space, or as several, of one client and of the federation.

Symbols: K clients, C classes, d feature dimensions, P prototypes of all classes together.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.client import Batch
from fedkeel.formulas.clustering import cluster_means
from fedkeel.formulas.similarity import cosines

__all__ = ["clustered", "global_prototypes", "local_prototypes", "prototype_contrast"]

_LEAST_SIMILARITY = 1e-6
"""Where a power below 1 of a similarity stops growing steeper."""


@torch.no_grad()
def local_prototypes(model: nn.Module, batches: Iterable[Batch], num_classes: int) -> tuple[Tensor, Tensor]:
    """The mean feature of each class over the batches, with the model in evaluation mode.

        p_c = 1/|D_c| sum_{x in D_c} f(x)

    Returns:
        Prototypes (C, d), zero for a class that is not there, and the number of samples of each class, (C,).

    >>> from fedkeel.models import Classifier
    >>> model = Classifier(nn.Identity(), nn.Linear(1, 2), feature_dim=1, num_classes=2)
    >>> local_prototypes(model, [Batch(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 1]))], num_classes=2)
    (tensor([[2.],
            [5.]]), tensor([2., 1.]))
    """
    training = model.training
    model.eval()
    sums, counts = [], []
    for batch in batches:
        features: Tensor = model(batch.x).features
        # A product instead of an indexed sum: on a GPU that would add in another order every time.
        membership = F.one_hot(batch.y, num_classes).T.to(torch.float64)
        sums.append(membership @ features.double())
        counts.append(membership.sum(dim=1))
    model.train(training)
    count = torch.stack(counts).sum(dim=0)
    means = torch.stack(sums).sum(dim=0) / count.clamp_min(1)[:, None]
    return means.to(torch.get_default_dtype()), count.to(torch.get_default_dtype())


def global_prototypes(
    prototypes: Sequence[Tensor],
    present: Sequence[Tensor],
    rule: Callable[[Tensor], Tensor],
    previous: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """One prototype for each class, by `rule` from those of the clients that have the class.

    A class that no client of this round has keeps its previous prototype, or stays absent.

    Args:
        prototypes: K tensors (C, d).
        present: K tensors (C,), bool.
        rule: (number of clients with the class, d) -> (d,), e.g. `aggregation.fair_prototype`.
        previous: what this function returned in the round before.

    Returns:
        Prototypes (C, d), zero for absent classes, and which classes have one, (C,), bool.

    >>> ours, theirs = torch.tensor([[1.0], [8.0]]), torch.tensor([[3.0], [0.0]])
    >>> have = [torch.tensor([True, True]), torch.tensor([True, False])]
    >>> global_prototypes([ours, theirs], have, rule=lambda rows: rows.mean(dim=0))[0].flatten()
    tensor([2., 8.])
    """
    stacked, having = torch.stack(list(prototypes)), torch.stack(list(present))
    result, known = previous if previous is not None else (torch.zeros_like(stacked[0]), torch.zeros_like(having[0]))
    result, known = result.clone(), known | having.any(dim=0)
    for c in having.any(dim=0).nonzero().flatten().tolist():
        result[c] = rule(stacked[having[:, c], c])
    return result, known


def clustered(points: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """The points of each class by the means of their clusters: FINCH, last partition, cosine similarity.

    Args:
        points: (n, d).
        classes: (n,), int64; points of class -1 are none.

    Returns:
        Prototypes (P, d), class by class, and the class of each, (P,).

    >>> points = torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 1.0], [0.0, 5.0]])
    >>> clustered(points, torch.tensor([0, 0, 0, 0]))
    (tensor([[2., 0.],
            [0., 3.]]), tensor([0, 0]))
    """
    points, classes = points.detach().cpu(), classes.cpu()
    rows, names = [points[:0]], [classes[:0]]
    for c in sorted(set(classes.tolist())):
        if c >= 0:
            means = cluster_means(points[classes == c])
            rows.append(means)
            names.append(classes.new_full((len(means),), c))
    return torch.cat(rows), torch.cat(names)


def padded(prototypes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """The same with rows of zeros of class -1 behind, up to a power of two.

    A step that is captured as a CUDA graph is captured anew when a shape changes: so it seldom does.
    """
    missing = (1 << max(len(classes) - 1, 0).bit_length()) - len(classes)
    return F.pad(prototypes, (0, 0, 0, missing)), F.pad(classes, (0, missing), value=-1)


def class_means(prototypes: Tensor, classes: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The plain mean of each class's prototypes, (C, d), zero where it has none, and which classes have any, (C,)."""
    membership = (torch.arange(num_classes, device=classes.device)[:, None] == classes).to(prototypes.dtype)
    count = membership.sum(dim=1)
    return membership @ prototypes / count.clamp_min(1)[:, None], count > 0


def regrouped(
    updates: Sequence[tuple[Tensor, Tensor]], previous: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The server's side: all clients' prototypes of a class, clustered, and padded.

    A class that no client of this round has keeps its previous prototypes.

    Args:
        updates: prototypes (P_k, d) and their classes (P_k,), of each client.
        previous: what this function returned in the round before.
    """
    device = updates[0][0].device
    rows, classes = clustered(torch.cat([p for p, _ in updates]), torch.cat([c for _, c in updates]))
    if previous is not None:
        old_rows, old_classes = previous[0].cpu(), previous[1].cpu()
        kept = (old_classes >= 0) & ~torch.isin(old_classes, classes)
        rows, classes = torch.cat([rows, old_rows[kept]]), torch.cat([classes, old_classes[kept]])
    rows, classes = padded(rows, classes)
    return rows.to(device), classes.to(device)


# -- losses ----------------------------------------------------------------------------------------------------------
def prototype_contrast(
    features: Tensor, labels: Tensor, prototypes: Tensor, classes: Tensor, temperature: float, alpha: float = 1.0
) -> Tensor:
    """Contrast of each feature's similarities to the prototypes of its class with those to all, batch mean.

        L = -log( sum_{k: c_k = y} exp(sim(z, p_k)^alpha / tau) / sum_k exp(sim(z, p_k)^alpha / tau) )

    sim is the cosine similarity. A class may have any number of prototypes; samples of a class that has none are left
    out of the mean, and the loss is 0 when no sample is left.

    With alpha below 1 (FedPLVM's alpha-sparsity) similarities count by their power, which is not defined below 0 and
    infinitely steep at 0: those below 1e-6 are taken as 1e-6, without gradient. After a ReLU none is negative.

    Args:
        features: (B, d).
        labels: (B,), int64.
        prototypes: (P, d). Rows of no class may hold anything, NaN included.
        classes: (P,), int64: the class of each prototype, -1 for rows that are none.
        temperature: tau.
        alpha: above 0.

    Returns:
        Scalar, at least 0.

    Reference: FPL (Huang et al., CVPR 2023), cluster prototypes contrastive learning, with alpha = 1; FedPLVM (Wang et
    al., NeurIPS 2024), alpha-sparsity prototype loss.

    >>> prototypes, classes = torch.tensor([[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]), torch.tensor([0, 1, -1])
    >>> loss = prototype_contrast(torch.tensor([[5.0, 0.0]]), torch.tensor([0]), prototypes, classes, temperature=1.0)
    >>> round(loss.item(), 4)  # log(1 + 1/e)
    0.3133
    """
    present = classes >= 0
    similarity = cosines(features, prototypes.where(present[:, None], 0))
    if alpha != 1:
        similarity = similarity.clamp_min(_LEAST_SIMILARITY).pow(alpha)
    similarity = similarity / temperature
    lowest = torch.finfo(similarity.dtype).min
    own = labels[:, None] == classes
    of_class = similarity.masked_fill(~own, lowest).logsumexp(dim=1)
    of_all = similarity.masked_fill(~present, lowest).logsumexp(dim=1)
    counts = own.any(dim=1)
    return (of_all - of_class).where(counts, 0).sum() / counts.sum().clamp_min(1)
