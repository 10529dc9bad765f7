"""Means of tensors that a share of wrong clients does not move: pure functions; the rules are in `trust.robust`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedkeel.core.state import Tensors, is_continuous


def clipped(states: Sequence[Tensors], origin: Tensors, norm: float | None = None) -> list[Tensors]:
    """Each state moved towards `origin` until it is no further away than `norm`, by default their median distance.

        x_i <- x + min(1, norm / ||x_i - x||) (x_i - x)

    A state that is near enough stays as it is, bit for bit. Every entry lies between x and x_i, so a variance does not
    become negative. Integers stay.

    >>> clipped([{"w": torch.tensor([3.0, 4.0])}], origin={"w": torch.zeros(2)}, norm=1.0)
    [{'w': tensor([0.6000, 0.8000])}]
    """
    floating = [name for name, tensor in origin.items() if is_continuous(tensor)]
    if not floating:
        return list(states)
    distances = [_distance(given, origin, floating) for given in states]
    bound = norm if norm is not None else float(torch.tensor(distances, dtype=torch.float64).quantile(0.5))
    result = []
    for given, distance in zip(states, distances, strict=True):
        if distance > bound:
            scale = bound / distance
            given = given | {name: torch.lerp(origin[name], given[name], scale) for name in floating}
        result.append(given)
    return result


def _distance(given: Tensors, origin: Tensors, names: Sequence[str]) -> float:
    squares = [(given[name].double() - origin[name].double()).square().sum() for name in names]
    return float(torch.stack(squares).sum().sqrt())


def median(tensors: Sequence[Tensor]) -> Tensor:
    """The median of every entry over K tensors of one shape; of an even number, the mean of the middle two.

    >>> median([torch.tensor([1.0, 9.0]), torch.tensor([2.0, -9.0]), torch.tensor([300.0, 0.0])])
    tensor([2., 0.])
    """
    return trimmed_mean(tensors, (len(tensors) - 1) // 2)


def trimmed_mean(tensors: Sequence[Tensor], cut: int) -> Tensor:
    """The mean of every entry over K tensors of one shape, without its `cut` smallest and `cut` largest values.

    Integers take the largest of those that are left.

    >>> trimmed_mean([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([-80.0])], cut=1)
    tensor([1.5000])
    """
    left = torch.stack(list(tensors)).sort(dim=0).values[cut : len(tensors) - cut]
    if not is_continuous(tensors[0]):
        return left[-1]
    # Around the smallest: the mean of equal numbers is that number, bit for bit.
    least = left[0].double()
    return (least + (left.double() - least).mean(dim=0)).to(tensors[0].dtype)


def trimmed_number(share: float, clients: int) -> int:
    """How many are left out at either end, see `trimmed_mean`: `share` of them, rounded down. 0.3 * 10 is below 3."""
    return int(share * clients + 1e-9)


def krum_scores(states: Sequence[Tensors], liars: int) -> Tensor:
    """For each of K states, the sum of the squared distances to its K - liars - 2 nearest others, (K,), float64.

    Reference: Blanchard et al. 2017, Section 4.

    >>> krum_scores([{"w": torch.tensor([x])} for x in (0.0, 1.0, 2.0, 90.0)], liars=1)
    tensor([1.0000e+00, 1.0000e+00, 1.0000e+00, 7.7440e+03], dtype=torch.float64)
    """
    count = len(states)
    squares = torch.zeros(count, count, dtype=torch.float64)
    for name, tensor in states[0].items():
        if is_continuous(tensor) and tensor.numel():
            rows = torch.stack([given[name].flatten().float() for given in states])
            # Without the product of matrices: beside one huge row it would lose the distances of the others.
            distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
            squares += distances.double().square().cpu()
    squares.fill_diagonal_(float("inf"))
    neighbours = min(max(count - liars - 2, 1), count - 1)
    return squares.sort(dim=1).values[:, :neighbours].sum(dim=1)
