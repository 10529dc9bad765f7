"""Directions of features and how similar they are, in a precision that suffices for losses, also under autocast."""

import torch
from torch import Tensor

__all__ = ["cosines", "directions"]

SHORTEST = 1e-8
"""A feature vector shorter than this has no direction."""


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosine similarity of every row of `a` (N, d) with every row of `b` (M, d): (N, M).

    >>> cosines(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    tensor([[1., 0.]])
    """
    return product(directions(a), directions(b).T)


def directions(rows: Tensor) -> Tensor:
    """Rows scaled to length 1. A zero row stays zero and has zero gradient; `F.normalize` would give it 1e12.

    >>> directions(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows = precise(rows)
    squared = rows.square().sum(dim=1, keepdim=True)
    has_one = squared > SHORTEST**2
    return rows.where(has_one, 0) * squared.where(has_one, 1).rsqrt()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product that autocast leaves in the precision of its inputs."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def precise(x: Tensor) -> Tensor:
    """Half precision becomes float32; the rest stays as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
