"""Prototypes: a class as one point in feature space, or as several, of one client and of the federation.

| function | paper | what |
|---|---|---|
| `local_prototypes`, `counted_prototypes` | FedCoda, Eq. 4 | class means of a client's features |
| `global_prototypes` | FedCoda, Eqs. 5, 25-26 | one prototype for each class from those of the clients |
| `clustered`, `regrouped` | FPL, FedPLVM | several prototypes for each class by FINCH, of a client and of all |
| `padded`, `class_means` | | several prototypes a class as tensors whose shape seldom changes; their mean |

Symbols: K clients, C classes, d feature dimensions, P prototypes of all classes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.client import Batch
from fedkeel.formulas.clustering import cluster_means


def local_prototypes(model: nn.Module, batches: Iterable[Batch], num_classes: int) -> tuple[Tensor, Tensor]:
    """The mean feature of each class over the batches, with the model in evaluation mode.

        p_c = 1/|D_c| sum_{x in D_c} f(x)

    Returns:
        Prototypes (C, d), zero for a class that is not there, and which classes are there, (C,), bool.
    """
    means, counts = counted_prototypes(model, batches, num_classes)
    return means, counts > 0


@torch.no_grad()
def counted_prototypes(model: nn.Module, batches: Iterable[Batch], num_classes: int) -> tuple[Tensor, Tensor]:
    """`local_prototypes` with the number of samples of each class, (C,), float32."""
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
    return means.float(), count.float()


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
