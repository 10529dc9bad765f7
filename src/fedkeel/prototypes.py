"""Prototypes: a class as one point in feature space, of one client and of the federation.

| function | paper | what |
|---|---|---|
| `local_prototypes` | FedCoda, Eq. 4 | class means of a client's features |
| `global_prototypes` | FedCoda, Eqs. 5, 25-26 | one prototype for each class from those of the clients |

Symbols: K clients, C classes, d feature dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.parties import Batch


@torch.no_grad()
def local_prototypes(model: nn.Module, batches: Iterable[Batch], num_classes: int) -> tuple[Tensor, Tensor]:
    """The mean feature of each class over the batches, with the model in evaluation mode.

        p_c = 1/|D_c| sum_{x in D_c} f(x)

    Returns:
        Prototypes (C, d), zero for a class that is not there, and which classes are there, (C,), bool.
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
    return means.float(), count > 0


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
